"""Measurements that others have published, with their sources. Nothing here was measured by this project.

Tokens per second are per GPU. A GB has 10^9 bytes. Most sources do not state which kind of peak they mean.
"""

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from extra.planner.hardware import GB, GPUS, NETWORKS, Cluster
from extra.planner.setup import Setup
from zerolab.run.model import GPTConfig

PLAYBOOK = "Ultra-Scale Playbook (Hugging Face)"
FOUNDRY = "llm-foundry (MosaicML)"
SOURCES = {"playbook": PLAYBOOK, "llm-foundry": FOUNDRY}

# The models. None has biases. (Theirs have rotary or no positions and mostly RMSNorm, this project's has neither.)
MODELS = {
    "1.34B": GPTConfig(16, 2048, 32, 131_072, 4096, ffn=8192, gated=True, bias=False),
    "3.57B": GPTConfig(28, 3072, 32, 131_072, 4096, ffn=8192, gated=True, bias=False),
    "8B": GPTConfig(32, 4096, 32, 131_072, 4096, ffn=14_336, gated=True, bias=False),
    "MPT 1B": GPTConfig(24, 2048, 16, 50_368, 2048, bias=False),
    "MPT 3B": GPTConfig(32, 2560, 20, 50_368, 2048, bias=False),
    "MPT 7B": GPTConfig(32, 4096, 32, 50_368, 2048, bias=False),
    "MPT 13B": GPTConfig(40, 5120, 40, 50_368, 2048, bias=False),
    "MPT 30B": GPTConfig(48, 7168, 56, 50_368, 2048, bias=False),
    "MPT 70B": GPTConfig(80, 8192, 64, 50_368, 2048, bias=False),
}

# The Playbook's ZeRO-0 is DDP. Its ZeRO-1 reduce-scatters all gradients in one coalesced call when the last micro-batch
# is over, and gathers in another: the paper's 2Ψ, in one bucket.
ONE_BUCKET = 1e6  # MiB
# llm-foundry's benchmark script uses `attn_impl: triton`: version 1 of flash attention, written in Triton. The paper
# of version 2 reports that version 2 is 1.3 to 2.5 times as fast. This is the middle of that range, and not fitted.
SLOWER_ATTENTION = (1.3 * 2.5) ** 0.5


@dataclass(frozen=True)
class Row:
    """A published measurement. A run without tokens per second did not fit, and not every source has a peak.

    `fitted`: a constant of hardware.py was fitted to this row and others. `keeps_low`: the framework keeps bfloat16
    gradients in addition to their float32 sums, two bytes per parameter that our engines do not need.
    """

    source: str
    model: str
    setup: Setup
    cluster: Cluster
    tokens_per_s: int | None
    peak_bytes: float | None
    fitted: bool
    keeps_low: bool


def _row(fields: dict[str, str]) -> Row:
    """A line of published.csv."""
    source, gpu = SOURCES[fields["source"]], GPUS[fields["gpu"]]
    numbers = [int(fields[name]) for name in ("gpus", "micro_batch", "accumulate")]
    setup = Setup(replace(MODELS[fields["model"]], seq=int(fields["seq"])), fields["engine"], *numbers,
                  recompute=fields["recompute"] == "yes")  # fmt: skip
    keeps_low = False
    if source == FOUNDRY:
        gpu = replace(gpu, attention=gpu.attention / SLOWER_ATTENTION)
    elif setup.engine == "zero1_2psi":
        setup = replace(setup, bucket_mb=ONE_BUCKET)
        keeps_low = setup.micro_batch == 1  # with two sequences the published peaks show no such thing
    return Row(
        source,
        fields["model"],
        setup,
        Cluster(gpu, network=NETWORKS[fields["network"]]),
        int(fields["tokens_per_s"]) if fields["tokens_per_s"] else None,
        float(fields["peak_gb"]) * GB if fields["peak_gb"] else None,
        fields["fitted"] == "yes",
        keeps_low,
    )


with Path(__file__).with_name("published.csv").open(newline="") as _table:
    ROWS = tuple(_row(fields) for fields in csv.DictReader(_table))
