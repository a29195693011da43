"""Measurements that others have published, with their sources. Nothing here was measured by this project.

Tokens per second are per GPU. GB are of 10^9 bytes, GiB of 2^30; what kind of peak a source means is mostly not said.
"""

from dataclasses import dataclass, replace

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
MPT = {  # billions: the shape, but for the sequence
    1: GPTConfig(24, 2048, 16, 50_368, 2048, bias=False),
    3: GPTConfig(32, 2560, 20, 50_368, 2048, bias=False),
    7: GPTConfig(32, 4096, 32, 50_368, 2048, bias=False),
    13: GPTConfig(40, 5120, 40, 50_368, 2048, bias=False),
    30: GPTConfig(48, 7168, 56, 50_368, 2048, bias=False),
    70: GPTConfig(80, 8192, 64, 50_368, 2048, bias=False),
}

# What the sources' engines are here. The Playbook's ZeRO-0 is DDP; its ZeRO-1 reduce-scatters all gradients in one
# coalesced call when the last micro-batch is over, and gathers in another: the paper's 2Ψ, one bucket. Of FSDP1's
# strategies SHARD_GRAD_OP is FSDP2 without resharding, FULL_SHARD is FSDP2: llm-foundry ran FSDP1. With micro-batches
# of one sequence the Playbook's ZeRO-1 has 2Ψ more than ours: its bfloat16 gradients stay beside their float32 sums.
# (With two sequences the published peaks show no such thing.)
ONE_BUCKET = 1e6  # MiB
# llm-foundry's benchmark script takes `attn_impl: triton`: version 1 of flash attention, written in Triton. The paper
# of version 2 has version 2 as 1.3 to 2.5 times as fast; this is the middle of that, and fitted on nothing.
SLOWER_ATTENTION = (1.3 * 2.5) ** 0.5


@dataclass(frozen=True)
class Row:
    """One published measurement: on which GPUs, of what, tokens per second and GPU, peak in bytes or None.

    `reserved`: the peak is what torch's allocator has reserved, and not what was alive. `keeps_low`: the framework
    leaves bfloat16 gradients beside their float32 sums, two bytes for each parameter that the engines here do without.
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
        """Are its sequences longer than any that something is fitted on?"""
        return self.setup.config.seq > 4096 and self.source == FOUNDRY

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
        keeps = engine == "zero1_2psi" and micro == 1
        setup = Setup(config, engine, gpus, micro_batch=micro, accumulate=times, bucket_mb=bucket_mb)
        rows.append(Row(model, "h100", setup, tokens, peak * GB, PLAYBOOK, "efa", keeps_low=keeps))
    return rows


def _titan() -> list[Row]:
    rows = []
    for gpus, tokens, peak in ((8, 5_762, 82.4), (128, 5_605, 67.0)):
        setup = Setup(LLAMA_8B, "fsdp2", gpus, micro_batch=2, recompute="selective")
        row = Row("Llama 3.1 8B", "h100-96gb", setup, tokens, peak * GIB, TORCHTITAN, "infiniband", reserved=True)
        rows.append(row)
    return rows


def _foundry() -> list[Row]:
    """Their network is not stated; presumably it is InfiniBand, and RoCE under the A100."""
    rows = []
    for billions, gpus, micro, times, tokens, *more in (
        (1, 8, 14, 1, 45_455),
        (1, 16, 20, 1, 46_037),
        (1, 32, 20, 1, 45_130),
        (1, 64, 20, 1, 44_402),
        (1, 128, 12, 1, 44_123, "whole"),
        (3, 8, 5, 6, 20_964, 4096),
        (3, 16, 10, 3, 24_142),
        (3, 32, 6, 3, 23_021),
        (3, 64, 6, 3, 22_525),
        (3, 128, 8, 1, 23_422, "whole"),
        (7, 8, 6, 1, 10_643),
        (7, 8, 16, 2, 8_611, 4096, "blocks"),
        (7, 8, 6, 2, 4_641, "a100"),
        (7, 128, 6, 1, 10_475),
        (13, 8, 2, 1, 4_792),
        (13, 16, 2, 1, 4_767),
        (13, 32, 2, 1, 4_811),
        (13, 64, 2, 1, 4_800),
        (13, 128, 16, 1, 5_080, "blocks"),
        (30, 16, 10, 3, 2_263, "blocks"),
        (30, 32, 14, 3, 2_308, "blocks"),
        (30, 128, 8, 1, 2_199, "blocks"),
        (70, 32, 2, 16, 882, "blocks"),
        (70, 64, 8, 4, 1_039, "blocks"),
        (70, 128, 8, 1, 1_058, "blocks"),
        # Nothing is fitted on what follows: more than 128 GPUs, ...
        (1, 256, 12, 1, 42_555, "whole"),
        (1, 512, 12, 1, 39_837, "whole"),
        (3, 256, 8, 1, 22_772, "whole"),
        (3, 512, 8, 1, 21_664, "whole"),
        (7, 256, 6, 1, 10_119),
        (7, 512, 6, 1, 9_670),
        (13, 256, 16, 1, 4_989, "blocks"),
        (13, 512, 16, 1, 4_952, "blocks"),
        (30, 256, 8, 1, 2_148, "blocks"),
        (30, 512, 8, 1, 2_115, "blocks"),
        (70, 256, 8, 1, 1_035, "blocks"),
        (70, 512, 8, 1, 1_007, "blocks"),
        # ... and sequences beyond 4,096.
        (1, 8, 3, 4, 29_157, 8192),
        (1, 8, 2, 4, 19_649, 16_384),
        (1, 8, 1, 4, 12_025, 32_768),
        (3, 8, 3, 6, 16_578, 8192),
        (3, 8, 1, 6, 11_152, 16_384),
        (7, 8, 8, 2, 6_935, 8192, "blocks"),
        (7, 8, 2, 2, 3_318, 32_768, "blocks"),
        (7, 8, 1, 2, 1_956, 65_536, "blocks"),
        (13, 8, 3, 3, 2_985, 16_384, "blocks"),
    ):
        seq = next((one for one in more if isinstance(one, int)), 2048)
        config = replace(MPT[billions], seq=seq)
        engine = "fsdp2_no_reshard" if "whole" in more else "fsdp2"  # the parameters stay whole until backward
        setup = Setup(config, engine, gpus, micro_batch=micro, accumulate=times,
                      recompute="blocks" if "blocks" in more else "none")  # fmt: skip
        gpu, network = ("a100", "roce") if "a100" in more else ("h100", "infiniband")
        rows.append(Row(f"MPT {billions}B", gpu, setup, tokens, None, FOUNDRY, network))
    return rows


ROWS = (*_playbook(), *_titan(), *_foundry())

# What did not fit on its GPUs, by the same source. (Its ZeRO-1 with a model of 8B stands for one of 8 GPUs or more.)
OUT_OF_MEMORY = (
    Row("3.57B", "h100", Setup(LLAMA_3B, "ddp", 8, bucket_mb=25), 0, None, PLAYBOOK, "efa"),
    Row("8B", "h100", Setup(GPTConfig(32, 4096, 32, 131_072, 4096, ffn=14_336, gated=True, bias=False), "zero1_2psi", 8,
                            bucket_mb=ONE_BUCKET), 0, None, PLAYBOOK, "efa"),
)  # fmt: skip
