"""What cannot be built is refused: in words, on every rank, before a collective could hang; the model stays whole."""

from functools import partial

import torch
from torch import nn

from zerolab.properties.fixtures import (
    ADAMW,
    OFFLOAD,
    SGD,
    OddBlock,
    OddModel,
    Pair,
    a_step,
    all_params,
    hooks_on,
    odd,
    plain_step,
    seeded,
    three_groups,
    trained_params,
)
from zerolab.properties.property import ask, ask_thorough, refused, same, stages_hold


def raising(error_at: int):
    """An optimizer class that cannot be built the `error_at`-th time: the fourth is when the model is cut already."""
    calls = []

    def optimizer_cls(params):
        calls.append(1)
        if len(calls) >= error_at:
            raise ZeroDivisionError("of the caller's own")
        return ADAMW(params)

    return optimizer_cls


RAISING = (1, 2, 4)


def constructions(model: nn.Module) -> list[tuple]:
    """What cannot work, as what is given otherwise than usual, and words of the error. torch refuses more."""
    block, meta = model.blocks[0], nn.Linear(3, 3, device="meta")
    scripted, matrix = torch.jit.script(nn.Linear(3, 3)), nn.Linear(3, 3, bias=False)
    others, strange, own = seeded(OddModel), torch.zeros(2), "of the caller's own"
    return [
        ({"model": meta}, "'weight'", "meta"),
        ({"model": nn.Sequential(model, scripted)}, "'1'", "scripted"),
        ({"model": nn.Sequential(nn.Embedding(11, 3, max_norm=0.1))}, "'0'", "max_norm"),
        ({"model": nn.parallel.DistributedDataParallel(others)}, "DistributedDataParallel", ".module"),
        ({"model": matrix, "optimizer_cls": torch.optim.Muon}, "a flat part of a tensor", "AdamW"),
        ({"optimizer_cls": torch.optim.Adafactor}, "Adafactor", "AdamW"),
        ({"optimizer_cls": lambda shards: ADAMW(others.parameters())}, "not this rank's pieces"),
        *[({"optimizer_cls": raising(error_at)}, own) for error_at in RAISING],
        ({"param_dtype": torch.int8}, "param_dtype", "torch.int8"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype", "torch.int8"),
        ({"param_groups": three_groups(model)[:2]}, "'head.weight'", "'head.bias'", "in no group"),
        ({"param_groups": [*three_groups(model), {"params": [model.frozen]}]}, "(5,)"),
        ({"param_groups": [{"params": [("theirs", strange)]}]}, "param_groups", "(2,)"),
        # Of ZeRO-3 alone:
        ({"prefetch": -1}, "prefetch", "-1"),
        ({"units": [others.blocks[0]]}, "not a module of the model"),
        ({"units": ["blocks.0"]}, "'blocks.0'", "not a module of the model"),
        ({"units": [block, block.up]}, "'blocks.0'", "'blocks.0.up'", "overlap"),
        ({"units": [block.up, block]}, "'blocks.0'", "'blocks.0.up'", "overlap"),
        ({"units": [block, block]}, "overlap"),
    ]


def all_of(model: nn.Module):
    """The objects, how many hooks they have, and their values."""
    params = {name: (id(param), type(param), len(vars(param))) for name, param in model.named_parameters()}
    return params, hooks_on(model), {name: value.tolist() for name, value in model.state_dict().items()}


@stages_hold("misuse", ask(ranks=3, more_ranks=1))
def constructions_that_cannot_work_are_refused(engine):
    """Models, optimizers, groups and options that cannot work are refused by name, and the model stays as it was."""
    model = seeded(OddModel)
    before = all_of(model)
    for given, *words in constructions(model):
        if engine.like == "zero3" or given.keys().isdisjoint(("prefetch", "units")):
            with refused(*words, error=Exception):
                engine(**{"model": model, "optimizer_cls": ADAMW, **given})
            same("the model after the refusal", all_of(model), before)
    plain = seeded(OddModel)
    for module in (plain, model):  # trained by plain PyTorch first, and then by an engine
        plain_step(module, ADAMW(trained_params(module)))
    pair = Pair(engine, (plain, model))
    pair.alike()
    with refused("sharded by another engine", error=ValueError):
        pair.trained and engine(model, ADAMW)


# What the last rank has otherwise, options or what is done to the model: its collectives, or its weights, would be
# others.
CHANGES = [
    {"find_unused": True},
    {"reduce_dtype": torch.float32},
    {"param_dtype": torch.bfloat16},
    OFFLOAD,
    lambda model: setattr(model.head.bias, "requires_grad", False),
    lambda model: setattr(model.head.bias, "data", model.head.bias.data.float()),
    lambda model: model.register_buffer("more", torch.zeros(2)),
    lambda model: setattr(model, "shift", torch.zeros(1, 5)),
    lambda model: model.blocks.extend([OddBlock(7).double()]) and None,
]
IN_BUCKETS = [{"bucket_mb": 0}]
IN_UNITS = [
    {"units": []},
    {"prefetch": 2},
    {"reshard_after_forward": False},
    lambda model: {"units": [model.blocks[1]]},
]
OF_GROUPS = (
    lambda first, second, third: third.update(lr=0.02),
    lambda first, second, third: first.update(lr=torch.tensor(0.03)),
    lambda first, second, third: third.update(betas=(0.9, 0.98)),
    lambda first, second, third: second.update(weight_decay=0.2),
    lambda first, second, third: third.update(maximize=True),
    lambda first, second, third: third["params"].append(second["params"].pop()),
)


def told_groups(model):
    """Groups of which a rate is a tensor, as torch's optimizers take it."""
    first, second, third = three_groups(model)
    return [{**first, "lr": torch.tensor(0.02)}, {**second, "params": list(second["params"])}, third]


@stages_hold("misuse", ask(ranks=3))
def what_is_wrong_on_one_rank_is_an_error_on_all(engine):
    """A model or an optimizer that is bad on one rank, or other groups or options there: every rank says where."""
    last = engine.size - 1
    mine = engine.rank == last
    with refused(f"rank {last}: ", "empty parameter list", error=ValueError):
        engine(seeded(OddModel).requires_grad_(not mine), ADAMW)
    for error_at in RAISING:
        with refused(f"rank {last}: ", "of the caller's own"):
            odd(engine, raising(error_at) if mine else ADAMW)
    builds = []
    for change in (*CHANGES, *(IN_UNITS if engine.like == "zero3" else IN_BUCKETS)):
        model = seeded(OddModel)
        options = {}
        if mine:
            options = change(model) or {} if callable(change) else change
        builds.append(partial(engine, model, ADAMW, **options))
    for change in OF_GROUPS:
        model = seeded(OddModel)
        groups = told_groups(model)
        if mine:
            change(*groups)
        builds.append(partial(engine, model, ADAMW, param_groups=groups))
    told, other = (partial(ADAMW, lr=torch.tensor(lr)) for lr in (0.01, 0.02))
    for bad, usual in ((torch.optim.AdamW, ADAMW), (partial(ADAMW, lr=0.02), ADAMW), (other, told)):
        builds.append(partial(odd, engine, bad if mine else usual))
    for build in builds:
        with refused(f"[{last}]", "another model", "another optimizer", error=ValueError):
            build()
    model = seeded(OddModel)
    trained = engine(model, ADAMW, param_groups=told_groups(model))
    a_step(trained)


# Optimizers of the user's own, by what they look at.


class Own(torch.optim.Optimizer):
    """Its step takes `factor(weight, gradient, all weights) * lr` of each gradient."""

    def __init__(self, params, factor, lr):
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
    return 1 / torch.stack([param.grad.norm() for param in everything]).norm()


def clips_itself(weight, gradient, everything):
    """It looks at the norm only where that is large."""
    return (5 * of_the_model(weight, gradient, everything)).clamp(max=1)


def trust_ratio(weight, gradient, _):
    return weight.norm() / gradient.norm().clamp(min=1e-9)


LOOKS_AT_WHOLE = (
    trust_ratio,
    of_the_model,
    clips_itself,
    # The largest element, matrices, rows, the size.
    lambda weight, gradient, _: 1 / gradient.abs().amax(),
    lambda weight, gradient, _: 1.0 if weight.ndim > 1 else 0.1,
    lambda weight, gradient, _: 1 / gradient.norm(dim=-1, keepdim=True) if gradient.ndim else 1,
    lambda weight, gradient, _: weight.numel() ** -0.5,
)
BY_ELEMENT = (  # signs, weights, chance
    lambda weight, gradient, _: 1 / gradient.abs().clamp(min=1e-9),
    lambda weight, gradient, _: weight.abs().clamp(max=1),
    lambda weight, gradient, _: torch.rand_like(weight),
)


@stages_hold("misuse", ask(lr=0.01), ask_thorough(lr=0.0), ask_thorough(lr=1e-9))
def optimizers_that_look_at_whole_tensors_are_refused(engine, lr):
    """An optimizer whose step is another one on a part of a tensor is refused at the build, whatever it is called."""
    for factor in LOOKS_AT_WHOLE:
        with refused("Own", "each element", "SGD", error=ValueError):
            odd(engine, partial(Own, factor=factor, lr=lr))
    model = seeded(OddModel)
    with refused("each element", error=ValueError):
        engine(model, partial(Own, factor=trust_ratio, lr=lr), param_groups=three_groups(model))
    for factor in BY_ELEMENT:
        random = torch.get_rng_state()
        trained = odd(engine, partial(Own, factor=factor, lr=lr))
        same("the state of the user's random numbers after the build", torch.get_rng_state(), random)
        a_step(trained)


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


@stages_hold("misuse")
def memory_that_is_shared_before_the_build_is_refused(engine):
    """Two tensors of the model in one memory would be two after the build; views beside each other are right."""
    for share in SHARED:
        model = seeded(OddModel)
        words = share(model)
        with refused(*words, "memory", error=ValueError):
            engine(model, ADAMW)
    Pair(engine, Beside, SGD).alike()
