"""What cannot be built is refused: in words, on every rank, before a collective could hang; the model stays whole."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.properties import fixtures
from harness.properties.property import ask, ask_thorough, expect, holds, refused, same
from harness.properties.training import Pair
from harness.properties.values import three_groups

ADAMW = fixtures.ADAMW


def odd():
    return fixtures.seeded(fixtures.OddModel)


def with_graph():
    model = odd()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    return model


def raising(error_at: int):
    """An optimizer class that cannot be built the `error_at`-th time: the fourth is when the model is cut already."""
    calls = []

    def optimizer_cls(params):
        calls.append(1)
        if len(calls) >= error_at:
            raise ZeroDivisionError("of the caller's own")
        return ADAMW(params)

    return optimizer_cls


# What cannot work, as a function of the engine and of a model, and words of the error: ours, torch's or Python's.
CONSTRUCTIONS = (
    (lambda e, m: e(m.requires_grad_(False), ADAMW), ("empty parameter list",)),
    (lambda e, m: e(nn.Linear(3, 3, device="meta"), ADAMW), ("'weight'", "meta")),
    (lambda e, m: e(m, lambda shards: torch.optim.AdamW(odd().parameters())), ("not this rank's pieces",)),
    (lambda e, m: e("a model", ADAMW), ("str",)),
    (lambda e, m: e(nn.LazyLinear(3), ADAMW), ("uninitialized",)),
    (lambda e, m: e(m, torch.optim.SGD(odd().parameters())), ("SGD",)),
    (lambda e, m: e(m, ADAMW, group=[0, 1]), ("list",)),
    (lambda e, m: e(nn.Sequential(m, torch.jit.script(nn.Linear(3, 3))), ADAMW), ("'1'", "scripted")),
    (lambda e, m: e(m, torch.optim.Adafactor), ("Adafactor", "AdamW")),
    (lambda e, m: e(nn.Linear(3, 3, bias=False), torch.optim.Muon), ("a flat part of a tensor", "AdamW")),
    (lambda e, m: e(m, raising(1)), ("of the caller's own",)),
    (lambda e, m: e(m, raising(2)), ("of the caller's own",)),
    (lambda e, m: e(m, raising(4)), ("of the caller's own",)),
    (lambda e, m: e(with_graph(), ADAMW), ("Sparse",)),
    (lambda e, m: e(nn.Sequential(nn.Embedding(11, 3, max_norm=0.1)), ADAMW), ("'0'", "max_norm")),
    (lambda e, m: e(nn.parallel.DistributedDataParallel(m), ADAMW), ("DistributedDataParallel", ".module")),
)
OPTIONS = {"param_dtype": torch.int8, "reduce_dtype": torch.int8}
OF_UNITS = {"prefetch": -1}
UNITS = (
    (lambda m: [odd().blocks[0]], ("not a module of the model",)),
    (lambda m: [m.blocks[0], m.blocks[0].up], ("'blocks.0'", "'blocks.0.up'", "overlap")),
    (lambda m: [m.blocks[0].up, m.blocks[0]], ("'blocks.0'", "'blocks.0.up'", "overlap")),
    (lambda m: [m.blocks[0], m.blocks[0]], ("overlap",)),
    (lambda m: ["blocks.0"], ("'blocks.0'", "not a module of the model")),
    (lambda m: 3, ("int",)),
)
GROUPS = (
    (lambda m: three_groups(m)[:2], ("'head.weight'", "'head.bias'", "in no group")),
    (lambda m: [*three_groups(m), {"params": [m.head.weight]}], ("more than one parameter group",)),
    (lambda m: [*three_groups(m), {"params": [m.frozen]}], ("(5,)",)),
    (lambda m: [{"params": [("theirs", torch.zeros(2))]}], ("param_groups", "(2,)")),
)


def all_of(model: nn.Module):
    """The objects, how many hooks they have, and their values."""
    params = {
        name: (id(p), type(p), len(vars(p)), bool(p._post_accumulate_grad_hooks))
        for name, p in model.named_parameters()
    }
    return params, fixtures.hooks_on(model), {name: value.tolist() for name, value in model.state_dict().items()}


@holds("misuse", ask(ranks=3, more_ranks=1), of_stages=True)
def constructions_that_cannot_work_are_refused(engine):
    """Models, optimizers, groups and options that cannot work are refused by name, and the model stays as it was."""
    refusals = [*CONSTRUCTIONS]
    refusals += [(lambda e, m, of=of: e(m, ADAMW, param_groups=of(m)), words) for of, words in GROUPS]
    if engine.like == "zero3":
        refusals += [(lambda e, m, of=of: e(m, ADAMW, units=of(m)), words) for of, words in UNITS]
    for name, value in {**OPTIONS, **(OF_UNITS if engine.like == "zero3" else {})}.items():
        refusals.append((lambda e, m, own={name: value}: e(m, ADAMW, **own), (name, repr(value))))
    for build, words in refusals:
        model = odd()
        before = all_of(model)
        refused(lambda build=build, model=model: build(engine, model), *words, error=Exception)
        same("the model after the refusal", all_of(model), before)
    plain = odd()
    for module in (plain, model):  # trained by plain PyTorch first, and then by an engine
        optimizer = ADAMW([param for param in module.parameters() if param.requires_grad])
        F.cross_entropy(module(fixtures.token_batch(0, 0)[0]), fixtures.token_batch(0, 0)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    pair = Pair(engine, (plain, model))
    pair.alike()
    refused(lambda: pair.trained and engine(model, ADAMW), "sharded by another engine")


# What the last rank has otherwise: it makes its collectives other than those of the others.
CHANGES = [
    lambda model: {"find_unused": True},
    lambda model: {"reduce_dtype": torch.float32},
    lambda model: {"param_dtype": torch.bfloat16},
    lambda model: setattr(model.head.bias, "requires_grad", False),
    lambda model: setattr(model.head.bias, "data", model.head.bias.data.float()),
    lambda model: model.register_buffer("more", torch.zeros(2)),
    lambda model: setattr(model, "shift", torch.zeros(1, 5)),
    lambda model: model.blocks.extend([fixtures.OddBlock(5, 7).double()]) and None,
]
IN_BUCKETS = [lambda model: {"bucket_mb": 0}]
IN_UNITS = [
    lambda model: {"units": []},
    lambda model: {"prefetch": 2},
    lambda model: {"reshard_after_forward": False},
    lambda model: {"units": [model.blocks[1]]},
]


@holds("misuse", ask(ranks=3), of_stages=True)
def what_is_wrong_on_one_rank_is_an_error_on_all(engine):
    """A model or an optimizer that is bad on one rank, or other options there: every rank says where."""
    last = dist.get_rank() == dist.get_world_size() - 1
    number = dist.get_world_size() - 1
    here = f"[{number}]"
    refused(lambda: engine(odd().requires_grad_(not last), ADAMW), f"rank {number}: ", "empty parameter list")
    for error_at in (1, 2, 4):
        optimizer_cls = raising(error_at) if last else ADAMW
        refused(partial(engine, odd(), optimizer_cls), f"rank {number}: ", "of the caller's own")
    refused(lambda: engine(odd(), torch.optim.AdamW if last else ADAMW), here, "another optimizer", error=ValueError)
    for change in [*CHANGES, *(IN_UNITS if engine.like == "zero3" else IN_BUCKETS)]:
        model = odd()
        options = (change(model) or {}) if last else {}
        refused(lambda model=model, options=options: engine(model, ADAMW, **options), here, "another model",
                error=ValueError)  # fmt: skip


# Optimizers of the user's own, by what they look at.


class Own(torch.optim.Optimizer):
    """Its step takes `factor(weight, gradient, all weights) * lr` of each gradient."""

    def __init__(self, params, factor, lr=0.01):
        self.factor = factor
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        everything = [param for group in self.param_groups for param in group["params"]]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * self.factor(param, param.grad, everything), alpha=float(group["lr"]))


def of_the_model(weight, gradient, everything):
    return 1 / torch.stack([param.grad.norm() for param in everything if param.grad is not None]).norm()


def clips_itself(weight, gradient, everything):
    """It looks at the norm only where that is large."""
    return (5 * of_the_model(weight, gradient, everything)).clamp(max=1)


LOOKS_AT_WHOLE = {
    "a trust ratio": lambda weight, gradient, _: weight.norm() / gradient.norm().clamp(min=1e-9),
    "the largest element": lambda weight, gradient, _: 1 / gradient.abs().amax() if gradient.numel() else 1,
    "the model's norm": of_the_model,
    "a large norm": clips_itself,
    "matrices": lambda weight, gradient, _: 1.0 if weight.ndim > 1 else 0.1,
    "rows": lambda weight, gradient, _: 1 / gradient.norm(dim=-1, keepdim=True) if gradient.ndim else 1,
    "the size": lambda weight, gradient, _: weight.numel() ** -0.5 if weight.numel() else 1,
}
BY_ELEMENT = {
    "signs": lambda weight, gradient, _: 1 / gradient.abs().clamp(min=1e-9),
    "weights": lambda weight, gradient, _: weight.abs().clamp(max=1),
    "chance": lambda weight, gradient, _: torch.rand_like(weight),
}


@holds("misuse", ask(lr=0.01), ask_thorough(lr=0.0), ask_thorough(lr=1e-9), of_stages=True)
def optimizers_that_look_at_whole_tensors_are_refused(engine, lr):
    """An optimizer whose step is another one on a part of a tensor is refused at the build, whatever it is called."""

    def optimizer_of(factor):
        return lambda params: Own(params, factor, lr)

    for what, factor in LOOKS_AT_WHOLE.items():
        said = refused(partial(engine, odd(), optimizer_of(factor)), "Own", "each element", error=ValueError)
        assert "SGD" in said, what
    model = odd()
    optimizer = optimizer_of(LOOKS_AT_WHOLE["a trust ratio"])
    refused(lambda: engine(model, optimizer, param_groups=three_groups(model)), "each element", error=ValueError)
    for factor in BY_ELEMENT.values():
        trained = engine(odd(), optimizer_of(factor))
        trained.training_step(*fixtures.own_tokens(0), F.cross_entropy)


@holds("misuse", of_stages=True)
def a_build_draws_no_random_numbers(engine):
    """What the user draws next is the same, whether an engine was built before or not."""
    torch.manual_seed(dist.get_rank())
    expected = torch.rand(3)
    torch.manual_seed(dist.get_rank())
    engine(odd(), lambda params: Own(params, BY_ELEMENT["chance"]))
    same("random numbers after the build", torch.rand(3), expected)


# Memory that two tensors of the model have together.


def tied_by_data(model):
    model.blocks[1].scale.data = model.blocks[0].scale.data
    return "'blocks.0.scale'", "'blocks.1.scale'"


def a_part_by_data(model):
    model.blocks[1].pair.data = model.head.weight.data[1, 2:4]
    return "'blocks.1.pair'", "'head.weight'"


def a_buffer_of_a_weight(model):
    model.head.register_buffer("seen", model.head.weight.detach()[0])
    return "'head.seen'", "'head.weight'"


def a_buffer_of_a_frozen_one(model):
    model.register_buffer("seen", model.frozen.detach(), persistent=False)
    return "'frozen'", "'seen'"


def overlapping(model):
    base = torch.randn(20, dtype=torch.float64)
    model.first, model.second = nn.Parameter(base[:12].view(3, 4)), nn.Parameter(base[10:])
    return "'first'", "'second'"


def interleaved_and_overlapping(model):
    base = torch.randn(5, 6, dtype=torch.float64)
    model.first, model.second = nn.Parameter(base[:, ::2]), nn.Parameter(base[:, 2:4])
    return "'first'", "'second'"


SHARED = (tied_by_data, a_part_by_data, a_buffer_of_a_weight, a_buffer_of_a_frozen_one, overlapping,
          interleaved_and_overlapping)  # fmt: skip


class Beside(fixtures.OddModel):
    """Parameters in one storage that share no element, and an old way to normalize, which keeps the weight's memory."""

    def __init__(self):
        super().__init__()
        base = torch.randn(6, 10)
        self.left, self.right = nn.Parameter(base[:, ::2]), nn.Parameter(base[:, 1::2])
        self.head = nn.utils.spectral_norm(self.head)
        self.register_buffer("a", torch.zeros(4))
        self.register_buffer("b", self.a[1:3])
        self.eval()  # the norm's own buffers stay as they are

    def forward(self, tokens):
        return super().forward(tokens) + (self.left * self.right).sum()


