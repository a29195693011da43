"""Every torch optimizer, built over the model's parameters, updates shards in the same way as whole parameters.

A stage takes over the optimizer that the user built. So rates, decays and groups can depend on a parameter's shape,
name or attributes. Here all of them are compared with plain torch in one process, in float64.
"""

import inspect
from functools import partial

import pytest
import torch
from helpers import WIDTH, Blocks, Pair, Tied, on_every_rank, raised_on_every_rank, seeded
from torch import optim
from torch.optim import lr_scheduler

from zero1 import ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3
from zerolab.engine import ZeRO1Engine, ZeRO2Engine, ZeRO3Engine

CHAPTERS = [ZeRO1, ZeRO2, ZeRO3]
ENGINES = [ZeRO1Engine, ZeRO2Engine, ZeRO3Engine]


def thorough(*values):
    return [pytest.param(*value, marks=pytest.mark.thorough) for value in values]


# (optimizer, its options). The first of each kind runs by default.
OPTIMIZERS = [
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.Adam, {"weight_decay": 0.1}),
    (optim.AdamW, {"weight_decay": 0.1}),
    (optim.Adagrad, {"initial_accumulator_value": 0.2, "lr_decay": 0.1, "weight_decay": 0.1}),
    (optim.RMSprop, {"momentum": 0.5, "centered": True, "weight_decay": 0.1}),
    (optim.Adadelta, {"weight_decay": 0.1}),
    (optim.Adamax, {"weight_decay": 0.1}),
    (optim.NAdam, {"weight_decay": 0.1}),
    (optim.RAdam, {"weight_decay": 0.1}),
    (optim.ASGD, {"weight_decay": 0.1, "t0": 1}),
    (optim.Rprop, {}),
]
FURTHER = [
    (optim.SGD, {"momentum": 0.9, "dampening": 0.2}),
    (optim.SGD, {"fused": True, "momentum": 0.9}),
    (optim.Adam, {"amsgrad": True}),
    (optim.Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (optim.Adam, {"fused": True, "amsgrad": True}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.AdamW, {"fused": True, "weight_decay": 0.1}),
    (optim.Adagrad, {"fused": True}),
    (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (optim.RAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
]
for kind, options in OPTIMIZERS:
    FURTHER += [(kind, options | {"maximize": True}), (kind, options | {"foreach": True})]


def trains_as_plain(stage, make_optimizer, model=Blocks, schedule=None, **options):
    pair = Pair(stage, seeded(model), make_optimizer, schedule=schedule, **options)
    pair.train(4)


@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize("kind, flags", OPTIMIZERS + thorough(*FURTHER))
@pytest.mark.parametrize("stage", ENGINES)
@on_every_rank
def test_engines(ranks, stage, kind, flags):
    trains_as_plain(stage, partial(kind, lr=0.01, **flags))


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind, flags", OPTIMIZERS + FURTHER)
@pytest.mark.parametrize("stage", CHAPTERS)
@on_every_rank
def test_chapters(ranks, stage, kind, flags):
    trains_as_plain(stage, partial(kind, lr=0.01, **flags))


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("kind, flags", OPTIMIZERS)
@pytest.mark.parametrize("stage", ENGINES)
@on_every_rank
def test_engines_on_more_ranks(ranks, stage, kind, flags):
    trains_as_plain(stage, partial(kind, lr=0.01, **flags), Tied)


# Groups. Each function gets the model's parameters and returns the groups of an optimizer.


def by_shape(params):
    params = list(params)
    return [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": 0.3},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]


def by_name(params):
    names = [name for name, _ in Blocks().named_parameters()]
    groups = {}
    for name, param in zip(names, params):
        groups.setdefault(name.split(".")[0], []).append(param)
    return [{"params": members, "lr": 0.01 * (1 + index)} for index, members in enumerate(groups.values())]


def by_fan_in(params):
    """As muP does: one group per parameter, whose rate depends on its shape."""
    return [{"params": [param], "lr": 0.05 / (param.shape[-1] if param.ndim else 1)} for param in params]


def by_mark(params):
    params = list(params)
    for param in params[::2]:
        param._no_weight_decay = True
    marked = [param for param in params if getattr(param, "_no_weight_decay", False)]
    rest = [param for param in params if not hasattr(param, "_no_weight_decay")]
    return [{"params": marked, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.5}]


def one_tiny_group(params):
    """A group with no elements on most ranks."""
    *rest, last = params
    return [{"params": rest}, {"params": [last], "lr": 0.1}]


def named(params):
    return [(f"weight {index}", param) for index, param in enumerate(params)]


GROUPS = [by_shape, by_name, by_fan_in, by_mark, one_tiny_group, named]
KINDS = {
    "SGD": partial(optim.SGD, lr=0.02, momentum=0.9),
    "AdamW": partial(optim.AdamW, lr=0.01),
    "Adagrad": partial(optim.Adagrad, lr=0.01),
    "fused": partial(optim.AdamW, lr=0.01, fused=True),
}


@pytest.mark.parametrize("ranks", [2, *thorough([3], [4])])
@pytest.mark.parametrize("kind", ["AdamW", *thorough(["SGD"], ["Adagrad"], ["fused"])])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("stage", ENGINES)
@on_every_rank
def test_groups(ranks, stage, groups, kind):
    trains_as_plain(stage, lambda params: KINDS[kind](groups(params)))


# Schedulers and rates.


def warm_up(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 5)


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6)


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)


@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize(
    "before, after",
    [
        (warm_up, None),
        (None, warm_up),
        (cosine, warm_up),
        *thorough((one_cycle, None), (None, one_cycle), (None, cosine)),
    ],
)
@pytest.mark.parametrize("stage", CHAPTERS + ENGINES)
@on_every_rank
def test_schedulers_built_before_and_after_the_stage(ranks, stage, before, after):
    make_optimizer = partial(optim.AdamW, lr=0.02)
    if stage in ENGINES:
        make_optimizer = grouped_adamw
    trains_as_plain(stage, make_optimizer, schedule=(before, after))


def grouped_adamw(params):
    return optim.AdamW(by_shape(params), lr=0.02)


@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize("flags", [{}, *thorough([{"fused": True}], [{"foreach": False}])])
@pytest.mark.parametrize("schedule", [(None, None), (warm_up, None), (None, warm_up)])
@pytest.mark.parametrize("stage", CHAPTERS + ENGINES)
@on_every_rank
def test_a_rate_that_is_a_tensor(ranks, stage, schedule, flags):
    make_optimizer = partial(rate_in_a_tensor, **flags)
    trains_as_plain(stage, make_optimizer, schedule=schedule)


def rate_in_a_tensor(params, **flags):
    return optim.AdamW(params, lr=torch.tensor(0.02, dtype=torch.float64), **flags)


# Optimizers that cannot work.


@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize("stage", CHAPTERS + ENGINES)
@on_every_rank
def test_optimizers_that_look_at_whole_tensors_are_refused_by_name(ranks, stage):
    model = seeded(Blocks)
    matrices = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    raised_on_every_rank(ValueError, "LBFGS", stage, model, optim.LBFGS(model.parameters()))
    raised_on_every_rank(ValueError, "Adafactor", stage, model, optim.Adafactor(model.parameters()))
    if hasattr(optim, "Muon"):  # torch 2.9 and newer
        raised_on_every_rank(ValueError, "Muon", stage, matrices, optim.Muon(matrices.parameters()))
    trains_as_plain(stage, KINDS["SGD"])  # nothing is left that would disturb another stage


@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize(
    "kind, flags",
    [(optim.AdamW, {"capturable": True}), (optim.AdamW, {"differentiable": True}), (optim.SparseAdam, {})],
)
@pytest.mark.parametrize("stage", ENGINES)
@on_every_rank
def test_what_torch_refuses_here_has_torchs_error(ranks, stage, kind, flags):
    """`capturable` needs a GPU, `differentiable` needs parameters that are not leaves, SparseAdam sparse gradients."""
    pair = Pair(stage, seeded(Blocks), partial(kind, **flags))
    pair.backward(0)
    messages = []
    for step in (pair.optimizers[0].step, pair.engine.step):
        try:
            step()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    assert len(messages) == 2 and messages[0] == messages[1], messages


def test_every_optimizer_of_torch_is_tried_here():
    tried = {kind.__name__ for kind, _ in OPTIMIZERS} | {"LBFGS", "Adafactor", "Muon", "SparseAdam"}
    exists = {name for name, each in vars(optim).items() if inspect.isclass(each) and issubclass(each, optim.Optimizer)}
    assert exists - {"Optimizer"} <= tried
