"""How parameters lie in their buffers: aligned, padded, each element owned once."""

import cases_layout as cases
import parts
import pytest
import torch


@pytest.mark.parametrize("param_dtype", (None, torch.bfloat16))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_parameters_start_on_16_byte_boundaries(ranks, stage, param_dtype):
    ranks(3).run(cases.weights_start_aligned, stage=stage, param_dtype=param_dtype)


@pytest.mark.parametrize("world_size", (2, 4))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_a_rank_that_owns_only_padding(ranks, world_size, stage):
    ranks(world_size).run(cases.only_padding, stage=stage)
