"""Offload: `offload_policy=CPUOffloadPolicy()`."""

import cases_offload as cases
import parts
import pytest
import torch

OPTIONS = {
    "float32": {},
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "float16": {"param_dtype": torch.float16},
    "hybrid": {"hybrid": True},
}


@pytest.mark.parametrize("stage", parts.STAGES)
@pytest.mark.parametrize("kind", OPTIONS)
def test_the_same_run_to_the_bit(ranks, stage, kind, tmp_path):
    ranks(4 if kind == "hybrid" else 2).run(
        cases.the_same_run, stage=stage, options=OPTIONS[kind], folder=str(tmp_path)
    )


def test_another_policy_is_refused(ranks):
    ranks(2).run(cases.another_policy_is_refused)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_the_host_waits_for_copies(ranks, stage):
    ranks(2).run(cases.the_host_waits_for_copies, stage=stage)
