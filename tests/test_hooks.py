"""Hooks of the caller's own find weights and gradients, whether they were registered before the engine or after."""

import cases_hooks as cases
import parts
import pytest

STAGES = pytest.mark.parametrize("stage", parts.STAGES)


@pytest.mark.parametrize("late_network", (False, True))
@STAGES
def test_hooks_find_the_units_weights(ranks, stage, late_network):
    ranks(3).run(cases.hooks_that_read_weights, stage=stage, late_network=late_network)


# C++ goes through the dictionary in the order of insertion, which `OrderedDict.move_to_end` does not change.


@pytest.mark.parametrize("before", (True, pytest.param(False)))
@pytest.mark.parametrize("stage, options", [("zero1", {}), ("zero2", {"bucket_mb": 0}), ("zero2", {}), ("zero3", {})])
def test_hooks_find_the_gradients(ranks, stage, options, before):
    ranks(2).run(cases.hooks_that_read_gradients, stage=stage, options=options, before=before)


@STAGES
def test_hooks_that_change_gradients_count(ranks, stage):
    ranks(3).run(cases.hooks_that_change_gradients, stage=stage)


@STAGES
def test_hooks_do_not_pile_up_on_what_passes_through_a_unit(ranks, stage):
    ranks(2).run(cases.hooks_on_what_passes_through, stage=stage)
