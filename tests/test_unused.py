"""Parameters that a step leaves unused: on some ranks or on all, with find_unused=True and without."""

import cases_unused as cases
import parts
import pytest

OPTIONS = [("zero2", {"bucket_mb": 0}), ("zero3", {"prefetch": 0}), ("zero3", {"reshard_after_forward": False})]


@pytest.mark.parametrize("micro_batches, no_sync", ((1, False), (3, False), (3, True)))
@pytest.mark.parametrize("world_size, same", ((1, True), (2, True), (2, False), (3, False)))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_unused_parameters(ranks, world_size, same, stage, micro_batches, no_sync):
    case = {"stage": stage, "same": same, "options": {}, "micro_batches": micro_batches, "no_sync": no_sync}
    ranks(world_size).run(cases.find_unused, **case)


@pytest.mark.parametrize("stage, options", OPTIONS, ids=str)
def test_unused_parameters_with_other_options(ranks, stage, options):
    case = {"stage": stage, "same": False, "options": options}
    ranks(3).run(cases.find_unused, **case, micro_batches=1, no_sync=False)
    ranks(3).run(cases.find_unused, **case, micro_batches=2, no_sync=True)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_finding_them_costs_one_small_all_reduce(ranks, world_size, stage):
    for nbytes in ranks(world_size).run(cases.find_unused_traffic, stage=stage):
        assert nbytes == 18  # one byte for each trainable parameter of the model


def test_finding_them_keeps_the_bound_on_gradients_in_zero3(ranks):
    ranks(2).run(cases.find_unused_memory)


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_unused_parameters_are_an_error_by_default(ranks, world_size, stage):
    for message in ranks(world_size).run(cases.unused_by_default, stage=stage):
        unused = "'heads.b.weight'" if stage != "zero3" else "'blocks.0.adapters.0', 'blocks.0.adapters.2'"
        assert unused in message and "find_unused=True" in message and " more" in message
        assert "adapters.1" not in message and "'early'" not in message and "heads.a" not in message


@pytest.mark.parametrize("stage", ("zero2", "zero3"))
def test_gradients_that_were_not_reduced_are_not_dropped(ranks, stage):
    for message in ranks(3).run(cases.nothing_is_lost, stage=stage):
        assert "gradient" in message and "no_sync" in message


@pytest.mark.parametrize("model", ("twice", "tied", "around", "inside", "several", "odd"))
@pytest.mark.parametrize(
    "stage, options",
    [*((stage, {}) for stage in parts.STAGES), ("zero3", {"prefetch": 0}), ("zero3", {"reshard_after_forward": False})],
    ids=str,
)
def test_find_unused_changes_nothing_where_all_is_used(ranks, model, stage, options):
    ranks(3).run(cases.combinations, stage=stage, model=model, options=options)
