"""What needs a GPU: one rank over NCCL, and one on each GPU, or two that share the only one over gloo.

Without a GPU these are skipped. What of them does not need CUDA itself runs on the CPU as well, so that the cases are
known to be right before anybody has a GPU.
"""

import argparse
import gc

import cases_cuda as cases
import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from harness.properties import parts
from harness.properties.property import examine

GPUS = torch.cuda.device_count()
needs_gpu = pytest.mark.skipif(not GPUS, reason="needs a GPU")
SEVERAL = f"a rank on each of {GPUS} GPUs" if GPUS > 1 else "two ranks share a GPU"
CUDA = [pytest.param(name, marks=needs_gpu) for name in ("one rank over NCCL", SEVERAL)]
ZERO3 = [("zero3", {"prefetch": 0}), ("zero3", {}), ("zero3", {"reshard_after_forward": False})]
LAYOUTS = [("zero1", {}), ("zero2", {}), *ZERO3]
OFFLOADED = [(stage, {"offload_policy": CPUOffloadPolicy()}) for stage in parts.STAGES]


@pytest.fixture(scope="module")
def at(ranks):
    """`at("cpu")`: a pool of ranks that are there, and the type of their device."""
    from pool import Pool

    pools = {}

    def of(where: str):
        if where == "cpu":
            return ranks(2), "cpu"
        if where not in pools:
            shares = GPUS == 1 and where == SEVERAL
            pools[where] = Pool(*((2, "gloo") if shares else (GPUS if where == SEVERAL else 1, "nccl")), device="cuda")
        return pools[where], "cuda"

    yield of
    for pool in pools.values():
        pool.let_go()
        pool.close()


@pytest.mark.parametrize("stage, options", LAYOUTS, ids=str)
@pytest.mark.parametrize("where", CUDA)
def test_equals_ddp_and_fsdp2_to_the_bit(at, where, stage, options):
    """On more than two ranks in float64, to 1e-10: there sums have another order. (On the CPU: test_properties.py.)"""
    pool, device = at(where)
    case = {"options": options, "device": device}
    assert not any(pool.run(examine, name="equals_ddp_and_fsdp2", engine=stage, case=case))


@pytest.mark.parametrize("where", ("cpu", *CUDA))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_bytes_held(at, where, stage):
    pool, device = at(where)
    pool.run(cases.bytes_held, stage=stage, device=device)


@pytest.mark.parametrize("where", ("cpu", *CUDA))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_weights_are_aligned(at, where, stage):
    pool, device = at(where)
    pool.run(cases.weights_are_aligned, stage=stage, device=device)


@pytest.mark.parametrize("where", ("cpu", CUDA[1]))
def test_unsharded_adamw_fails_on_bytes(at, where):
    pool, device = at(where)
    for message in pool.run(parts.failure, module="cases_cuda", of="bytes_held", stage="zero3", device=device,
                            engine_name="impostor"):  # fmt: skip
        assert "expected" in message


@pytest.mark.parametrize("where", CUDA)
@pytest.mark.parametrize("stage", parts.STAGES)
def test_the_allocators_peak_is_the_ledgers(at, where, stage):
    pool, _ = at(where)
    for ratio in pool.run(cases.allocators_peak, stage=stage):
        assert 0.99 < ratio < 2


@pytest.mark.parametrize("where", CUDA)
def test_ddp_leaves_nothing_behind(at, where):
    pool, _ = at(where)
    pool.run(cases.ddp_leaves_nothing)


@pytest.mark.parametrize("where", CUDA)
def test_order_of_collectives(at, where):
    pool, device = at(where)
    assert not any(pool.run(examine, name="zero3_order", engine="zero3", case={"device": device}))


@pytest.mark.parametrize("where", CUDA)
@pytest.mark.parametrize("stage, options", LAYOUTS + OFFLOADED, ids=str)
def test_collectives_wait_for_slow_kernels(at, where, stage, options):
    pool, _ = at(where)
    pool.run(cases.collectives_wait_for_compute, stage=stage, options=options)


@pytest.mark.parametrize("where", CUDA)
@pytest.mark.parametrize("stage, options", LAYOUTS + OFFLOADED, ids=str)
def test_kernels_wait_for_slow_collectives(at, where, stage, options):
    pool, _ = at(where)
    assert all(pool.run(cases.compute_waits_for_collectives, stage=stage, options=options))


@pytest.mark.parametrize("where", CUDA)
@pytest.mark.parametrize("stage", parts.STAGES)
def test_offload_changes_nothing(at, where, stage):
    """Shards, gradients and the update on the host; copies have streams of their own."""
    pool, _ = at(where)
    pool.run(cases.offload_changes_nothing, stage=stage)


@pytest.mark.parametrize("where", CUDA)
@pytest.mark.parametrize("stage", parts.STAGES)
def test_float16_with_a_loss_scaler(at, where, stage):
    """Step 2 overflows on rank 0 and is skipped everywhere. (On the CPU: test_properties.py.)"""
    pool, device = at(where)
    case = {"overflow_on": 0, "device": device}
    assert not any(pool.run(examine, name="an_overflow_on_one_rank_skips_the_step_on_all", engine=stage, case=case))


@pytest.mark.parametrize("where", ("cpu", *CUDA))
def test_a_model_on_meta_arrives_on_the_device(at, where):
    pool, device = at(where)
    pool.run(cases.meta_to_the_device, device=device)


@pytest.mark.parametrize("where", ("cpu", *CUDA))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_clipping(at, where, stage):
    pool, device = at(where)
    pool.run(cases.norm_of_gradients, stage=stage, device=device)


@needs_gpu
def test_out_of_memory_is_a_row_and_leaves_nothing():
    from harness.measure import memory

    argv = ["--preset", "small", "--ranks", "2", "--seq", "64", "--device", "cuda", "--engines", "ddp,zero3"]
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
