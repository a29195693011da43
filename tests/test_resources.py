"""What each stage holds, sends, and when; and that an engine which shards nothing fails these very checks."""

import re

import cases_resources as cases
import parts
import pytest
import torch


@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_bytes_held_equal_the_theory_to_the_byte(ranks, world_size, stage):
    ranks(world_size).run(cases.held_after_step_3, stage=stage)


@pytest.mark.parametrize("world_size", (2, 3, 4))
@pytest.mark.parametrize("reverse", (False, True))
def test_zero2_keeps_two_buckets_of_whole_gradients_at_most(ranks, world_size, reverse):
    ranks(world_size).run(cases.gradients_in_backward, reverse=reverse)


@pytest.mark.parametrize("world_size", (2, 3, 4))
@pytest.mark.parametrize("options", ({}, {"prefetch": 0}, {"prefetch": 3}, {"reshard_after_forward": False}), ids=str)
def test_zero3_keeps_only_the_units_in_use_whole(ranks, world_size, options):
    ranks(world_size).run(cases.parameters_in_a_step, options=options)


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_sequence_and_bytes_of_collectives(ranks, world_size, stage):
    ranks(world_size).run(cases.sequence_of_collectives, stage=stage)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("prefetch", (0, 1, 2))
def test_zero3_issues_the_next_gather_before_it_computes(ranks, world_size, prefetch):
    ranks(world_size).run(cases.prefetch_is_issued_before_the_compute, prefetch=prefetch)


@pytest.mark.parametrize("stage", ("zero2", "zero3"))
def test_collectives_run_while_the_rank_computes(ranks, stage):
    ranks(2).run(cases.collectives_run_while_computing, stage=stage)


@pytest.mark.parametrize("reverse", (False, True))  # forward may run the units in another order than they are declared
def test_zero3_hides_gathers_behind_the_root_and_in_any_order(ranks, reverse):
    ranks(2).run(cases.collectives_run_while_computing, stage="zero3", root=True, reverse=reverse)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("model", ("partly frozen", "skipping"))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_a_collective_may_run_as_late_as_its_wait(ranks, world_size, model, stage):
    ranks(world_size).run(cases.collectives_that_run_late, stage=stage, model=model)


@pytest.mark.parametrize("kind", ("Stack", "ByKeyword"))
def test_zero3_frees_frozen_units_during_backward(ranks, kind):
    ranks(2).run(cases.frozen_units_in_backward, kind=kind)


def test_zero3_frees_units_under_no_sync(ranks):
    ranks(2).run(cases.units_under_no_sync)


def test_zero3_stops_to_gather_ahead_when_the_order_changes(ranks):
    ranks(2).run(cases.units_in_another_order)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_steps_leave_no_hooks_behind(ranks, stage):
    ranks(2).run(cases.hooks_on_the_model, stage=stage)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("reverse", (False, True))
def test_zero2_reduces_in_one_order(ranks, world_size, reverse):
    ranks(world_size).run(cases.order_of_reductions, reverse=reverse)


@pytest.mark.parametrize("param_dtype", (None, torch.bfloat16))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_parameters_start_on_16_byte_boundaries(ranks, stage, param_dtype):
    ranks(3).run(cases.weights_start_aligned, stage=stage, param_dtype=param_dtype)


@pytest.mark.parametrize("world_size", (2, 4))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_a_rank_that_owns_only_padding(ranks, world_size, stage):
    ranks(world_size).run(cases.only_padding, stage=stage)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_unsharded_adamw_under_ddp_fails_on_memory(ranks, stage):
    for message in ranks(2).run(cases.failure, of="held_after_step_3", stage=stage, engine_name="impostor"):
        assert re.search("held .* expected", message), message


def test_unsharded_adamw_under_ddp_fails_on_gradients_in_backward(ranks):
    for message in ranks(2).run(cases.failure, of="gradients_in_backward", engine_name="impostor"):
        assert "bytes of gradients at the worst moment" in message, message


@pytest.mark.parametrize("stage", parts.STAGES)
def test_unsharded_adamw_under_ddp_fails_on_traffic(ranks, stage):
    for message in ranks(2).run(cases.failure, of="sequence_of_collectives", stage=stage, engine_name="impostor"):
        assert re.search("found .* expected", message), message
