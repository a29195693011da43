"""Tests of the exercise zero2, in the order of its steps."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zero2 import ZeRO2
from zerolab.teach.check import models
from zerolab.teach.check.helpers import (
    alone,
    build,
    expect,
    expect_values,
    must_raise,
    on_ranks,
    same_memory,
    same_training,
)


def with_gradients(bucket) -> None:
    """Give each parameter a gradient of numbers that are all different."""
    end = 1.0
    for param in bucket.params:
        param.grad = torch.arange(end, end + param.numel(), dtype=param.dtype).view(param.shape)
        end += param.numel()


@pytest.mark.blank("Reduction.lay_out_gradients")
@on_ranks
def test_the_gradients_are_laid_out_and_freed(stage):
    engine, right = build(stage, bucket_bytes=2**20), build(ZeRO2, bucket_bytes=2**20)
    for each in (engine, right):
        with_gradients(each.buckets[0])
    found, expected = (each.make_reduction(each.buckets[0]) for each in (engine, right))
    expect_values("what lay_out_gradients returns", found.gradient, expected.gradient)
    bucket = engine.buckets[0]
    left = [name for name, param in zip(bucket.names, bucket.params) if param.grad is not None]
    expect("parameters that still have a param.grad", left, [])


@pytest.mark.blank("ZeRO2.send_complete")
@on_ranks
def test_only_the_bucket_whose_turn_it_is_is_sent(stage):
    """Buckets are completed in another order than theirs, by hand."""
    engine = build(stage)
    sent = []
    engine.send = sent.append
    first, second, third = engine.buckets[:3]
    engine.turn = 0
    for bucket, expected, turn in ((second, [], 0), (third, [], 0), (first, [first, second, third], 3)):
        bucket.missing = set()
        engine.send_complete()
        names = [each.name for each in sent]
        expect(f"buckets sent when {bucket.name} is complete", names, [each.name for each in expected])
        expect(f"self.turn when {bucket.name} is complete", engine.turn, turn)


class Uses(nn.Module):
    """A forward may leave out the first or the second of its layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)
        self.used = (True, True)

    def forward(self, x):
        return sum(layer(x) for layer, used in zip((self.first, self.second), self.used) if used)


@pytest.mark.parametrize("bucket_bytes", [0, 2**20])
@pytest.mark.blank("ZeRO2.reduce_gradients")
@on_ranks
def test_a_missing_gradient_is_refused(stage, bucket_bytes):
    """Whichever parameter has none."""
    engine = build(stage, Uses, bucket_bytes=bucket_bytes)
    inputs, targets = models.vectors(0, 0, 3, 4)[0], torch.zeros(4, 2, dtype=torch.float64)
    for used in ((True, False), (False, True)):
        engine.model.used = used
        F.mse_loss(engine(inputs), targets).backward()
        what = f"reduce_gradients() if only {'first' if used[0] else 'second'} has gradients"
        must_raise(what, engine.reduce_gradients)
        engine.zero_grad()
    must_raise("reduce_gradients() without a backward", engine.reduce_gradients)


@pytest.mark.blank("ZeRO2.on_gradient")
@on_ranks
def test_a_second_gradient_of_an_incomplete_bucket_is_refused(stage):
    engine = build(stage, Uses, bucket_bytes=0)
    inputs = models.vectors(0, 0, 3, 4)[0]
    engine.model.used = (False, True)  # the buckets of the second layer are sent first
    engine(inputs).sum().backward()
    must_raise("a second backward after one that left out parameters", engine(inputs).sum().backward)
    engine.zero_grad()
    expect("self.turn after an unfinished backward and zero_grad()", engine.turn, 0)


# Every blank, in whole trainings.

TRAININGS = {
    "": {},
    "in a group of one rank (self.world_size is 1)": {"group": alone},
    "if some ranks own nothing but padding": {"make": models.OneWeight},
    "if ranks finish their gradients in different orders": {"make": models.Lanes, "crossing": True},
}


@pytest.mark.parametrize("at", TRAININGS)
@on_ranks
def test_training(stage, at):
    same_training(stage, ZeRO2, at, **TRAININGS[at])


@on_ranks
def test_memory(stage):
    same_memory(stage, ZeRO2)
