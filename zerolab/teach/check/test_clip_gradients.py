"""Tests of the task clip_gradients: clip by the norm over all shards."""

import math

import pytest
import torch
import torch.distributed as dist

from zero1 import all_gather
from zero2 import ZeRO2
from zerolab.measure.traffic import TrafficLedger
from zerolab.teach.check import models
from zerolab.teach.check.helpers import backward, build, expect, expect_at_most, expect_values, on_ranks

MODELS = {"odd": models.Odd, "padding": models.OneWeight}


def clipped(stage, make, norm_type: float, max_norm: float) -> TrafficLedger:
    """Compare one clipping with what torch computes of the whole gradients. Returns what it sends."""
    when = f"with norm_type {norm_type:g} and max_norm {max_norm:g}"
    right, engine = build(ZeRO2, make), build(stage, make)
    for each in (right, engine):
        backward(each)
    right.reduce_gradients()
    own = torch.cat([bucket.shard.grad for bucket in right.buckets])  # padding is 0, and changes no norm
    whole = own.new_empty(own.numel() * dist.get_world_size())
    all_gather(whole, own)
    expected = torch.linalg.vector_norm(whole, norm_type)
    with TrafficLedger() as traffic:
        norm = engine.clip_grad_norm_(max_norm, norm_type)
    expect_values(f"the norm {when}", norm, expected)
    times = min(1.0, max_norm / (expected.item() + 1e-6))
    found = torch.cat([bucket.shard.grad for bucket in engine.buckets])
    expect_values(f"the shards' gradients {when}", found, own * times)
    return traffic


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@on_ranks
def test_norms(stage, make, norm_type):
    """the norm, and the clipped gradients, for the norms 2, 1, 3 and infinity"""
    for max_norm in (0.05, 1e6):
        clipped(stage, MODELS[make], norm_type, max_norm)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@on_ranks
def test_no_numbers(stage, norm_type, value):
    """a NaN or an infinity on one rank is seen by all ranks"""
    for rank in range(dist.get_world_size()):
        engine = build(stage)
        backward(engine)
        engine.reduce_gradients()
        if dist.get_rank() == rank:
            engine.buckets[0].shard.grad[0] = value
        norm = engine.clip_grad_norm_(0.05, norm_type).item()
        what = f"the norm with norm_type {norm_type:g}, where rank {rank} has a gradient of {value}"
        expect(what, "nan" if math.isnan(norm) else norm, "nan" if math.isnan(value) else value)


@on_ranks
def test_bytes_sent(stage):
    """bytes sent while clipping: 64 per rank at most, and no gradients"""
    for norm_type in (2.0, math.inf):
        traffic = clipped(stage, models.Odd, norm_type, 0.05)
        nbytes = sum(each.whole_bytes for each in traffic.collectives if each.kind != "reduce-scatter")
        expect_at_most("bytes sent while clipping", nbytes, 64 * dist.get_world_size())
