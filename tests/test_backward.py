"""What a loop may do around a backward: several through one graph, evaluations in between, faults, no zero_grad."""

import cases_backward as cases
import parts
import pytest


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_unused_parameters_and_clipping_between_two_backwards(ranks, world_size, stage):
    ranks(world_size).run(cases.clipping_between_with_unused, stage=stage)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_a_fault_before_a_step_that_leaves_parameters_unused(ranks, world_size, stage):
    ranks(world_size).run(cases.a_fault_before_unused_parameters, stage=stage)
