"""Tests of the task hidden_reduction: ZeRO-1 that reduces inside backward."""

import torch
import torch.distributed as dist

from zero1 import ZeRO1
from zerolab.teach.check import models
from zerolab.teach.check.helpers import as_chapter, backward, build, expect, expect_at_most, expect_values, on_ranks

OPTIONS = {"bucket_mb": 0.002}  # several buckets


def measured(stage):
    found, right = as_chapter(stage, ZeRO1, **OPTIONS)
    expect(f"two or more collectives in backward, of {found.in_backward}", found.in_backward >= 2, True)
    return found, right


@on_ranks
def test_collectives_in_backward(stage):
    """the weights are the chapter's, and all reductions, two or more, start in backward"""
    measured(stage)


@on_ranks
def test_in_flight_after_backward(stage):
    """two or more collectives are in flight when backward is over"""
    found, _ = measured(stage)
    expect(f"two or more collectives in flight after backward, of {found.in_flight}", found.in_flight >= 2, True)


@on_ranks
def test_bytes_sent(stage):
    """bytes sent: not more than the chapter's"""
    found, right = measured(stage)
    expect_at_most("bytes sent in a step", found.sent, right.sent)


class Equal(models.Lanes):
    """All layers have one size, so buckets that are mixed up are added without an error."""

    def __init__(self):
        super().__init__((8, 8, 8, 8))


@on_ranks
def test_other_orders(stage):
    """the weights are the chapter's where a step has two backwards, and where ranks finish in other orders"""
    measured(stage)
    as_chapter(stage, ZeRO1, 2, **OPTIONS)
    weights = []
    for kind in (ZeRO1, stage):
        engine = build(kind, Equal, bucket_bytes=0)
        if dist.get_rank() % 2:
            engine.model.way.reverse()
        for step in range(2):
            backward(engine, step)
            engine.step()
            engine.zero_grad()
        weights.append(torch.cat([param.detach().flatten() for param in engine.model.parameters()]))
    expect_values("the weights if ranks finish their gradients in different orders", weights[1], weights[0])
