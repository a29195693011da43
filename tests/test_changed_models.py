"""A model that is changed behind the engine's back: refused on every rank, with the way out."""

import cases_changed_models as cases
import parts
import pytest


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
        assert ("[1" if rank == 0 else "every rank") in messages[3]  # rank 0 has passed a state, the others none
