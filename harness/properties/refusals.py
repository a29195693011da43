"""What cannot be built is refused: in words, on every rank, before a collective could hang; the model stays whole."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.properties.fixtures import (
    ADAMW,
    SGD,
    OddBlock,
    OddModel,
    all_params,
    hooks_on,
    own_tokens,
    seeded,
    token_batch,
)
from harness.properties.property import ask, ask_thorough, holds, refused, same
from harness.properties.training import Pair
from harness.properties.values import three_groups


def odd():
    return seeded(OddModel)


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


# What cannot work, as a function of the engine and of a model, and words of the error.
CONSTRUCTIONS = (
    (lambda e, m: e(m.requires_grad_(False), ADAMW), ("empty parameter list",)),
    (lambda e, m: e(nn.Linear(3, 3, device="meta"), ADAMW), ("'weight'", "meta")),
    (lambda e, m: e(m, lambda shards: torch.optim.AdamW(odd().parameters())), ("not this rank's pieces",)),
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
    return params, hooks_on(model), {name: value.tolist() for name, value in model.state_dict().items()}


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
        F.cross_entropy(module(token_batch(0, 0)[0]), token_batch(0, 0)[1]).backward()
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
    lambda model: model.blocks.extend([OddBlock(5, 7).double()]) and None,
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
        everything = all_params(self)
        for param in everything:
            if param.grad is not None:
                factor = self.factor(param, param.grad, everything)
                param.sub_(param.grad * factor, alpha=float(self.param_groups[0]["lr"]))


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
        random = torch.get_rng_state()
        trained = engine(odd(), optimizer_of(factor))
        same("the state of the user's random numbers after the build", torch.get_rng_state(), random)
        trained.training_step(*own_tokens(0), F.cross_entropy)


# Memory that two tensors of the model have together.


def tied_by_data(model):
    model.blocks[1].scale.data = model.blocks[0].scale.data
    return "'blocks.0.scale'", "'blocks.1.scale'"


def a_part_by_data(model):
    model.blocks[1].pair.data = model.head.weight.data[1, 2:4]
    return "'blocks.1.pair'", "'head.weight'"


def a_buffer_of_a_frozen_one(model):
    model.register_buffer("seen", model.frozen.detach(), persistent=False)
    return "'frozen'", "'seen'"


def interleaved_and_overlapping(model):
    base = torch.randn(5, 6, dtype=torch.float64)
    model.first, model.second = nn.Parameter(base[:, ::2]), nn.Parameter(base[:, 2:4])
    return "'first'", "'second'"


SHARED = (tied_by_data, a_part_by_data, a_buffer_of_a_frozen_one, interleaved_and_overlapping)


class Beside(OddModel):
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
    pair = Pair(engine, Beside, SGD)
    pair.train(2)
    state = pair.trained.full_state_dict()
    for name in ("left", "right", "blocks.1.up.weight"):
        same(name, state[name], pair.plain.state_dict()[name], pair.atol)


# What only the optimizer's groups of the last rank have otherwise.


def told_groups(model):
    """Groups of which a rate is a tensor, as torch's optimizers take it."""
    first, second, third = three_groups(model)
    return [{**first, "lr": torch.tensor(0.02)}, {**second, "params": list(second["params"])}, third]


REGROUPED = (
    lambda first, second, third: third.update(lr=0.02),
    lambda first, second, third: first.update(lr=torch.tensor(0.03)),
    lambda first, second, third: third.update(betas=(0.9, 0.98)),
    lambda first, second, third: second.update(weight_decay=0.2),
    lambda first, second, third: third.update(maximize=True),
    lambda first, second, third: third["params"].append(second["params"].pop()),
)


@holds("misuse", ask(ranks=3), of_stages=True)
def groups_that_differ_between_ranks_are_refused(engine):
    """Another learning rate in one group, a tensor as one, or a parameter in another group: every rank says where."""
    last, refusals = dist.get_rank() == dist.get_world_size() - 1, []
    for change in REGROUPED:
        model = odd()
        groups = told_groups(model)
        if last:
            change(*groups)
        refusals.append(partial(engine, model, ADAMW, param_groups=groups))
    for usual, other in ((0.01, 0.02), (torch.tensor(0.01), torch.tensor(0.02))):
        refusals.append(partial(engine, odd(), partial(torch.optim.AdamW, lr=other if last else usual)))
    for build in refusals:
        refused(build, f"[{dist.get_world_size() - 1}]", "another optimizer", error=ValueError)
    model = odd()
    trained = engine(model, ADAMW, param_groups=told_groups(model))
    trained.training_step(*own_tokens(0), F.cross_entropy)
