"""Tests of the exercise zero2, in the order of its steps."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zero2 import ZeRO2
from zerolab.measure.ledger import MemoryLedger
from zerolab.teach.check import models
from zerolab.teach.check.helpers import (
    SLACK,
    WIDTH,
    all_ranks,
    all_waited_for,
    alone,
    backward,
    build,
    expect,
    expect_at_most,
    expect_values,
    must_raise,
    on_ranks,
    same_memory,
    same_training,
    shards,
    silent,
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


@pytest.mark.blank("Reduction.lay_out_gradients")
@on_ranks
def test_there_is_one_copy_of_the_gradients(stage):
    """At most one gradient more than the buffer is alive meanwhile, and afterwards only the buffer."""
    with MemoryLedger() as memory:
        engine = build(stage, models.Stack, torch.float32, 2**20, group=silent())
        bucket = engine.buckets[0]
        for param in bucket.params:
            param.grad = torch.ones_like(param)
        before, buffer = memory.live, bucket.flat.nbytes
        memory.reset_peak()
        reduction = engine.make_reduction(bucket)
        expect_at_most("bytes alive after laying out, more than before", memory.live - before, SLACK + buffer // 3)
        expect_at_most("the most bytes alive meanwhile", memory.peak - before, SLACK + buffer + 4 * WIDTH * WIDTH)
        del reduction


@pytest.mark.blank("Reduction.start")
@on_ranks
def test_the_mean_arrives_in_the_shard(stage):
    """Of one backward, and the sum over two."""
    engine, right = build(stage), build(ZeRO2)
    for number in (1, 2):
        after = f"after {number} backward(s) and reduce_gradients()"
        for each in (engine, right):
            with all_waited_for("reduce_gradients()"):
                backward(each, number)
                each.reduce_gradients()
        for index, (found, expected) in enumerate(zip(shards(engine), shards(right))):
            expect_values(f"the gradient of shard {index} {after}", found.grad, expected.grad)


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


@pytest.mark.blank("ZeRO2.on_gradient")
@on_ranks
def test_what_is_missing(stage):
    engine = build(stage)
    for bucket in engine.buckets:
        expect(f"the type of `missing` of {bucket.name}", type(bucket.missing).__name__, "set")
        missing = [name for name, param in zip(bucket.names, bucket.params) if param in bucket.missing]
        expect(f"what is missing in {bucket.name} after the build", missing, [*bucket.names])
        expect(f"how many are missing in {bucket.name} after the build", len(bucket.missing), len(bucket.params))
    backward(engine)
    for bucket in engine.buckets:
        expect(f"how many gradients are missing in {bucket.name} after backward", len(bucket.missing), 0)
    expect("self.turn after backward", engine.turn, len(engine.buckets))
    engine.zero_grad()
    expect("self.turn after zero_grad()", engine.turn, 0)


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
    """Whichever parameter has none; then training goes on."""
    engine = build(stage, Uses, bucket_bytes=bucket_bytes)
    inputs, targets = models.vectors(0, 0, 3, 4)[0], torch.zeros(4, 2, dtype=torch.float64)
    for used in ((True, False), (False, True)):
        engine.model.used = used
        F.mse_loss(engine(inputs), targets).backward()
        what = f"reduce_gradients() if only {'first' if used[0] else 'second'} has gradients"
        must_raise(what, engine.reduce_gradients)
        engine.zero_grad()
    engine.model.used = (True, True)
    F.mse_loss(engine(inputs), targets).backward()
    engine.reduce_gradients()
    expect("self.in_flight after reduce_gradients()", engine.in_flight, None)
    engine.zero_grad()
    engine.training_step(inputs, targets, F.mse_loss)
    must_raise("reduce_gradients() without a backward", engine.reduce_gradients)


@pytest.mark.blank("ZeRO2.on_gradient")
@on_ranks
def test_a_second_gradient_of_an_incomplete_bucket_is_refused(stage):
    engine = build(stage, Uses, bucket_bytes=2**20)
    inputs = models.vectors(0, 0, 3, 4)[0]
    engine.model.used = (True, False)
    engine(inputs).sum().backward()
    must_raise("a second backward after one that left out parameters", engine(inputs).sum().backward)
    engine.zero_grad()


# Every blank, in whole trainings.

TRAININGS = {
    "": {},
    "in a group of one rank (self.world_size is 1)": {"group": "alone"},
    "if some ranks own only padding of a bucket": {"make": models.OneWeightAndMore},
    "if some ranks own nothing but padding": {"make": models.OneWeight},
    "if a bucket's only parameter has no elements": {"make": models.Empty, "bucket_bytes": 0},
    "in float32": {"dtype": torch.float32},
    "with one bucket": {"bucket_bytes": 2**20},
    "with SGD": {"optimizer": torch.optim.SGD},
    "if ranks finish their gradients in different orders": {"make": models.Lanes, "crossing": True},
}


@pytest.mark.parametrize("at", TRAININGS)
@on_ranks
def test_training(stage, at):
    options = dict(TRAININGS[at])
    if options.pop("group", None):
        options["group"] = alone()
    same_training(stage, ZeRO2, at, **options)


@on_ranks
def test_memory(stage):
    same_memory(stage, ZeRO2)


@on_ranks
def test_an_unfinished_backward_leaves_nothing(stage):
    """An error in backward, when some buckets were sent; zero_grad() and a correct step follow."""
    weights = []
    for kind in (stage, ZeRO2):
        engine = build(kind, group=all_ranks())
        handle = engine.model.embedding.weight.register_hook(stumble)
        with contextlib.suppress(KeyError):
            backward(engine, 5)
        handle.remove()
        engine.zero_grad()
        backward(engine, 6)
        engine.step()
        weights.append(torch.cat([param.detach().flatten() for param in engine.model.parameters()]))
    expect_values("the weights of a step after an aborted backward and zero_grad()", *weights)


def stumble(gradient):
    raise KeyError("stumble")
