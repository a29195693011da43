"""The cases in which a file is tried: small trainings, with different data on each rank, and unusual models."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.nn import functional as F

from zerolab.run import process_group
from zerolab.teach.check import models
from zerolab.teach.check.findings import Differs

WIDTH = 48  # of the layers whose bytes are counted


@dataclass(frozen=True, eq=False)
class Case:
    """`train(cls, group, seed)` trains a little with an engine class. `at` is how a finding describes the case.

    With `memory` bytes are counted and not values, in a group that moves nothing, because gloo keeps its own buffers.
    With `alone` the group has only this rank.
    """

    train: Callable
    at: str = ""
    memory: bool = False
    alone: bool = False

    @property
    def group(self) -> dist.ProcessGroup:
        groups = groups_of(dist.group.WORLD)
        if self.memory:
            return groups.silent
        return groups.alone if self.alone else groups.everyone


@dataclass(frozen=True)
class Groups:
    everyone: dist.ProcessGroup
    alone: dist.ProcessGroup  # this rank only
    silent: dist.ProcessGroup  # moves nothing


@functools.cache
def groups_of(world: dist.ProcessGroup) -> Groups:
    """The groups of all cases. None of them is the default group, so that a collective that was given none shows.

    gloo waits in a reduce-scatter for a copy of its input, and lets go of buffers a moment after `wait()`. So the exact
    bytes of what an engine keeps alive are counted in the `silent` group.
    """
    patience = timedelta(seconds=20)  # for another rank, in a collective
    new = partial(dist.new_group, group_desc="for all checks", timeout=patience)
    alone = [new([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    silent = dist.new_group(backend="fake", group_desc="silent")
    return Groups(new(), alone, silent)


def build(cls, group, seed: int, make=models.Odd, dtype=torch.float64, bucket_bytes=320, optimizer=None, **options):
    """An engine. Each rank builds a model with different weights. All must start with rank 0's weights."""
    if cls.__name__ != "ZeRO3" and bucket_bytes is not None:
        options["bucket_mb"] = bucket_bytes / 2**20
    model = models.seeded(make, 100 * seed + dist.get_rank(), dtype)
    # With a large eps the update depends on the gradient's size, so a sum in place of a mean shows.
    optimizer = optimizer or partial(torch.optim.AdamW, lr=0.01, eps=1e-3)
    return cls(model, optimizer(model.parameters()), group=group, **options)


def tokens(seed: int, step: int):
    return models.tokens(step + 10 * seed, dist.get_rank())


def backward(engine, seed: int, step: int = 0) -> None:
    inputs, targets = tokens(seed, step)
    F.cross_entropy(engine(inputs), targets).backward()


def must_raise(what: str, function: Callable) -> None:
    """Raises `Differs` unless `function()` raises a RuntimeError, and not because of another rank or a blank."""
    try:
        function()
    except NotImplementedError:
        raise
    except RuntimeError as error:
        if process_group.lost(str(error)):
            raise
    else:
        raise Differs(what, "a RuntimeError", "no error")


# The trainings.


def two_steps(cls, group, seed: int, **options) -> None:
    """One backward before the first step, two before the second, an evaluation in between."""
    engine = build(cls, group, seed, **options)
    engine.training_step(*tokens(seed, 0), F.cross_entropy)
    with torch.no_grad():
        engine(tokens(seed, 1)[0])
    backward(engine, seed, 2)
    engine.training_step(*tokens(seed, 3), F.cross_entropy)


def crossing(cls, group, seed: int) -> None:
    """Every other rank runs the layers in the opposite order, so their gradients are finished in other orders."""
    engine = build(cls, group, seed, models.Lanes)
    if dist.get_rank() % 2:
        engine.model.way.reverse()
    for step in range(2):
        inputs, targets = models.vectors(step + 10 * seed, dist.get_rank(), 8, 8)
        engine.training_step(inputs, targets, F.mse_loss)


def one_weight(cls, group, seed: int, more: bool = True) -> None:
    engine = build(cls, group, seed, partial(models.OneWeight, more))
    inputs = models.vectors(seed, dist.get_rank(), 2)[0]
    for _ in range(2):
        engine(inputs).square().sum().backward()
        engine.step()
        engine.zero_grad()


