"""What a forward may be: outputs of any form, and activation checkpointing around it."""

import cases_forward as cases
import parts
import pytest


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("form", ("dict", "dataclass", "tuple", "object"))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_outputs_of_any_form(ranks, world_size, form, stage):
    ranks(world_size).run(cases.outputs, stage=stage, form=form)


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
