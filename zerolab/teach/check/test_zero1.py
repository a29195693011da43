"""Tests of the exercise zero1, in the order of its steps."""

import pytest
import torch

from zero1 import Bucket, ZeRO1
from zerolab.teach.check import models
from zerolab.teach.check.helpers import (
    all_ranks,
    alone,
    backward,
    build,
    expect,
    expect_values,
    must_raise,
    on_ranks,
    same_memory,
    same_training,
    shards,
)

SIZES = [(15, 3, 9, 3), (1,), (0,), (7, 0, 2), (40, 40, 40), (16,)]  # elements of a bucket's parameters


def bucket_of(kind, sizes, dtype, group):
    params = [(f"p{index}", torch.nn.Parameter(torch.ones(size, dtype=dtype))) for index, size in enumerate(sizes)]
    with torch.no_grad():
        return kind("bucket 0", params, group())


@pytest.mark.blank("Bucket.assign_places")
@pytest.mark.parametrize("sizes", SIZES)
@on_ranks
def test_places(stage, sizes):
    kind = type(build(stage).buckets[0])  # the student's class Bucket
    for dtype in (torch.float32, torch.float64):
        for group in (all_ranks, alone):
            right, found = bucket_of(Bucket, sizes, dtype, group), bucket_of(kind, sizes, dtype, group)
            of = f" of parameters with {sizes} elements of {dtype}, world_size {right.world_size}"
            expect(f"self.offsets{of}", list(found.offsets), list(right.offsets))
            expect(f"self.shard_numel{of}", found.shard_numel, right.shard_numel)
            expect(f"self.numel{of}", found.numel, right.numel)


@pytest.mark.blank("Bucket.flatten")
@on_ranks
def test_the_weights_are_views_of_the_buffer(stage):
    for bucket in build(stage).buckets:
        for name, param, offset in zip(bucket.names, bucket.params, bucket.offsets):
            address = bucket.flat.data_ptr() + offset * bucket.flat.element_size()
            expect(f"whether the weight {name} is a view of its place in the buffer", param.data_ptr() == address, True)


@pytest.mark.blank("Bucket.flatten")
@on_ranks
def test_laid_out_tensors(stage):
    """Of another dtype than the weights, and from a generator, as in ZeRO-2."""
    bucket, right = build(stage).buckets[0], build(ZeRO1).buckets[0]
    for dtype in (torch.float64, torch.float32):
        tensors = [torch.full(param.shape, index + 1.0, dtype=dtype) for index, param in enumerate(bucket.params)]
        torch.full((1000,), 7.0).clone()  # memory that is used again should not be what padding has
        expect_values("what lay_out returns", bucket.lay_out(iter(tensors), dtype), right.lay_out(tensors, dtype))


@pytest.mark.blank("Bucket.make_shard")
@on_ranks
def test_shards_and_gradients_are_views(stage):
    for bucket in build(stage).buckets:
        first = bucket.flat[bucket.own].data_ptr()
        expect("whether the shard is a view of bucket.flat", bucket.shard.data_ptr() == first, True)
        expect_values("bucket.gradient", bucket.gradient, torch.zeros_like(bucket.flat))
        expect("how many places bucket.grads has", len(bucket.grads), len(bucket.params))
        for index, grad in enumerate(bucket.grads):
            place = bucket.place(bucket.gradient, index)
            is_view = grad.data_ptr() == place.data_ptr()
            expect(f"whether bucket.grads[{index}] is a view of its place in bucket.gradient", is_view, True)


@pytest.mark.blank("Bucket.gather")
@on_ranks
def test_a_backward_through_old_weights_is_refused(stage):
    engine = build(stage)
    old = engine(engine.model.batch(0, 0)[0])
    old.square().mean().backward(retain_graph=True)
    engine.step()
    engine.zero_grad()
    must_raise("a backward through a forward of before the step", old.sum().backward)


# Every blank, in whole trainings.

TRAININGS = {
    "": {},
    "in a group of one rank (self.world_size is 1)": {"group": alone},
    "if some ranks own nothing but padding": {"make": models.OneWeight},
}


@pytest.mark.parametrize("at", TRAININGS)
@on_ranks
def test_training(stage, at):
    same_training(stage, ZeRO1, at, **TRAININGS[at])


# What no training shows. It comes last, because a wrong order of events has a clearer message above.


@pytest.mark.blank("ZeRO1.reduce_gradients")
@on_ranks
def test_a_second_call_changes_nothing(stage):
    """The gradients may have been clipped since the first."""
    engine = build(stage)
    backward(engine)
    engine.reduce_gradients()
    for shard in shards(engine):
        shard.grad.mul_(0.5)
    halves = [shard.grad.clone() for shard in shards(engine)]
    engine.reduce_gradients()
    for index, (shard, half) in enumerate(zip(shards(engine), halves)):
        expect_values(f"the halved gradient of shard {index} after another reduce_gradients()", shard.grad, half)


@pytest.mark.blank("ZeRO1.reduce_gradients")
@on_ranks
def test_a_replaced_gradient_is_refused_before_anything_is_sent(stage):
    """In a group of one rank, where a check that comes late leaves no other rank waiting; of each parameter."""
    for name in dict(build(stage, group=alone).model.named_parameters()):
        engine = build(stage, group=alone)
        param = engine.model.get_parameter(name)
        if param.requires_grad:
            before = [bucket.gradient.clone() for bucket in engine.buckets]
            param.grad = None
            must_raise(f"a step when param.grad of {name} was replaced", engine.step)
            for bucket, gradient in zip(engine.buckets, before):
                expect("whether gradients were changed before the error", torch.equal(bucket.gradient, gradient), True)


@pytest.mark.blank("ZeRO1.step")
@on_ranks
def test_two_steps_without_zero_grad(stage):
    """A step leaves the shards ready for another backward, and updates once."""
    weights = []
    for kind in (stage, ZeRO1):
        engine = build(kind)
        for step in range(2):
            backward(engine, step)
            engine.step()
        weights.append(torch.cat([param.detach().flatten() for param in engine.model.parameters()]))
    expect_values("the weights after two steps without zero_grad(), of which the second reduces again", *weights)


@pytest.mark.blank("ZeRO1.step")
@on_ranks
def test_a_step_with_gradients_of_zero(stage):
    """The optimizer updates the weights nevertheless: AdamW has momentum and weight decay."""
    weights = []
    for kind in (stage, ZeRO1):
        engine = build(kind)
        backward(engine)
        engine.step()
        engine.zero_grad()
        engine.step()
        weights.append(torch.cat([param.detach().flatten() for param in engine.model.parameters()]))
    expect_values("the weights after a step whose gradients are all zero", *weights)


@on_ranks
def test_memory(stage):
    same_memory(stage, ZeRO1)
