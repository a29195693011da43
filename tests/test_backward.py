"""What a loop may do around a backward: several through one graph, evaluations in between, faults, no zero_grad."""

import cases_backward as cases
import parts
import pytest

LAYOUTS = [
    *((stage, {}) for stage in parts.STAGES),
    ("zero2", {"bucket_mb": 0, "find_unused": True}),
    ("zero3", {"prefetch": 0}),
    ("zero3", {"reshard_after_forward": False}),
    ("zero3", {"find_unused": True}),
]


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage, options", LAYOUTS, ids=str)
def test_ways_to_call_backward(ranks, world_size, stage, options):
    ranks(world_size).run(cases.ways_to_call_backward, stage=stage, options=options)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_a_step_leaves_the_gradients_alone(ranks, world_size, stage):
    ranks(world_size).run(cases.steps_without_zero_grad, stage=stage)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_unused_parameters_and_clipping_between_two_backwards(ranks, world_size, stage):
    ranks(world_size).run(cases.clipping_between_with_unused, stage=stage)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_a_fault_under_no_sync_ends_it(ranks, world_size, stage):
    ranks(world_size).run(cases.a_fault_under_no_sync, stage=stage)


# in ZeRO-1 gradients add up whatever came before, as in torch
@pytest.mark.parametrize("stage", ("zero2", "zero3"))
def test_going_on_after_half_a_backward_is_refused(ranks, stage):
    for message in ranks(2).run(cases.going_on_after_half_a_backward, stage=stage):
        assert "backward" in message and "engine.zero_grad()" in message  # what happened, and the way out


@pytest.mark.parametrize("kept", (False, True), ids=("sent", "kept"))
@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize(
    "stage, options", (("zero1", {}), ("zero2", {}), ("zero2", {"bucket_mb": 0}), ("zero3", {})), ids=str
)
def test_losses_with_a_backward_each_add_up(ranks, world_size, stage, options, kept):
    ranks(world_size).run(cases.several_losses, stage=stage, kept=kept, options=options)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_a_fault_before_a_step_that_leaves_parameters_unused(ranks, world_size, stage):
    ranks(world_size).run(cases.a_fault_before_unused_parameters, stage=stage)
