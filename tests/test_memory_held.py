"""What each stage holds between two steps, to the byte; an engine that shards nothing fails here."""

import re

import cases_memory_held as cases
import parts
import pytest


@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_bytes_held_equal_the_theory_to_the_byte(ranks, world_size, stage):
    ranks(world_size).run(cases.held_after_step_3, stage=stage)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_unsharded_adamw_under_ddp_fails_on_memory(ranks, stage):
    for message in ranks(2).run(
        parts.failure, module="cases_memory_held", of="held_after_step_3", stage=stage, engine_name="impostor"
    ):
        assert re.search("held .* expected", message), message


@pytest.mark.parametrize("stage", parts.STAGES)
def test_steps_leave_no_hooks_behind(ranks, stage):
    ranks(2).run(cases.hooks_on_the_model, stage=stage)
