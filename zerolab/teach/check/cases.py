"""The cases in which a file is tried: small trainings, with other data on each rank, and what is rare in them."""

import functools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from zerolab.properties import fixtures
from zerolab.teach import written

# With a large eps the update depends on the gradient's size: a sum in place of a mean shows.
ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
WIDTH = 48


@dataclass(frozen=True, eq=False)
class Case:
    """`act(engine class, case, **given)` trains a little. `at` is what a finding says of it."""

    act: Callable
    at: str = ""
    given: dict = field(default_factory=dict)
    only: tuple[str, ...] = ()  # names of exercises, or of functions; none: all
    memory: bool = False  # count bytes
    refused: bool = False  # the chapter raises a RuntimeError
    within: str = "all"  # the group: of all ranks; of this rank "alone"; or a "silent" one, that moves nothing
    seed: int = 0

    @property
    def group(self):
        return getattr(groups_of(dist.group.WORLD), self.within)

    @property
    def shard_bytes(self) -> int:
        return 4 * (WIDTH * WIDTH + WIDTH) // dist.get_world_size() + 256


@functools.cache
def groups_of(world) -> types.SimpleNamespace:
    """None is the default group, so that a collective that was given none shows."""
    patience = timedelta(seconds=20)  # with another rank, in a collective
    new = partial(dist.new_group, group_desc="for all checks", timeout=patience)
    alone = [new([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return types.SimpleNamespace(all=new(), alone=alone, silent=fixtures.silent_group())


def build(cls, case: Case, model: Callable, dtype=torch.float64, bucket_bytes: int = 320):
    """An engine. Each rank builds a model with other weights, of which the first rank's are the right ones."""
    options = {} if cls.__name__ == "ZeRO3" else {"bucket_mb": bucket_bytes / 2**20}
    seed = 100 * case.seed + dist.get_rank()
    made = fixtures.seeded(model, seed, dtype)
    return cls(made, ADAMW(made.parameters()), group=case.group, **options)


def tokens(case: Case, step: int):
    return fixtures.token_batch(step + 10 * case.seed, dist.get_rank())


def backward(engine, case: Case, step: int = 0) -> None:
    inputs, targets = tokens(case, step)
    F.cross_entropy(engine(inputs), targets).backward()


def one_weight_of(more: bool) -> nn.Module:
    """Its one bucket is so small that all ranks but the first own only padding."""
    layers = [nn.Linear(2, 1, bias=False)]
    if more:
        layers.append(nn.Linear(1, 40))
    return nn.Sequential(*layers)


odd_model = partial(fixtures.OddModel, frozen_block=1)


class BiasLast(fixtures.OddModel):
    """Its last addition saves nothing, so the bias's gradient is the first sign of a backward."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, inputs):
        return super().forward(inputs) + self.bias


MODELS = vars(fixtures) | {
    "OddModel": odd_model,
    "BiasLast": BiasLast,
    "TwoCheckpointed": partial(fixtures.Checkpointed, 2),
}

# What is done.


def two_steps(cls, case: Case, dtype: str = "float64", model: str = "OddModel") -> None:
    """One backward before the first step, two before the second, an evaluation in between."""
    engine = build(cls, case, MODELS[model], getattr(torch, dtype))
    engine.training_step(*tokens(case, 0), F.cross_entropy)
    with torch.no_grad():
        engine(tokens(case, 1)[0])
    backward(engine, case, 2)
    engine.training_step(*tokens(case, 3), F.cross_entropy)


def crossing(cls, case: Case) -> None:
    """Every other rank runs the layers in the opposite order: so their gradients are finished."""
    engine = build(cls, case, fixtures.Lanes)
    if dist.get_rank() % 2:
        engine.model.way = engine.model.way[::-1]
    for step in range(2):
        inputs, targets = fixtures.vector_batch(step, dist.get_rank(), 8, torch.float64)
        engine.training_step(inputs, targets, F.mse_loss)


def one_weight(cls, case: Case, more: bool = True, clip: bool = False) -> None:
    engine = build(cls, case, partial(one_weight_of, more))
    inputs = fixtures.vector_batch(case.seed, dist.get_rank(), 2, torch.float64)[0]
    for _ in range(2):
        engine(inputs).square().sum().backward()
        if clip:
            engine.clip_grad_norm_(0.01)
        engine.step()
        engine.zero_grad()


def freed_unused(cls, case: Case) -> None:
    engine = build(cls, case, odd_model)
    for unit in engine.units:
        unit.start_gather()
        unit.free()


def no_backward(cls, case: Case) -> None:
    engine = build(cls, case, odd_model)
    engine.training_step(*tokens(case, 0), F.cross_entropy)
    engine.step()


def replaced_gradients(cls, case: Case) -> None:
    """Gradients that autograd made anew, because somebody has dropped the views of the buffer."""
    engine = build(cls, case, odd_model)
    engine.training_step(*tokens(case, 0), F.cross_entropy)
    engine.model.zero_grad()
    backward(engine, case, 1)
    engine.step()


def clipping(cls, case: Case, max_norm: float = 0.05, norm_type: float = 2.0) -> None:
    engine = build(cls, case, odd_model)
    backward(engine, case)
    engine.clip_grad_norm_(max_norm, norm_type)
    engine.step()


def clipping_what_is_no_number(cls, case: Case, norm_type: float = 2.0) -> None:
    for rank, value in product(range(case.group.size()), (math.nan, math.inf)):
        engine = build(cls, case, odd_model)
        backward(engine, case)
        engine.reduce_gradients()
        if dist.get_rank() == rank:
            engine.buckets[0].shard.grad[0] = value
        engine.clip_grad_norm_(0.05, norm_type)


def count_bytes(cls, case: Case) -> None:
    engine = build(cls, case, partial(fixtures.Stack, 6, WIDTH), torch.float32, 4 * (WIDTH * WIDTH + WIDTH))
    for step in range(2):
        inputs, targets = fixtures.vector_batch(step, dist.get_rank(), WIDTH)
        engine.training_step(inputs, targets, F.mse_loss)


@functools.cache
def seeded_cases(seed: int) -> list[Case]:
    """What cases.toml has, each once."""
    rows = written.beside(__file__)["case"]
    return [Case(**{**row, "act": globals()[row["act"]], "seed": seed}) for row in rows]


def cases_of(name: str, where: str, seed: int = 0) -> list[Case]:
    """The cases for a function of an exercise, or for the whole file."""
    function = where.rpartition(".")[2]
    return [case for case in seeded_cases(seed) if not case.only or {name, function} & {*case.only}]
