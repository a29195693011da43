"""Ranks that part: one runs other units, or does not come, and every rank learns where."""

import cases_ranks_that_part as cases
import parts
import pytest


@pytest.mark.parametrize("at_step, skip, prefetch", ((0, 1, 1), (2, 1, 1), (2, 3, 1), (2, 0, 0)))
@pytest.mark.parametrize("world_size, sizes", ((2, (8, 8, 8, 8)), (3, (5, 6, 7, 8))))
def test_a_unit_that_only_some_ranks_run_is_named(ranks, world_size, sizes, at_step, skip, prefetch):
    case = {"sizes": sizes, "at_step": at_step, "skip": skip, "prefetch": prefetch}
    messages = ranks(world_size).run(cases.a_unit_that_only_some_ranks_run, **case)
    assert all("all-gather of unit" in message for message in messages), messages
    assert f"all-gather of unit 'blocks.{skip}'" in messages[0], messages[0]
    assert f"all-gather of unit 'blocks.{skip}'" in messages[-1], messages[-1]


def test_a_unit_that_some_ranks_leave_out_at_the_end_is_named(ranks):
    messages = ranks(3).run(cases.a_unit_left_out_at_the_end)
    assert all("all-gather of unit 'blocks.3'" in message for message in messages), messages


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_a_unit_that_no_rank_runs_is_left_alone(ranks, world_size, stage):
    ranks(world_size).run(cases.all_ranks_may_skip_alike, stage=stage)


def test_only_the_first_step_of_a_kind_is_compared(ranks):
    assert ranks(2).run(cases.steps_of_several_kinds) == ranks(2).run(cases.steps_of_several_kinds)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_a_rank_that_does_not_come_is_an_error_that_names_the_collective(ranks, world_size, stage):
    messages = ranks(world_size).run(cases.a_rank_that_does_not_come, stage=stage, late=world_size - 1)
    where = {
        "zero1": "all-reduce of the bucket of",
        "zero2": "reduce-scatter of the bucket of",
        "zero3": "all-gather of unit",
    }
    assert all(f"waited in vain for the {where[stage]} '" in message for message in messages[:-1]), messages


@pytest.mark.parametrize("longest", (0, 1))
@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_unequal_numbers_of_batches(ranks, world_size, stage, longest):
    answers = ranks(world_size).run(cases.unequal_numbers_of_batches, stage=stage, longest=longest)
    assert len(set(answers)) == 1