@holds("misuse", of_stages=True)
def memory_that_is_shared_before_the_build_is_refused(engine):
    """Two tensors of the model in one memory would be two after the build; views beside each other are right."""
    for share in SHARED:
        model = odd()
        words = share(model)
        refused(lambda model=model: engine(model, ADAMW), *words, "memory", error=ValueError)
    pair = Pair(engine, Beside, fixtures.SGD)
    pair.train(2)
    state = pair.trained.full_state_dict()
    for name in ("left", "right", "blocks.1.up.weight"):
        same(name, state[name], pair.plain.state_dict()[name], pair.atol)


# What only the optimizer's groups of the last rank have otherwise.


def grouped(model, lr=0.01, betas=(0.9, 0.99), moved=False, **options):
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    first = [param for name, param in trained if "blocks" in name or moved and name == "head.weight"]
    rest = [param for _, param in trained if all(param is not other for other in first)]
    return [{"params": first, "lr": lr, "betas": betas, **options}, {"params": rest, "weight_decay": 0.0}]


GROUPED = (
    {"lr": 0.02},
    {"lr": torch.tensor(0.02)},
    {"betas": (0.9, 0.98)},
    {"weight_decay": 0.2},
    {"maximize": True},
    {"moved": True},
)


@holds("misuse", ask(ranks=3), of_stages=True)
def groups_that_differ_between_ranks_are_refused(engine):
    """Another learning rate in one group, a tensor as one, or a parameter in another group: every rank says where."""
    last = dist.get_rank() == dist.get_world_size() - 1
    here = f"[{dist.get_world_size() - 1}]"
    for options in GROUPED:
        model, usual = odd(), {"lr": torch.tensor(0.01)} if torch.is_tensor(options.get("lr")) else {}
        groups = grouped(model, **(options if last else usual))
        refused(lambda m=model, g=groups: engine(m, ADAMW, param_groups=g), here, "another optimizer", error=ValueError)
    for lr in (0.02, torch.tensor(0.02)):
        own = torch.tensor(0.01) if torch.is_tensor(lr) else 0.01
        own = lr if last else own
        refused(lambda own=own: engine(odd(), lambda p: torch.optim.AdamW(p, lr=own)), here, "another optimizer",
                error=ValueError)  # fmt: skip
    model = odd()
    engine(model, ADAMW, param_groups=grouped(model, torch.tensor(0.01))).training_step(
        *fixtures.own_tokens(0), F.cross_entropy
    )


