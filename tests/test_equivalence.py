"""The stages compute what plain PyTorch, DDP and FSDP2 compute."""

import cases_equivalence as cases
import parts
import pytest

EVERY_N = (1, 2, 3, 4)
LAYOUTS = [
    ("zero1", {}),
    ("zero1", {"bucket_mb": 0}),
    ("zero1", {"bucket_mb": 0.0003}),
    ("zero2", {}),
    ("zero2", {"bucket_mb": 0}),
    ("zero2", {"bucket_mb": 0.0003}),
    ("zero3", {}),
    ("zero3", {"prefetch": 0}),
    ("zero3", {"prefetch": 5}),
    ("zero3", {"reshard_after_forward": False}),
    ("zero3", {"units": []}),
    ("zero3", {"units": ["the whole model"]}),
]


@pytest.mark.parametrize("world_size", EVERY_N)
@pytest.mark.parametrize("stage, options", LAYOUTS, ids=str)
def test_equals_one_process_on_the_whole_batch(ranks, world_size, stage, options):
    ranks(world_size).run(cases.against_the_oracle, stage=stage, optimizer="adamw", options=options)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("optimizer", [name for name in parts.OPTIMIZERS if name != "adamw"])
@pytest.mark.parametrize("stage", parts.STAGES)
def test_elementwise_optimizers(ranks, world_size, stage, optimizer):
    ranks(world_size).run(cases.against_the_oracle, stage=stage, optimizer=optimizer, options={})


@pytest.mark.parametrize("stage, options", LAYOUTS, ids=str)
def test_equals_ddp_and_fsdp2_to_the_bit_on_two_ranks(ranks, stage, options):
    ranks(2).run(cases.like_ddp_and_fsdp2, stage=stage, options=options)


@pytest.mark.parametrize("world_size", EVERY_N)
@pytest.mark.parametrize("stage", parts.STAGES)
def test_one_step_on_integers_is_exact(ranks, world_size, stage):
    ranks(world_size).run(cases.one_exact_step, stage=stage)


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
@pytest.mark.parametrize(
    "case",
    (
        cases.own_loop,
        cases.any_inputs_and_outputs,
        cases.state_in_and_out,
        cases.awkward_models,
        cases.frozen_among_trainable,
        cases.two_dtypes,
    ),
    ids=lambda case: case.__name__,
)
def test_models_and_loops_of_ones_own(ranks, world_size, stage, case):
    ranks(world_size).run(case, stage=stage)


@pytest.mark.parametrize("stage, options", LAYOUTS, ids=str)
def test_every_layout_in_a_loop_of_ones_own(ranks, stage, options):
    ranks(2).run(cases.own_loop, stage=stage, options=options)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage, options", LAYOUTS, ids=str)
def test_backwards_add_up(ranks, world_size, stage, options):
    ranks(world_size).run(cases.backwards_that_add_up, stage=stage, options=options)
