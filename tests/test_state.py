"""Weights and buffers in and out: what is loaded is used, and rank 0's running statistics count."""

import cases_state as cases
import parts
import pytest
import torch


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
def test_every_kind_of_buffer_is_rank_0s(ranks, world_size, stage):
    ranks(world_size).run(cases.every_kind_of_buffer, stage=stage)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("param_dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("stage", parts.STAGES)
def test_frozen_parameters_that_are_quantized(ranks, world_size, stage, param_dtype):
    ranks(world_size).run(cases.quantized_frozen_parameters, stage=stage, param_dtype=param_dtype)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_what_modules_keep_besides_tensors(ranks, tmp_path, stage):
    ranks(2).run(cases.extra_state, stage=stage, folder=str(tmp_path))
