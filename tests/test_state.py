"""Weights and buffers in and out: what is loaded is used, and rank 0's running statistics count."""

import cases_state as cases
import parts
import pytest


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_loading_reaches_frozen_weights(ranks, world_size, stage):
    ranks(world_size).run(cases.loading_reaches_frozen_weights, stage=stage)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_running_statistics_are_rank_0s(ranks, world_size, stage):
    ranks(world_size).run(cases.batch_norm_keeps_rank_0, stage=stage)
