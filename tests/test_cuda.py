"""Tests that need a GPU: one rank over NCCL, and one on each GPU, or two that share the only one over gloo.

Without a GPU these tests are skipped. The chapters and the engines, "zero1.py" and "zero1".
"""

import argparse
import gc
import json
import re

import cases_cuda as cases
import pytest
import started
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

GPUS = torch.cuda.device_count()
needs_gpu = pytest.mark.skipif(not GPUS, reason="needs a GPU")
SEVERAL = f"a rank on each of {GPUS} GPUs" if GPUS > 1 else "two ranks share a GPU"
SIZES = [
    pytest.param(1, id="one rank over NCCL", marks=needs_gpu),
    pytest.param(max(2, GPUS), id=SEVERAL, marks=needs_gpu),
]
on_ranks = pytest.mark.parametrize("ranks", SIZES)

CHAPTERS = ["zero1.py", "zero2.py", "zero3.py"]
ENGINES = ["zero1", "zero2", "zero3"]
OFFLOAD = {"offload_policy": CPUOffloadPolicy()}
MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def every(stages, *options):
    """Marks a test: each of the stages with each of these options."""
    cases = [(stage, each) for each in options for stage in stages]
    return pytest.mark.parametrize("stage, options", cases, ids=str)


ZERO3 = [("zero3.py", {"prefetch": 0}), ("zero3", {"prefetch": 2}), ("zero3", {"reshard_after_forward": False})]
LAYOUTS = [*((stage, {}) for stage in CHAPTERS + ENGINES), *ZERO3]
with_offload = pytest.mark.parametrize("stage, options", LAYOUTS + [(stage, OFFLOAD) for stage in ENGINES], ids=str)


# Values.


@on_ranks
@pytest.mark.parametrize("stage, options", LAYOUTS + [(stage, {"find_unused": True}) for stage in ENGINES], ids=str)
def test_trains_as_one_process(on_gpus, ranks, stage, options):
    on_gpus(ranks, cases.equals_one_process, stage, "Tied", options)


@on_ranks
@pytest.mark.parametrize("stage", ENGINES)
def test_complex_parameters_train_as_one_process(on_gpus, ranks, stage):
    """NCCL has no complex numbers. (A chapter raises torch's error there.)"""
    on_gpus(ranks, cases.equals_one_process, stage, "Dtypes", {})


@on_ranks
@pytest.mark.parametrize("stage", ENGINES)
def test_clipping_takes_the_norm_of_the_whole_model(on_gpus, ranks, stage):
    on_gpus(ranks, cases.clipping_takes_the_norm_of_the_whole_model, stage, norm_type=2.0)


@on_ranks
@every(ENGINES, {}, OFFLOAD)
def test_an_overflow_on_one_rank_skips_the_step_on_all(on_gpus, ranks, stage, options):
    on_gpus(ranks, cases.an_overflow_on_one_rank_skips_the_step_on_all, stage, options)


@on_ranks
def test_a_model_on_meta_starts_as_the_whole_one(on_gpus, ranks):
    on_gpus(ranks, cases.a_model_on_meta_starts_as_the_whole_one)


@on_ranks
@every(ENGINES, OFFLOAD)
def test_offload_changes_nothing(on_gpus, ranks, stage, options):
    """Shards, gradients and the update are in the host's memory, which is pinned."""
    on_gpus(ranks, cases.offload_changes_nothing, stage, options)


# Memory.


@on_ranks
@pytest.mark.parametrize(
    "stage, options",
    [(stage, {}) for stage in CHAPTERS + ENGINES] + [(stage, OFFLOAD) for stage in ENGINES],
    ids=str,
)
def test_held_bytes_are_the_accounting(on_gpus, ranks, stage, options):
    on_gpus(ranks, cases.held_bytes_are_the_accounting, stage, options)


@on_ranks
@pytest.mark.parametrize("stage", CHAPTERS + ENGINES)
def test_the_allocators_peak_is_the_ledgers(on_gpus, ranks, stage):
    for ratio in on_gpus(ranks, cases.allocators_peak, stage):
        assert 0.99 < ratio < 2


@needs_gpu
@every(ENGINES, {}, MIXED, OFFLOAD, {**OFFLOAD, **MIXED})
def test_a_gather_allocates_what_the_ledger_sees(on_gpus, stage, options):
    """With offload and mixed precision a shard is copied to the GPU before it is rounded, in memory that counts."""
    on_gpus(1, cases.a_gather_allocates_what_the_ledger_sees, stage, options)


@on_ranks
def test_ddp_leaves_nothing_behind(on_gpus, ranks):
    on_gpus(ranks, cases.ddp_leaves_nothing)


@needs_gpu
def test_out_of_memory_is_a_row_and_leaves_nothing():
    from zerolab.measure import memory

    argv = ["--preset", "small", "2", "--seq", "64", "--device", "cuda", "--engines", "ddp,zero3"]
    options = memory.arguments(argv)
    torch.cuda.init()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    # Enough for a rank of ZeRO-3 but not for DDP's: 16 bytes for each of 86 million parameters.
    most = (torch.cuda.memory_reserved() + 1.2e9) / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(most, 0)
    try:
        found = memory.measure_all(argparse.Namespace(**vars(options)))["engines"]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert "out of memory" in found["ddp"]["out_of_memory"]
    assert found["zero3"]["peak_bytes"] < 1.2e9
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 2**26  # cuBLAS's workspaces, and nothing of the engines


# Order.


@on_ranks
@with_offload
def test_collectives_wait_for_slow_kernels(on_gpus, ranks, stage, options):
    on_gpus(ranks, cases.collectives_wait_for_slow_kernels, stage, options)


@on_ranks
@with_offload
def test_kernels_wait_for_slow_collectives(on_gpus, ranks, stage, options):
    """That each wait is needed: extra/simulated_gpu/."""
    on_gpus(ranks, cases.kernels_wait_for_slow_collectives, stage, options)


# The commands as readers run them.


@on_ranks
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_referee_finds_that_all_engines_match(ranks, dtype, tmp_path):
    options = ["--preset", "toy", "--steps", "4", "--timed-steps", "0", "--dtype", dtype]
    ended = started.launch("compare", str(ranks), *options, "--json", str(tmp_path / "out.json"))
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["match"] and report["device"] == "cuda"


@needs_gpu
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_runs(chapter):
    """It trains, and every rank prints what it holds."""
    ranks = max(2, GPUS)
    done = started.plain_torchrun([chapter], ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count(" MB of optimizer state") == ranks, done.stdout
    losses = [float(loss) for loss in re.findall(r"^training step +\d+: loss ([\d.]+)", done.stdout, re.MULTILINE)]
    assert losses[-1] < losses[0] - 1.5, done.stdout
