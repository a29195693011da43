"""Measurements that others have published, with their sources. Nothing here was measured by this project.

Tokens per second are per GPU. A GB has 10^9 bytes, a GiB 2^30. Most sources do not state which kind of peak they mean.
"""

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from extra.planner.hardware import GPUS, Cluster
from extra.planner.one_rank import Setup
from zerolab.run.model import GPTConfig

GB, GIB = 10**9, 2**30

PLAYBOOK = "Ultra-Scale Playbook (Hugging Face), interactive benchmarks"
TORCHTITAN = "torchtitan, benchmarks of Llama 3 on H100, December 2024"
FOUNDRY = "llm-foundry (MosaicML), throughput benchmarks"

# The models. None has biases. (Theirs have rotary or no positions and mostly RMSNorm, this project's has neither.)
MODELS = {
    "1.34B": GPTConfig(16, 2048, 32, 131_072, 4096, ffn=8192, gated=True, bias=False),
    "3.57B": GPTConfig(28, 3072, 32, 131_072, 4096, ffn=8192, gated=True, bias=False),
    "8B": GPTConfig(32, 4096, 32, 131_072, 4096, ffn=14_336, gated=True, bias=False),
    "Llama 3.1 8B": GPTConfig(32, 4096, 32, 128_256, 8192, kv_heads=8, ffn=14_336, gated=True, tied=False, bias=False),
    "MPT 1B": GPTConfig(24, 2048, 16, 50_368, 2048, bias=False),
    "MPT 3B": GPTConfig(32, 2560, 20, 50_368, 2048, bias=False),
    "MPT 7B": GPTConfig(32, 4096, 32, 50_368, 2048, bias=False),
    "MPT 13B": GPTConfig(40, 5120, 40, 50_368, 2048, bias=False),
    "MPT 30B": GPTConfig(48, 7168, 56, 50_368, 2048, bias=False),
    "MPT 70B": GPTConfig(80, 8192, 64, 50_368, 2048, bias=False),
}

# The sources' engines under our names. The Playbook's ZeRO-0 is DDP; its ZeRO-1 reduce-scatters all gradients in one
# coalesced call when the last micro-batch is over, and gathers in another: the paper's 2Ψ, one bucket. Of FSDP1's
# strategies SHARD_GRAD_OP is FSDP2 without resharding, FULL_SHARD is FSDP2: llm-foundry ran FSDP1. With micro-batches
# of one sequence the Playbook's ZeRO-1 has 2Ψ more than ours: its bfloat16 gradients stay next to their float32 sums.
# (With two sequences the published peaks show no such thing.)
ONE_BUCKET = 1e6  # MiB
# llm-foundry's benchmark script uses `attn_impl: triton`: version 1 of flash attention, written in Triton. The paper
# of version 2 reports that version 2 is 1.3 to 2.5 times as fast. This is the middle of that range, and not fitted.
SLOWER_ATTENTION = (1.3 * 2.5) ** 0.5


@dataclass(frozen=True)
class Row:
    """One published measurement: the GPUs, the setup, tokens per second and GPU, and the peak in bytes or None.

    `reserved`: the peak is the memory reserved by torch's allocator, not the live memory. `keeps_low`: the framework
    keeps bfloat16 gradients in addition to their float32 sums, two bytes per parameter that our engines do not need.
    """

    model: str
    gpu: str
    setup: Setup
    tokens_per_s: float
    peak_bytes: float | None
    source: str
    network: str
    reserved: bool = False
    keeps_low: bool = False

    @property
    def cluster(self) -> Cluster:
        gpu = GPUS[self.gpu]
        slower = SLOWER_ATTENTION if self.source == FOUNDRY else 1
        return Cluster(replace(gpu, attention=gpu.attention / slower), network=self.network)

    @property
    def long(self) -> bool:
        """Whether its sequences are longer than in all rows used in a fit."""
        return self.setup.config.seq > 4096 and self.source == FOUNDRY

    @property
    def one_node(self) -> bool:
        return self.setup.ranks <= self.cluster.per_node


# Their names in the table. llm-foundry does not state its network: presumably InfiniBand, and RoCE for the A100.
SOURCES = {"playbook": PLAYBOOK, "torchtitan": TORCHTITAN, "llm-foundry": FOUNDRY}
UNITS = {"GB": GB, "GiB": GIB}


def _row(fields: dict[str, str]) -> Row:
    """A line of published.csv. An empty peak was not published. Without tokens per second the run did not fit.

    The rest follows from the source of the row.
    """
    source, model, engine = SOURCES[fields["source"]], fields["model"], fields["engine"]
    numbers = {key: int(fields[key]) for key in ("micro_batch", "accumulate")}
    bucket_mb = None
    if source == PLAYBOOK:
        bucket_mb = 25 if engine == "ddp" else ONE_BUCKET
    config = replace(MODELS[model], seq=int(fields["seq"]))
    setup = Setup(config, engine, int(fields["gpus"]), recompute=fields["recompute"], bucket_mb=bucket_mb, **numbers)
    tokens_per_s = int(fields["tokens_per_s"] or 0)
    peak = float(fields["peak"]) * UNITS[fields["unit"]] if fields["peak"] else None
    keeps_low = source == PLAYBOOK and engine == "zero1_2psi" and setup.micro_batch == 1
    reserved = source == TORCHTITAN
    return Row(model, fields["gpu"], setup, tokens_per_s, peak, source, fields["network"], reserved, keeps_low)


with Path(__file__).with_name("published.csv").open(newline="") as _table:
    _ROWS = [_row(fields) for fields in csv.DictReader(_table)]
ROWS = tuple(row for row in _ROWS if row.tokens_per_s)
# (The Playbook's ZeRO-1 with a model of 8B stands for one of 8 GPUs or more.)
OUT_OF_MEMORY = tuple(row for row in _ROWS if not row.tokens_per_s)
