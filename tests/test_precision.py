"""Mixed precision and loss scaling, in every stage."""

import cases_precision as cases
import parts
import pytest
import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    "param_dtype, reduce_dtype, micro_batches, no_sync",
    (
        (BF16, FP32, 1, False),
        (BF16, None, 1, False),
        (BF16, FP32, 3, False),
        (BF16, FP32, 3, True),
        (None, BF16, 1, False),
    ),
    ids=str,
)
@pytest.mark.parametrize("stage", parts.STAGES)
def test_equal_to_fsdp2_to_the_bit_on_two_ranks(ranks, stage, param_dtype, reduce_dtype, micro_batches, no_sync):
    for difference in ranks(2).run(
        cases.equals_fsdp2,
        stage=stage,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        micro_batches=micro_batches,
        no_sync=no_sync,
    ):
        assert difference == 0


@pytest.mark.parametrize("stage", parts.STAGES)
def test_close_to_fsdp2_on_three_ranks(ranks, stage):
    for difference in ranks(3).run(cases.equals_fsdp2, stage=stage, param_dtype=BF16, reduce_dtype=FP32):
        assert difference < 2e-3, difference


# bfloat16 to compute in, float32 to reduce in, AdamW: bytes per parameter, of which 1/N are cut
BYTES = {  # (parameters whole, cut), (gradients whole, cut), (optimizer state whole, cut)
    "zero1": ((2, 4), (4, 0), (0, 8)),  # 6 + 12/N
    "zero2": ((2, 4), (0, 4), (0, 8)),  # 2 + 16/N
    "zero3": ((0, 4), (0, 4), (0, 8)),  # 16/N
}
SENT = {
    "zero1": {"all-reduce": 8, "all-gather": 2},
    "zero2": {"reduce-scatter": 4, "all-gather": 2},
    "zero3": {"reduce-scatter": 4, "all-gather": 4},
}


@pytest.mark.parametrize("world_size", (1, 2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_bytes_per_parameter(ranks, world_size, stage):
    expected = dict(SENT[stage]) if world_size > 1 else {}
    for kind, (whole, cut) in zip(("parameters", "gradients", "optimizer"), BYTES[stage]):
        expected[kind] = whole + cut / world_size
    for found in ranks(world_size).run(cases.bytes_per_parameter, stage=stage):
        assert {kind: n for kind, n in found.items() if kind in expected} == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_no_float32_weights_besides_the_shards(ranks, stage):
    ranks(2).run(cases.nothing_besides, stage=stage)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_buffers_inputs_and_frozen_parameters_in_mixed_precision(ranks, world_size, stage):
    ranks(world_size).run(cases.dtypes_of_a_mixed_model, stage=stage)


def test_inputs_of_ones_own_units_are_cast(ranks):
    ranks(2).run(cases.units_of_ones_own)


@pytest.mark.parametrize("reduce_dtype", (FP32, BF16))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_clipping_in_mixed_precision(ranks, stage, reduce_dtype):
    ranks(3).run(cases.clipping_in_mixed_precision, stage=stage, reduce_dtype=reduce_dtype)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, world_size, stage):
    for overflow_on in range(world_size):
        for changed, scales in ranks(world_size).run(cases.scaling_skips_on_all, stage=stage, overflow_on=overflow_on):
            assert changed == [True, True, False, True, True]
            assert scales == [1024, 2048, 1024, 1024, 2048]


@pytest.mark.parametrize("stage", parts.STAGES)
def test_scaling_by_a_power_of_two_changes_nothing(ranks, stage):
    ranks(2).run(cases.scaling_changes_nothing_else, stage=stage)
    ranks(3).run(cases.a_rank_of_padding_scales_along, stage=stage)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_the_scaler_takes_an_engine(ranks, stage):
    for message in ranks(2).run(cases.the_scaler_takes_an_engine, stage=stage):
        assert "engine" in message and "AdamW" in message  # what it takes, and what it got


def test_gathered_units_are_half_as_large_in_bfloat16(ranks):
    for full, half in zip(
        ranks(2).run(cases.peak_in_forward, dtype=None), ranks(2).run(cases.peak_in_forward, dtype=BF16)
    ):
        shard = 64 * 64 + 64  # of one unit, in float32 2 bytes per parameter at N = 2, cast for sending
        assert half < full / 2 + 2 * 2 * shard + 1024, (half, full)


@pytest.mark.parametrize("model", ("twice", "tied", "around"))
def test_bfloat16_is_the_same_in_every_stage(ranks, model):
    ranks(2).run(cases.low_precision_everywhere, model=model)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("reduce_dtype", (None, BF16, FP16))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_the_mean_over_ranks_is_rounded_once(ranks, world_size, stage, reduce_dtype):
    ranks(world_size).run(cases.means_over_ranks, stage=stage, reduce_dtype=reduce_dtype)


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_sums_beyond_float16_have_a_mean(ranks, world_size, stage):
    ranks(world_size).run(cases.sums_beyond_float16, stage=stage)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_inputs_in_dataclasses_are_cast(ranks, stage):
    ranks(2).run(cases.dataclass_inputs, stage=stage)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_the_scaler_steps_once(ranks, stage):
    for twice, late, unscaled in ranks(2).run(cases.the_scaler_steps_once, stage=stage):
        assert "update()" in twice and late and "update()" in unscaled


@pytest.mark.parametrize("stage", parts.STAGES)
def test_scaling_where_the_default_dtype_is_float64(ranks, stage):
    for changed, _ in ranks(2).run(cases.scaling_where_the_default_is_float64, stage=stage):
        assert changed == [True, True, False, True, True]