def freed_unused(cls, group, seed: int) -> None:
    engine = build(cls, group, seed)
    for unit in engine.units:
        unit.start_gather()
        unit.free()


def replaced_gradients(cls, group, seed: int) -> None:
    """ZeRO-1 refuses a param.grad that is not in its bucket: each parameter's, and a step goes on after it."""
    engine = build(cls, group, seed)
    for name, param in engine.model.named_parameters():
        if param.requires_grad:
            backward(engine, seed)
            param.grad = None
            must_raise(f"a step when param.grad of {name} was replaced", engine.step)
            engine.zero_grad()
    engine.training_step(*tokens(seed, 0), F.cross_entropy)


def missing_gradients(cls, group, seed: int, bucket_bytes: int | None = 320) -> None:
    """ZeRO-2 and ZeRO-3 refuse a step in which a parameter got no gradient, whichever it is; then training goes on."""
    engine = build(cls, group, seed, models.Lanes, bucket_bytes=bucket_bytes)
    inputs, targets = models.vectors(seed, dist.get_rank(), 8, 8)
    for skip in range(len(engine.model.blocks)):
        engine.model.skip = skip
        F.mse_loss(engine(inputs), targets).backward()
        must_raise(f"a step without gradients of blocks.{skip}", engine.step)
        engine.zero_grad()
    engine.model.skip = None
    engine.training_step(inputs, targets, F.mse_loss)
    must_raise("a step without a backward", engine.step)


def changed_in_place(cls, group, seed: int) -> None:
    engine = build(cls, group, seed, models.ChangedInPlace)
    inputs, targets = tokens(seed, 0)
    loss = F.cross_entropy(engine(inputs), targets)
    must_raise("a backward after a saved tensor was changed in place", loss.backward)
    engine.zero_grad()
    engine.free_all()  # also waits for what was gathered ahead


def count_bytes(cls, group, seed: int) -> None:
    layer_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    engine = build(cls, group, seed, partial(models.Stack, 6, WIDTH), torch.float32, layer_bytes)
    for step in range(2):
        inputs, targets = models.vectors(step, dist.get_rank(), WIDTH, dtype=torch.float32)
        engine.training_step(inputs, targets, F.mse_loss)


EVERYWHERE = [
    Case(two_steps),
    Case(two_steps, "in a group of one rank (self.world_size is 1)", alone=True),
    Case(one_weight, "if some ranks own only padding of a bucket"),
    Case(partial(one_weight, more=False), "if some ranks own nothing but padding"),
    Case(partial(two_steps, dtype=torch.float32), "in float32"),
    Case(count_bytes, "counted in bytes", memory=True),
]
IN_BUCKETS = [
    Case(crossing, "if ranks finish their gradients in different orders"),
    Case(partial(two_steps, make=models.Empty), "if a bucket's only parameter has no elements"),
    Case(partial(two_steps, optimizer=torch.optim.Adagrad), "with Adagrad"),
]
MISSING = Case(missing_gradients, "if a parameter gets no gradient")
OF_CHAPTER = {
    "zero1": [*EVERYWHERE, *IN_BUCKETS, Case(replaced_gradients, "if a param.grad was replaced")],
    "zero2": [
        *EVERYWHERE,
        *IN_BUCKETS,
        MISSING,
        Case(partial(missing_gradients, bucket_bytes=None), "if a part of a bucket gets no gradient"),
    ],
    "zero3": [
        *EVERYWHERE,
        Case(partial(two_steps, prefetch=2), "with prefetch 2"),
        Case(partial(two_steps, prefetch=0), "with prefetch 0"),
        Case(partial(two_steps, make=models.SharedInside), "if two units share a weight"),
        Case(partial(two_steps, make=models.Checkpointed), "if units are recomputed in backward"),
        Case(partial(two_steps, make=models.TwoCheckpointed), "if several units are recomputed together"),
        Case(partial(two_steps, make=models.BiasLast), "if a gradient is the first event of a backward"),
        Case(freed_unused, "if a unit is freed that is still being gathered"),
        Case(changed_in_place, "if a saved tensor is changed in place"),
        MISSING,
    ],
}