class OneBuffer(fixtures.OddModel):
    """Two modules that share a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.head.register_buffer("count", self.count)


@holds("misuse", ask("zero3"), of_stages=True)
def an_init_fn_that_raises_on_one_rank_is_an_error_on_all(engine):
    """The others hear of it, and the model is on `meta` as before: another try works, and fills each buffer once."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    with torch.device("meta"):
        model = OneBuffer()
    weight, names = model.blocks[1].up.weight, []

    def bad(name, tensor):
        if rank == last and name == "blocks.1.up.weight":
            raise ZeroDivisionError("of the caller's own")
        tensor.fill_(0.1)

    words = f"rank {last}: ", "of the caller's own"
    refused(lambda: engine(model, fixtures.MOMENTUM, init_fn=bad), *words)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.blocks[1].up.weight is weight and type(weight) is nn.Parameter and weight.requires_grad
    trained = engine(model, fixtures.MOMENTUM, init_fn=lambda name, tensor: (names.append(name), tensor.fill_(0.1)))
    expect(model.count is model.head.count, "the buffer of two modules", "one object", "two")
    same("how it is filled", [name for name in names if "count" in name], ["count"])
    trained.training_step(*fixtures.token_batch(0, rank), F.cross_entropy)
    state = trained.full_state_dict()
    assert not model.count.is_meta and not any(value.is_meta for value in state.values())
    trained.load_full_state_dict(state)
