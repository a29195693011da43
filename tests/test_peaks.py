"""What is alive at the worst moment of a step; an engine that shards nothing fails here."""

import cases_peaks as cases
import parts
import pytest


@pytest.mark.parametrize("world_size", (2, 3, 4))
@pytest.mark.parametrize("reverse", (False, True))
def test_zero2_keeps_two_buckets_of_whole_gradients_at_most(ranks, world_size, reverse):
    ranks(world_size).run(cases.gradients_in_backward, reverse=reverse)


def test_unsharded_adamw_under_ddp_fails_on_gradients_in_backward(ranks):
    for message in ranks(2).run(
        parts.failure, module="cases_peaks", of="gradients_in_backward", engine_name="impostor"
    ):
        assert "bytes of gradients at the worst moment" in message, message


@pytest.mark.parametrize("world_size", (2, 3, 4))
@pytest.mark.parametrize("options", ({}, {"prefetch": 0}, {"prefetch": 3}, {"reshard_after_forward": False}), ids=str)
def test_zero3_keeps_only_the_units_in_use_gathered(ranks, world_size, options):
    ranks(world_size).run(cases.parameters_in_a_step, options=options)


@pytest.mark.parametrize("kind", ("Stack", "ByKeyword"))
def test_zero3_frees_frozen_units_during_backward(ranks, kind):
    ranks(2).run(cases.frozen_units_in_backward, kind=kind)


def test_zero3_frees_units_under_no_sync(ranks):
    ranks(2).run(cases.units_under_no_sync)


def test_zero3_stops_to_gather_ahead_when_the_order_changes(ranks):
    ranks(2).run(cases.units_in_another_order)


def test_zero3_keeps_nothing_gathered_for_a_backward_that_will_not_come(ranks):
    ranks(2).run(cases.evaluation_frees_at_once)
