"""Engines that go are freed, closed ones leave a plain model, and copies of a model belong to no engine."""

import cases_lifetime as cases
import parts
import pytest

STAGES = pytest.mark.parametrize("stage", parts.STAGES)
WORLDS = pytest.mark.parametrize("world_size", (2, 3))


# `_pack` gives autograd the tensor that it was given. Where an operation saves its own result (tanh, softmax, exp) that
# is a cycle through C++, which only a backward opens.


@pytest.mark.parametrize(
    "stage, how",
    [
        (stage, how)
        for stage in parts.STAGES
        for how in ("trained", "mixed precision", "between forward and backward", "after an error", "closed")
    ],
)
def test_engines_that_go_leave_nothing_alive(ranks, stage, how):
    ranks(2).run(cases.engines_that_go, stage=stage, how=how)


@WORLDS
@pytest.mark.parametrize(
    "stage, options",
    [("zero1", {}), ("zero2", {"bucket_mb": 0}), ("zero3", {}), ("zero3", {"reshard_after_forward": False})],
    ids=str,
)
def test_closing_gives_a_plain_model(ranks, world_size, stage, options):
    ranks(world_size).run(cases.closing, stage=stage, options=options)


@STAGES
def test_closing_gives_the_values_of_the_shards(ranks, stage):
    ranks(2).run(cases.closing_mixed_precision, stage=stage)


@STAGES
def test_closing_between_backward_and_step(ranks, stage):
    ranks(3).run(cases.closing_in_the_middle, stage=stage)


@pytest.mark.parametrize("mixed", (False, True))
@pytest.mark.parametrize("how", ("deepcopy", "pickle", "torch.save"))
@STAGES
def test_copies_of_the_model(ranks, stage, how, mixed):
    ranks(2).run(cases.copies, stage=stage, how=how, mixed=mixed)


@WORLDS
@STAGES
def test_a_leaf_that_stays_collects_nothing(ranks, world_size, stage):
    ranks(world_size).run(cases.a_leaf_that_stays, stage=stage)


@pytest.mark.parametrize("way", ("forward alone", "a branch that the loss leaves out", "a graph that is retained"))
@pytest.mark.parametrize("stage", ("zero1", "zero2", "zero3"))
def test_graphs_that_nobody_goes_through_are_freed(ranks, stage, way):
    ranks(2).run(cases.graphs_that_nobody_goes_through, stage=stage, way=way)


@pytest.mark.parametrize("stage", ("zero1", "zero2"))
def test_a_copy_in_mixed_precision_may_be_moved(ranks, stage):
    ranks(2).run(cases.a_copy_in_mixed_precision_is_moved, stage=stage)
