"""Tests of the exercise zero1_2psi: step 3 by a reduce-scatter."""

import pytest
import torch

from zerolab.measure.timeline import Timeline
from zerolab.run.counterparts import ZeRO1By2Psi
from zerolab.teach.check import models
from zerolab.teach.check.helpers import (
    Record,
    alone,
    backward,
    build,
    expect_values,
    on_ranks,
    same_memory,
    same_training,
    shards,
)


@on_ranks
def test_the_mean(stage):
    engine, right = build(stage), build(ZeRO1By2Psi)
    allowed = None
    for each in (right, engine):
        record = Record(allowed=allowed)
        with Timeline(listener=record):
            backward(each)
            each.reduce_gradients()
        allowed = record.collectives  # a different collective fails before other ranks wait for it
    for index, (found, expected) in enumerate(zip(shards(engine), shards(right))):
        expect_values(f"the gradient of shard {index} after reduce_gradients()", found.grad, expected.grad)


TRAININGS = {
    "": {},
    "in a group of one rank (self.world_size is 1)": {"group": "alone"},
    "if some ranks own only padding of a bucket": {"make": models.OneWeightAndMore},
    "in float32": {"dtype": torch.float32},
    "if ranks finish their gradients in different orders": {"make": models.Lanes, "crossing": True},
}


@pytest.mark.parametrize("at", TRAININGS)
@on_ranks
def test_training(stage, at):
    options = dict(TRAININGS[at])
    if options.pop("group", None):
        options["group"] = alone()
    same_training(stage, ZeRO1By2Psi, at, **options)


@on_ranks
def test_memory(stage):
    same_memory(stage, ZeRO1By2Psi)
