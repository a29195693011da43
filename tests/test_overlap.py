"""Collectives beside computation: issued before it, waited for after it, and right however late they run."""

import cases_overlap as cases
import parts
import pytest


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
