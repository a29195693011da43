"""What needs a GPU: one rank over NCCL, and one on each GPU, or two that share the only one over gloo.

Without a GPU these are skipped. First come properties that tests/test_properties.py asks on the CPU, then cases for
GPUs alone.
"""

import argparse
import gc
import inspect
import itertools

import cases_cuda as cases
import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from zerolab.properties import fixtures
from zerolab.properties.property import examine, library

GPUS = torch.cuda.device_count()
needs_gpu = pytest.mark.skipif(not GPUS, reason="needs a GPU")
SEVERAL = f"a rank on each of {GPUS} GPUs" if GPUS > 1 else "two ranks share a GPU"
SIZES = [
    pytest.param(1, id="one rank over NCCL", marks=needs_gpu),
    pytest.param(max(2, GPUS), id=SEVERAL, marks=needs_gpu),
]
ZERO3 = [("zero3", {"prefetch": 0}), ("zero3", {}), ("zero3", {"reshard_after_forward": False})]
LAYOUTS = [("zero1", {}), ("zero2", {}), *ZERO3]
OFFLOADED = [(stage, {"offload_policy": CPUOffloadPolicy()}) for stage in fixtures.STAGES]
OF_ALL_STAGES = [
    ("held_bytes_equal_the_theory", {}),
    ("held_bytes_equal_the_theory", {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
    ("clipping_takes_the_norm_of_the_whole_model", {"norm_type": 2.0}),
    ("an_overflow_on_one_rank_skips_the_step_on_all", {"overflow_on": 0}),
]
ON_A_GPU = [
    # On more than two ranks in float64, to 1e-10: there sums have another order.
    *(("equals_ddp_and_fsdp2", stage, options) for stage, options in LAYOUTS),
    *((name, stage, case) for (name, case), stage in itertools.product(OF_ALL_STAGES, fixtures.STAGES)),
    ("the_same_seed_gives_the_same_weights_on_meta", "zero3", {}),
]


def test_what_is_asked_on_gpus_is_there():
    """Also where there is no GPU to ask it."""
    for name, _, case in ON_A_GPU:
        inspect.signature(library()[name].check).bind("engine", **case, device="cuda")


@pytest.mark.parametrize("name, stage, case", ON_A_GPU, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_holds_on_a_gpu(on_gpus, size, name, stage, case):
    found = on_gpus(size).run(examine, name=name, engine=stage, case={**case, "device": "cuda"})
    assert not any(found), found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", fixtures.STAGES)
def test_the_allocators_peak_is_the_ledgers(on_gpus, size, stage):
    for ratio in on_gpus(size).run(cases.allocators_peak, stage=stage):
        assert 0.99 < ratio < 2


@pytest.mark.parametrize("size", SIZES)
def test_ddp_leaves_nothing_behind(on_gpus, size):
    on_gpus(size).run(cases.ddp_leaves_nothing)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage, options", LAYOUTS + OFFLOADED, ids=str)
def test_collectives_wait_for_slow_kernels(on_gpus, size, stage, options):
    on_gpus(size).run(cases.collectives_wait_for_compute, stage=stage, options=options)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage, options", LAYOUTS + OFFLOADED, ids=str)
def test_kernels_wait_for_slow_collectives(on_gpus, size, stage, options):
    assert all(on_gpus(size).run(cases.compute_waits_for_collectives, stage=stage, options=options))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", fixtures.STAGES)
def test_offload_changes_nothing(on_gpus, size, stage):
    """Shards, gradients and the update on the host; copies have streams of their own."""
    on_gpus(size).run(cases.offload_changes_nothing, stage=stage)


@needs_gpu
def test_out_of_memory_is_a_row_and_leaves_nothing():
    from zerolab.measure import memory

    argv = ["--preset", "small", "2", "--seq", "64", "--device", "cuda", "--engines", "ddp,zero3"]
    options = memory.arguments(argv)
    torch.cuda.init()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    # Enough for a rank of ZeRO-3 and not for DDP's: 16 bytes for each of 86 million parameters.
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
