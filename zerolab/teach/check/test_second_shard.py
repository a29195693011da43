"""Tests of the task second_shard: backward gathers inside each machine, of two ranks."""

import torch
import torch.distributed as dist

from zero3 import ZeRO3
from zerolab.measure.ledger import MemoryLedger
from zerolab.teach.check import models
from zerolab.teach.check.helpers import (
    SLACK,
    Measured,
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


TRAININGS = {
    "with prefetch 1": {},
    "with prefetch 2": {"prefetch": 2},
    "if units are recomputed in backward": {"make": models.Checkpointed},
}


@on_ranks
def test_to_the_bit(stage):
    """steps 1 to 5: losses, gradients and shards equal the chapter's to the bit; no second shard is out of date"""
    for at, options in TRAININGS.items():
        right, found = (train(kind, bucket_bytes=None, **options) for kind in (ZeRO3, stage))
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
