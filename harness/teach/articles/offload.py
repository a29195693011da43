"""Claims about offload: what leaves the GPU, and what it costs. Dry runs on a fake GPU, and a real AdamW."""

import atexit
import dataclasses
import functools
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from harness.measure import dry_run
from harness.measure.parts import GRADIENTS, OPTIMIZER, PARAMETERS
from harness.teach.articles.claim import FRAMEWORKS, NAMES, SHARDING_STATE, WORDPRESS, Claim, holds_when, verdict
from harness.teach.articles.runs import parameters_of

RANKS = 8
H100 = 989e12  # FLOP/s in bfloat16, as published: no step computes quicker
PCIE = 64e9  # bytes/s to the host and as many back, generation 5 with 16 lanes: no copy is quicker


@functools.cache
def _process() -> ProcessPoolExecutor:
    """The fake GPU stays in its process for good: see `fake_gpu.register`."""
    process = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    atexit.register(process.shutdown)
    return process


@functools.cache
def dry(engine: str, offload: bool = True) -> dict:
    options = dry_run.arguments(["--preset", "tiny", "--ranks", str(RANKS), *(["--offload"] if offload else [])])
    if not offload:
        return dry_run.measure_alone(engine, options)
    return _process().submit(dry_run.measure_alone, engine, options).result()


def mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:.4g} MB"


def update_on_the_host(elements: int) -> float:
    """Seconds per float32 element of AdamW's quickest way on the host, `fused`: the best of 15 updates."""
    pieces = [torch.randn(elements // 10, generator=torch.Generator().manual_seed(0)) for _ in range(10)]
    for piece in pieces:
        piece.grad = piece.clone()
    optimizer, times = torch.optim.AdamW(pieces, lr=1e-3, fused=True), []
    for _ in range(16):  # the first makes the optimizer's state
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return min(times[1:]) / elements


def saves_memory_and_kills_throughput() -> tuple[str, str]:
    """What offload adds to a step does not depend on the batch; what it can hide behind, and is measured by, does."""
    before, after = dry("zero3", offload=False), dry("zero3")
    own = parameters_of("7b") / RANKS
    copies = 3 * 4 * own / PCIE  # up twice, as the shard is gathered twice, and its gradient down
    update = update_on_the_host(2_000_000) * own
    shares = {}
    for tokens in (2_048, 2_048 * 512):
        shares[tokens] = (copies + update) / (6 * parameters_of("7b") * tokens / H100)
    few, many = shares.values()
    measured = (
        f"peak on the device {mb(before['peak_bytes'])} without, {mb(after['peak_bytes'])} with; 7B on 8 H100: "
        f"copies at 64 GB/s {copies:.2f} s and AdamW on one thread of this host {update:.2g} s per step, "
        + ", ".join(f"{share:.2g}x the computation for {tokens:,} tokens per GPU" for tokens, share in shares.items())
    )
    saved = after["peak_bytes"] < before["peak_bytes"]
    return measured, holds_when("a step has few tokens per GPU", saved and few > 1, saved and many > 1)


def optimizer_states_to_ram() -> tuple[str, str]:
    row = dry("fsdp2")
    held, host = row["held_bytes"], row["host"]["held_bytes"]
    measured = (
        f"{NAMES['fsdp2']} with CPUOffloadPolicy: optimizer state {mb(held[OPTIMIZER])} on the device, "
        f"{mb(host[OPTIMIZER])} in RAM; shards of parameters ({mb(host[PARAMETERS])}) and gradients "
        f"({mb(host[GRADIENTS])}) go with it"
    )
    return measured, verdict(held[OPTIMIZER] == 0 and host[OPTIMIZER] >= 8 * parameters_of("tiny") / RANKS)


def fsdp_is_limited() -> tuple[str, str]:
    """Of two ways to be limited: in what can be left on the GPU, and in how much leaves it. DeepSpeed is not run."""
    row = dry("fsdp2")
    choices = [field.name for field in dataclasses.fields(CPUOffloadPolicy)]
    stays = sum(row["held_bytes"].values())
    measured = (
        f"FSDP2's policy has the choice(s) {', '.join(choices)}: not which of the three, and no disk; of the state "
        f"{mb(stays)} stay on the device, {mb(sum(row['host']['held_bytes'].values()))} go (DeepSpeed was not run)"
    )
    return measured, holds_when("one wants to choose what goes, or a disk", choices == ["pin_memory"], stays > 0)


CLAIMS = [
    Claim(SHARDING_STATE, "CPU offload saves GPU memory but kills throughput",
          "ZeRO-3 with and without, dry; AdamW on this host; published rates", saves_memory_and_kills_throughput),
    Claim(FRAMEWORKS, "CPU offload: limited in FSDP, excellent in DeepSpeed",
          "FSDP2's policy, and a dry run with it", fsdp_is_limited),
    Claim(WORDPRESS, "FSDP2's CPU offloading can move optimizer states to RAM",
          "dry run of FSDP2 with its policy", optimizer_states_to_ram),
]  # fmt: skip
