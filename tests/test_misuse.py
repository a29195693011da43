"""What would train wrong without a word: refused on every rank, with what it is about and the way out."""

import cases_misuse as cases
import parts
import pytest

STAGES = pytest.mark.parametrize("stage", parts.STAGES)
WORLDS = pytest.mark.parametrize("world_size", (2, 3))


def tells(text: str, *words: str) -> None:
    for word in words:
        assert word in text, (word, text)


@WORLDS
@STAGES
def test_who_takes_gradients_past_the_engine(ranks, world_size, stage):
    way_out = {
        "optimizer.step": ("engine.step()",),
        "clip_grad_norm_": ("engine.clip_grad_norm_(", "'embedding.weight'"),
        "clip_grad_value_": ("'embedding.weight'",),
        "clip_grad_norm_ of pieces": ("engine.clip_grad_norm_(",),
        "clip_grad_value_ of pieces": ("engine.clip_grad_value_(",),
        "clip of one": ("engine.clip_grad_norm_(", "'head.weight'"),
        "model.zero_grad": ("engine.zero_grad()",),
        "module.zero_grad": ("engine.zero_grad()", "'head.weight'"),
        "another SGD": ("engine.step()", "'embedding.weight'"),
        "another AdamW": ("engine.step()", "'embedding.weight'"),
        "another zero_grad": ("engine.zero_grad()", "'embedding.weight'"),
        "a closure": ("closure", "engine.step()"),
    }
    for found in ranks(world_size).run(cases.takers_of_gradients, stage=stage):
        assert found.keys() == way_out.keys()
        for name, words in way_out.items():
            tells(found[name], *words)


@STAGES
def test_clipping_by_value(ranks, stage):
    for found in ranks(3).run(cases.clipping_by_value, stage=stage):
        tells(found, "engine.clip_grad_value_(1.0)")


@STAGES
def test_torchs_scaler(ranks, stage):
    for found in ranks(2).run(cases.torchs_scaler, stage=stage):
        tells(found, "engine.gradients", "GradScaler")


@WORLDS
@STAGES
def test_the_optimizers_own_zero_grad_is_the_engines(ranks, world_size, stage):
    ranks(world_size).run(cases.the_optimizers_own_zero_grad, stage=stage)


@STAGES
def test_a_scheduler_sees_the_optimizers_steps(ranks, stage):
    ranks(2).run(cases.a_scheduler_over_the_optimizer, stage=stage)


@STAGES
def test_an_optimizer_that_steps_inside_backward(ranks, stage):
    for found in ranks(2).run(cases.steps_inside_backward, stage=stage):
        tells(found, "'head.weight'")  # whose gradient has moved, or which was written to


@WORLDS
@STAGES
def test_a_backward_of_weights_that_have_changed_since(ranks, world_size, stage):
    for found in ranks(world_size).run(cases.a_backward_after_the_step, stage=stage):
        tells(found, "version")


@pytest.mark.parametrize("find_unused", (True, False))
@pytest.mark.parametrize("no_sync", (True, False))
@STAGES
def test_a_backward_for_each_of_two_heads(ranks, stage, no_sync, find_unused):
    for found in ranks(3).run(cases.a_backward_for_each_head, stage=stage, no_sync=no_sync, find_unused=find_unused):
        if stage == "zero1" or find_unused:
            assert found is None
        elif found is not None:
            tells(found, "find_unused=True", "heads")


@STAGES
def test_nested_no_sync_ends_at_the_outer_exit(ranks, stage):
    ranks(2).run(cases.nested_no_sync, stage=stage)


@STAGES
def test_a_sparse_gradient_is_named(ranks, stage):
    for found in ranks(2).run(cases.sparse_gradients, stage=stage):
        tells(found, "'table'", "sparse=False")


NAMED = {"delattr": "'head.bias'", "None": "'head.bias'", "channels_last": "'picture.weight'"}


@pytest.mark.parametrize("move", cases.MOVES)
@STAGES
def test_a_model_that_is_moved_or_changed_after_the_build(ranks, stage, move):
    for found in ranks(2).run(cases.moved, stage=stage, move=move):
        tells(found, NAMED.get(move, ""), "'")
        assert "engine" in found, found


KEPT = {"reshard_after_forward": False}


@pytest.mark.parametrize("how", cases.MOVES_OF_FORWARD)
@pytest.mark.parametrize("stage, options", [("zero1", {}), ("zero2", {}), ("zero3", {}), ("zero3", KEPT)])
def test_a_forward_that_moves_its_weights(ranks, stage, options, how):
    for found in ranks(2).run(cases.moved_in_forward, stage=stage, how=how, options=options):
        assert len(found) == (0 if how == "there and back" else 2)
        for text in found:
            tells(text, "'blocks.1.up.weight'", "moved out of the engine's buffer")


@STAGES
def test_functional_call(ranks, stage):
    for found in ranks(2).run(cases.functional, stage=stage):
        tells(found, ".weight'", "functional_call")


