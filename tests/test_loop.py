"""What a training loop needs around a step: clipping, groups, accumulation, checkpointing, tied weights."""

import math

import cases_loop as cases
import parts
import pytest
import torch

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("norm_type", (2.0, 1.0, math.inf))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_clipping_equals_torch_on_the_whole_model(ranks, world_size, stage, norm_type):
    ranks(world_size).run(cases.clipping, stage=stage, norm_type=norm_type)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_clipping_counts_a_tied_weight_once(ranks, stage):
    ranks(3).run(cases.clipping, stage=stage, norm_type=2.0, model="Twice")


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_clipping_between_two_backwards(ranks, world_size, stage):
    ranks(world_size).run(cases.clipping_between_backwards, stage=stage)


@pytest.mark.parametrize("norm_type", (2.0, math.inf))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_clipping_shows_a_nan_or_inf_of_one_rank_to_all(ranks, stage, norm_type):
    for norm in ranks(3).run(cases.clipping_sees_a_nan, stage=stage, value=math.nan, norm_type=norm_type):
        assert math.isnan(norm)
    for norm in ranks(3).run(cases.clipping_sees_a_nan, stage=stage, value=math.inf, norm_type=norm_type):
        assert not math.isfinite(norm)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("low, high", ((None, FP32), (FP32, FP64), (BF16, FP32)), ids=str)
@pytest.mark.parametrize("stage", parts.STAGES)
def test_clipping_where_a_rank_owns_only_padding(ranks, world_size, stage, low, high):
    for norm_type in (2.0, math.inf):
        case = {"stage": stage, "low": low, "high": high, "norm_type": norm_type}
        ranks(world_size).run(cases.clipping_of_a_few_elements, **case)


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize(
    "stage, options", [*((stage, {}) for stage in parts.STAGES), ("zero2", {"bucket_mb": 0})], ids=str
)
def test_parameter_groups_and_schedulers(ranks, world_size, stage, options):
    ranks(world_size).run(cases.parameter_groups, stage=stage, options=options)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_wrong_groups_are_refused(ranks, stage):
    for messages in ranks(2).run(cases.wrong_groups, stage=stage):
        assert len(messages) == 4
        assert "'head.weight'" in messages[0] and "'head.bias'" in messages[0] and "in no group" in messages[0]
        assert "'head.weight' is twice" in messages[1] and "(5,)" in messages[2]
        assert "param_groups[0]" in messages[3] and "dictionary" in messages[3]


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("micro_batches, no_sync", ((1, False), (3, False), (3, True)))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_bytes_sent_for_micro_batches(ranks, world_size, stage, micro_batches, no_sync):
    ranks(world_size).run(cases.accumulation_traffic, stage=stage, micro_batches=micro_batches, no_sync=no_sync)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("where", ("around", "inside", "around several"))
@pytest.mark.parametrize(
    "stage, options",
    [*((stage, {}) for stage in parts.STAGES), ("zero3", {"prefetch": 0}), ("zero3", {"reshard_after_forward": False})],
    ids=str,
)
def test_activation_checkpointing(ranks, world_size, where, stage, options):
    ranks(world_size).run(cases.activation_checkpointing, stage=stage, where=where, options=options)


@pytest.mark.parametrize("model", ("TiedAcross", "SharedInside"))
@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_weights_tied_across_units(ranks, world_size, stage, model):
    ranks(world_size).run(cases.tied_across_units, stage=stage, model=model)
