"""Models as they are, and what a step may do with them, in every stage."""

import cases_models as cases
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
        assert "not reduced" in message and "no_sync" in message


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_changing_requires_grad_is_refused_with_the_way_out(ranks, world_size, stage):
    for frozen, unfrozen in ranks(world_size).run(cases.changed_flags, stage=stage):
        assert "'head.bias'" in frozen and "full_state_dict" in frozen and "'frozen'" not in frozen
        assert "'frozen'" in unfrozen and "find_unused=True" in unfrozen and "head" not in unfrozen


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_what_happens_behind_the_engines_back_is_refused(ranks, world_size, stage):
    for rank, messages in enumerate(ranks(world_size).run(cases.behind_the_engines_back, stage=stage)):
        assert "'blocks.3.up.weight'" in messages[0] and "after the engine was built" in messages[0]
        assert all("load_full_state_dict" in message for message in messages[1:3])
        assert ("the checks failed on rank(s) [1" if rank == 0 else "every rank must pass the whole state") in messages[
            3
        ]


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("form", ("dict", "dataclass", "tuple", "object"))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_outputs_of_any_form(ranks, world_size, form, stage):
    ranks(world_size).run(cases.outputs, stage=stage, form=form)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_loading_reaches_frozen_weights(ranks, world_size, stage):
    ranks(world_size).run(cases.loading_reaches_frozen_weights, stage=stage)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_running_statistics_are_rank_0s(ranks, world_size, stage):
    ranks(world_size).run(cases.batch_norm_keeps_rank_0, stage=stage)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_reentrant_checkpointing(ranks, world_size, stage):
    for messages in ranks(world_size).run(cases.reentrant_checkpoint, stage=stage):
        assert len(messages) == 3 * (stage == "zero3")
        assert all("use_reentrant=False" in message for message in messages)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_checkpointing_the_whole_model(ranks, world_size, stage):
    ranks(world_size).run(cases.checkpoint_around_the_model, stage=stage)


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


@pytest.mark.parametrize("stage", parts.STAGES)
def test_one_dimension_of_a_device_mesh(ranks, stage):
    ranks(4).run(cases.one_dimension_of_a_mesh, stage=stage)


@pytest.mark.parametrize("model", ("twice", "tied", "around", "inside", "several", "odd"))
@pytest.mark.parametrize(
    "stage, options",
    [*((stage, {}) for stage in parts.STAGES), ("zero3", {"prefetch": 0}), ("zero3", {"reshard_after_forward": False})],
    ids=str,
)
def test_find_unused_changes_nothing_where_all_is_used(ranks, model, stage, options):
    ranks(3).run(cases.combinations, stage=stage, model=model, options=options)


@pytest.mark.parametrize("model", ("twice", "tied", "around"))
def test_bfloat16_is_the_same_in_every_stage(ranks, model):
    ranks(2).run(cases.low_precision_everywhere, model=model)