@STAGES
def test_moves_that_change_nothing(ranks, stage):
    ranks(2).run(cases.moves_that_change_nothing, stage=stage)


@STAGES
def test_weights_that_are_written_by_hand(ranks, stage):
    for found in ranks(2).run(cases.written_between_steps, stage=stage):
        tells(found, "'head.weight'", "full_state_dict()")


@STAGES
def test_forwards_that_write_into_weights(ranks, stage):
    for writes, limited in ranks(2).run(cases.forward_writes, stage=stage):
        tells(writes, "'blocks.1.up.weight'", "written to")
        tells(limited, "'embedding'", "max_norm")


@WORLDS
@STAGES
def test_optimizer_state_that_does_not_fit(ranks, world_size, stage):
    names = {"zero1": "ZeRO1", "zero2": "ZeRO2", "zero3": "ZeRO3"}
    other = {"zero1": "ZeRO2", "zero2": "ZeRO3", "zero3": "ZeRO1"}[stage]
    for rank, found in enumerate(ranks(world_size).run(cases.optimizer_state, stage=stage)):
        here = f"{names[stage]}, rank {rank} of {world_size}"
        for text in found.values():
            tells(text, here, "harness.engine.checkpoint")
        tells(found["another number of ranks"], f"{names[stage]}, rank 0 of 1")
        tells(found["another stage"], f"{other}, rank {rank} of {world_size}")
        tells(found["another layout"], "other pieces")
        tells(found["another model"], "other pieces")
        tells(found["plain"], "no engine")
        tells(found["one parameter"], "no engine")


@WORLDS
@STAGES
def test_optimizer_state_that_fits_goes_on(ranks, world_size, stage):
    ranks(world_size).run(cases.optimizer_state_that_fits, stage=stage)


@WORLDS
@STAGES
def test_a_refused_build_leaves_the_model_as_it_was(ranks, world_size, stage):
    for rank, found in enumerate(ranks(world_size).run(cases.refused_builds, stage=stage)):
        no_optimizer, forgotten, frozen, one, whole = found
        tells(no_optimizer, "str", "torch.optim.Optimizer")
        tells(forgotten, "in no group", "'embedding.weight'")
        tells(frozen, "param_groups[0]")
        tells(one, "of the caller's own" if rank == world_size - 1 else f"[{world_size - 1}]")
        tells(whole, "LBFGS")


@pytest.mark.parametrize("stage", ("zero1", "zero2", "zero3"))
def test_a_build_that_fails_late_gives_the_model_back(ranks, stage):
    for found in ranks(2).run(cases.a_build_that_fails_late, stage=stage):
        tells(found, "the second time")


@WORLDS
def test_init_fn_that_raises_on_one_rank(ranks, world_size):
    for rank, found in enumerate(ranks(world_size).run(cases.init_fn_raises_on_one)):
        tells(found, "of the caller's own" if rank == world_size - 1 else f"[{world_size - 1}]")


@STAGES
def test_groups_of_names_and_parameters(ranks, stage):
    for theirs, text in ranks(3).run(cases.named_pairs, stage=stage):
        tells(theirs, "param_groups[0]", "(2,)")
        tells(text, "param_groups[0]", "'weight'")


@STAGES
def test_a_sparse_buffer_is_named(ranks, stage):
    for found in ranks(2).run(cases.sparse_buffers, stage=stage):
        tells(found, "'graph'", "to_dense()")


def test_a_buffer_under_two_names(ranks):
    ranks(2).run(cases.a_buffer_under_two_names)


def test_metadata_of_freed_weights(ranks):
    ranks(2).run(cases.metadata_of_freed_weights)


@STAGES
def test_an_engine_is_like_its_model(ranks, stage):
    ways = {
        "state_dict": "full_state_dict()",
        "load_state_dict": "load_full_state_dict",
        "cuda": "then build",
        "to": "then build",
        "half": "param_dtype",
        "requires_grad_": "before building",
        "backward": "loss.backward()",
        "blocks": "engine.model.blocks",
        "nonsense": "'nonsense'",
    }
    for found in ranks(2).run(cases.an_engine_is_like_its_model, stage=stage):
        for text, way in zip(found, ways.values(), strict=True):
            tells(text, way)


@STAGES
def test_a_mesh_for_a_group(ranks, stage):
    for found in ranks(2).run(cases.a_mesh_for_a_group, stage=stage):
        tells(found, "3 dimensions", "mesh[")


@STAGES
def test_batch_norm_in_bfloat16_on_a_cpu(ranks, stage):
    for found in ranks(2).run(cases.batch_norm_in_bfloat16, stage=stage):
        tells(found, "'1'", "bfloat16", "CPU")


@WORLDS
@STAGES
def test_parameters_of_ones_own_class(ranks, world_size, stage):
    ranks(world_size).run(cases.parameters_of_ones_own_class, stage=stage)
