"""Tests of the task hidden_reduction: ZeRO-1 that reduces inside backward."""

import torch
import torch.distributed as dist

from zero1 import ZeRO1
from zerolab.measure.timeline import Timeline
from zerolab.teach.check import models
from zerolab.teach.check.helpers import (
    as_chapter,
    backward,
    build,
    expect,
    expect_at_most,
    expect_values,
    on_ranks,
    train_one_step,
)

OPTIONS = {"bucket_mb": 0.002}  # several buckets


def at_the_end_of_backward(stage) -> tuple[int, int]:
    """(collectives that were started, those of them that are in flight) in a second step."""
    engine = build(stage, models.UnevenBlocks, bucket_bytes=None, **OPTIONS)
    train_one_step(engine, 0)
    with Timeline(engine) as timeline:
        backward(engine, 1)
        counts = len(timeline.collectives), len(timeline.under_way())
        engine.step()
    return counts


@on_ranks
def test_collectives_in_backward(stage):
    """the weights are the chapter's, and all reductions, two or more, start in backward"""
    as_chapter(stage, ZeRO1, **OPTIONS)
    started, _ = at_the_end_of_backward(stage)
    expect(f"two or more collectives in backward, of {started}", started >= 2, True)


@on_ranks
def test_in_flight_after_backward(stage):
    """two or more collectives are in flight when backward is over"""
    _, in_flight = at_the_end_of_backward(stage)
    expect(f"two or more collectives in flight after backward, of {in_flight}", in_flight >= 2, True)


@on_ranks
def test_bytes_sent(stage):
    """bytes sent: not more than the chapter's"""
    started, _ = at_the_end_of_backward(stage)
    expect(f"two or more collectives in backward, of {started}", started >= 2, True)
    found, right = as_chapter(stage, ZeRO1, **OPTIONS)
    expect_at_most("bytes sent in a step", found.sent, right.sent)


@on_ranks
def test_other_orders(stage):
    """the weights are the chapter's where a step has two backwards, and where ranks finish in other orders"""
    started, _ = at_the_end_of_backward(stage)
    expect(f"two or more collectives in backward, of {started}", started >= 2, True)
    as_chapter(stage, ZeRO1, 2, **OPTIONS)
    weights = []
    for kind in (ZeRO1, stage):
        engine = build(kind, models.Lanes, bucket_bytes=0)
        if dist.get_rank() % 2:
            engine.model.way.reverse()
        for step in range(2):
            train_one_step(engine, step)
        weights.append(torch.cat([param.detach().flatten() for param in engine.model.parameters()]))
    expect_values("the weights if ranks finish their gradients in different orders", weights[1], weights[0])
