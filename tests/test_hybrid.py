"""Hybrid sharding: a DeviceMesh of two dimensions, replicated over the first and sharded over the second."""

import cases_hybrid as cases
import parts
import pytest
import torch

BF16 = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("stage", parts.STAGES)
@pytest.mark.parametrize(
    "options", [{}, {"dtypes": BF16}, {"micro_batches": 3}, {"max_norm": 0.1}], ids=["", "bf16", "no_sync", "clipped"]
)
def test_equals_fsdp2_on_the_same_mesh_to_the_bit(ranks, stage, options):
    ranks(4).run(cases.like_fsdp2, stage=stage, **options)


@pytest.mark.parametrize("stage", parts.STAGES)
@pytest.mark.parametrize(
    "case",
    [
        cases.like_ddp, cases.rank_0_decides_how_all_begin, cases.bytes_by_dimension, cases.unused_in_one_replica,
        cases.a_backward_after_clipping_adds, cases.refusals, cases.however_late_the_replicas_answer,
    ],
    ids=lambda case: case.__name__,
)  # fmt: skip
def test_two_by_two(ranks, stage, case):
    ranks(4).run(case, stage=stage)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_checkpoints_across_layouts(ranks, stage, tmp_path):
    ranks(4).run(cases.checkpoints_across_layouts, stage=stage, folder=str(tmp_path))


@pytest.mark.parametrize("stage", parts.STAGES)
def test_one_row_or_column(ranks, stage):
    ranks(2).run(cases.a_grid_of_one_row_or_column, stage=stage)


def test_a_mesh_over_a_part_of_the_ranks_needs_no_other(ranks):
    ranks(3).run(cases.a_mesh_over_a_part_of_the_ranks)
