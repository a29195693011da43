"""Measurements that others have published, with their sources. Nothing here was measured by this project.

Tokens per second are per GPU. GB are of 10^9 bytes, GiB of 2^30; what kind of peak a source means is mostly not said.
"""

from dataclasses import dataclass

from harness.plan.hardware import GPUS, Cluster
from harness.plan.one_rank import Setup
from harness.run.model import GPTConfig

GB, GIB = 10**9, 2**30

PLAYBOOK = "Ultra-Scale Playbook (Hugging Face), interactive benchmarks"
TORCHTITAN = "torchtitan, benchmarks of Llama 3 on H100, December 2024"
FOUNDRY = "llm-foundry (MosaicML), throughput benchmarks"

# The models. None has biases. (Theirs have rotary or no positions and mostly RMSNorm, this project's has neither.)
LLAMA_1B = GPTConfig(16, 2048, 32, 131_072, 4096, ffn=8192, gated=True, bias=False)
LLAMA_3B = GPTConfig(28, 3072, 32, 131_072, 4096, ffn=8192, gated=True, bias=False)
LLAMA_8B = GPTConfig(32, 4096, 32, 128_256, 8192, kv_heads=8, ffn=14_336, gated=True, tied=False, bias=False)
MPT_3B = GPTConfig(32, 2560, 20, 50_368, 2048, bias=False)
MPT_7B = GPTConfig(32, 4096, 32, 50_368, 2048, bias=False)
MPT_13B = GPTConfig(40, 5120, 40, 50_368, 2048, bias=False)
MPT_70B = GPTConfig(80, 8192, 64, 50_368, 2048, bias=False)

# What the sources' engines are here. The Playbook's ZeRO-0 is DDP; its ZeRO-1 reduce-scatters all gradients in one
# coalesced call when the last micro-batch is over, and gathers in another: the paper's 2Ψ, one bucket. Of FSDP1's
# strategies SHARD_GRAD_OP is FSDP2 without resharding, FULL_SHARD is FSDP2.
ONE_BUCKET = 1e6  # MiB


@dataclass(frozen=True)
class Row:
    """One published measurement: on which GPUs, of what, tokens per second and GPU, peak in bytes or None."""

    model: str
    gpu: str
    setup: Setup
    tokens_per_s: float
    peak_bytes: float | None
    source: str
    inter_gbps: float = 400

    @property
    def cluster(self) -> Cluster:
        return Cluster(GPUS[self.gpu], inter_gbps=self.inter_gbps)

    @property
    def one_node(self) -> bool:
        return self.setup.ranks <= self.cluster.per_node


def _playbook() -> list[Row]:
    rows = []
    for model, gpus, engine, micro, times, tokens, peak in (
        ("1.34B", 8, "ddp", 1, 32, 39_273, 36.7),
        ("1.34B", 8, "ddp", 2, 16, 40_150, 50.2),
        ("1.34B", 8, "zero1_2psi", 1, 32, 39_006, 24.2),
        ("1.34B", 32, "ddp", 1, 8, 35_368, 36.7),
        ("1.34B", 32, "zero1_2psi", 1, 8, 35_951, 23.8),
        ("1.34B", 32, "zero1_2psi", 2, 4, 36_990, 34.9),
        ("1.34B", 128, "ddp", 1, 2, 24_494, 36.7),
        ("1.34B", 128, "ddp", 2, 1, 26_446, 48.5),
        ("1.34B", 128, "zero1_2psi", 1, 2, 22_042, 23.7),
        ("1.34B", 128, "zero1_2psi", 2, 1, 22_794, 30.8),
        ("3.57B", 8, "zero1_2psi", 1, 32, 16_341, 50.8),
        ("3.57B", 8, "zero1_2psi", 2, 16, 15_997, 69.8),
        ("3.57B", 32, "zero1_2psi", 1, 8, 15_044, 48.1),
        ("3.57B", 32, "zero1_2psi", 2, 4, 15_387, 62.9),
        ("3.57B", 128, "zero1_2psi", 1, 2, 9_911, 47.6),
        ("3.57B", 128, "zero1_2psi", 2, 1, 10_116, 64.3),
    ):
        config = {"1.34B": LLAMA_1B, "3.57B": LLAMA_3B}[model]
        bucket_mb = 25 if engine == "ddp" else ONE_BUCKET
        setup = Setup(config, engine, gpus, micro_batch=micro, accumulate=times, bucket_mb=bucket_mb)
        rows.append(Row(model, "h100", setup, tokens, peak * GB, PLAYBOOK))
    return rows


def _titan(gpus: int, tokens: float, peak: float) -> Row:
    setup = Setup(LLAMA_8B, "fsdp2", gpus, micro_batch=2, recompute="selective")
    return Row("Llama 3.1 8B", "h100-96gb", setup, tokens, peak * GIB, TORCHTITAN)


def _foundry(model: str, config: GPTConfig, gpu: str, gpus: int, engine: str, micro: int, times: int, tokens: float,
             recompute: str = "none", inter_gbps: float = 400) -> Row:  # fmt: skip
    setup = Setup(config, engine, gpus, micro_batch=micro, accumulate=times, recompute=recompute)
    return Row(model, gpu, setup, tokens, None, FOUNDRY, inter_gbps)


ROWS = (
    *_playbook(),
    _titan(8, 5_762, 82.4),
    _titan(128, 5_605, 67.0),
    _foundry("MPT 3B", MPT_3B, "h100", 128, "fsdp2_no_reshard", 8, 1, 23_422),
    _foundry("MPT 7B", MPT_7B, "h100", 8, "fsdp2", 6, 1, 10_643),
    _foundry("MPT 13B", MPT_13B, "h100", 8, "fsdp2", 2, 1, 4_792),
    _foundry("MPT 70B", MPT_70B, "h100", 64, "fsdp2", 8, 4, 1_039, recompute="blocks"),
    _foundry("MPT 7B", MPT_7B, "a100", 8, "fsdp2", 6, 2, 4_641, inter_gbps=200),
)

# What did not fit on its GPUs, by the same source. (Its ZeRO-1 with a model of 8B stands for one of 8 GPUs or more.)
OUT_OF_MEMORY = (
    Row("3.57B", "h100", Setup(LLAMA_3B, "ddp", 8, bucket_mb=25), 0, None, PLAYBOOK),
    Row("8B", "h100", Setup(GPTConfig(32, 4096, 32, 131_072, 4096, ffn=14_336, gated=True, bias=False), "zero1_2psi", 8,
                            bucket_mb=ONE_BUCKET), 0, None, PLAYBOOK),
)  # fmt: skip
