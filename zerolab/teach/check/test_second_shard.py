"""Tests of the task second_shard: backward gathers inside each machine, of two ranks."""

import functools

import torch
import torch.distributed as dist

from zero3 import ZeRO3
from zerolab.measure.ledger import MemoryLedger
from zerolab.teach.check import models
from zerolab.teach.check.helpers import (
    SLACK,
    Differs,
    Measured,
    backward,
    build,
    expect,
    expect_at_most,
    expect_values,
    measure,
    on_ranks,
    train,
)


def measured(stage) -> tuple[Measured, Measured]:
    """The chapter gathers all units across machines twice in a step. Once is the task, so each target demands it."""
    found, right = measure(stage), measure(ZeRO3)
    what = "bytes gathered in a step by groups with ranks of both machines (0 and 1, 2 and 3), half of the chapter's"
    expect_at_most(what, found.across, right.across / 2)
    return found, right


@on_ranks
def test_across_machines(stage):
    """step 5: half of the chapter's bytes are gathered across machines"""
    measured(stage)


@on_ranks
def test_weights_in_backward(stage):
    """step 5: backward computes with the weights of forward, with both halves in their places"""
    one_layer = functools.partial(models.Stack, layers=1, width=8)
    engine = build(stage, one_layer, bucket_bytes=None)
    weight, _ = models.seeded(one_layer, 0).parameters()
    inputs = torch.zeros(8, 8, dtype=weight.dtype, requires_grad=True)
    # The gradient of the inputs is the outputs' gradient times the weight, so with the identity it is the weight.
    engine(inputs).backward(torch.eye(8, dtype=weight.dtype))
    expect_values("the weight with which backward computes", inputs.grad, weight.detach())
    measured(stage)


def losses_around_an_update(engine, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of a forward without a backward right before it, and of an evaluation right after it."""
    inputs, targets = engine.model.batch(10, dist.get_rank())
    backward(engine, step)
    before = engine.model.loss(engine(inputs), targets)
    engine.step()
    with torch.no_grad():
        after = engine.model.loss(engine(inputs), targets)
    engine.zero_grad()
    return before.detach(), after


@on_ranks
def test_no_stale_weights(stage):
    """step 4: the next forward uses the new weights, also if a forward came between backward and the update"""
    right, engine = build(ZeRO3, bucket_bytes=None), build(stage, bucket_bytes=None)
    for step in range(3):
        _, expected = losses_around_an_update(right, step)
        before, found = losses_around_an_update(engine, step)
        what = f"the loss of an evaluation after update {step + 1}"
        if found == before:
            raise Differs(what, expected.item(), f"{found.item()}, as before it: is a second shard out of date?")
        expect_values(what, found, expected)
    measured(stage)


TRAININGS = {
    "with prefetch 1": {},
    "with prefetch 2": {"prefetch": 2},
    "with prefetch 0": {"prefetch": 0},
    "if some ranks own only padding": {"make": models.OneWeightAndMore},
    "if two units share a weight": {"make": models.SharedInside},
    "if units are recomputed in backward": {"make": models.Checkpointed},
}


@on_ranks
def test_to_the_bit(stage):
    """steps 1 to 5: losses, gradients and shards equal the chapter's to the bit, also with two backwards in a step"""
    for at, options in TRAININGS.items():
        right, found = (train(kind, bucket_bytes=None, **options) for kind in (ZeRO3, stage))
        if found.error is not None:
            raise found.error
        for what, value in right.values.items():
            expect_values(f"{what} {at}", found.values[what], value)
            # A gather adds nothing, and the reductions are the chapter's: they add the same numbers in the same order.
            expect(f"{what} equals the chapter's to the bit {at}", torch.equal(found.values[what], value), True)
    measured(stage)


@on_ranks
def test_bytes_gathered_at_once(stage):
    """step 5: bytes gathered at once: not more than the chapter's, because forward still frees each unit"""
    found, right = measured(stage)
    expect_at_most("bytes gathered at once", found.gathered, right.gathered)


def alive_after_forward(stage) -> tuple[int, int]:
    """(bytes alive after the second forward, bytes of all weights) of a model with hardly any activations."""
    with MemoryLedger() as memory:
        engine = build(stage, models.Stack, torch.float32, bucket_bytes=None)
        for step in range(2):
            inputs, targets = engine.model.batch(step, dist.get_rank())
            loss = engine.model.loss(engine(inputs), targets)
            alive = memory.live
            loss.backward()
            engine.step()
            engine.zero_grad()
    return alive, 4 * sum(param.numel() for param in engine.model.parameters())


@on_ranks
def test_bytes_held(stage):
    """step 5: bytes alive after forward: the chapter's, and half of each unit"""
    found, _ = alive_after_forward(stage)
    right, whole = alive_after_forward(ZeRO3)
    what = f"bytes alive after forward (the chapter's {right:,}, half of all units {whole // 2:,}, {SLACK:,} to spare)"
    expect_at_most(what, found, right + whole // 2 + SLACK)
    measured(stage)


@on_ranks
def test_bytes_sent(stage):
    """steps 3 and 5: bytes sent in all: not more than the chapter's"""
    found, right = measured(stage)
    expect_at_most("bytes sent in a step", found.sent, right.sent)
