"""Data sheets of GPUs: peak rates, to compare measured rates with (MFU), and memory."""

import os
import re

import torch

from zerolab.run import process_group
from zerolab.run.model import GPTConfig, number_of_parameters

# TFLOP/s of dense matrix products, in bfloat16 and in float32 with TF32 off. A T4 has no bfloat16.
PEAK_TFLOPS = {
    "B200": {"bf16": 2250.0, "fp32": 80.0},
    "H200": {"bf16": 989.0, "fp32": 67.0},
    "H200 NVL": {"bf16": 835.0, "fp32": 60.0},
    "H100": {"bf16": 989.0, "fp32": 67.0},
    "H100 NVL": {"bf16": 835.0, "fp32": 60.0},
    "H100 PCIe": {"bf16": 756.0, "fp32": 51.0},
    "A100": {"bf16": 312.0, "fp32": 19.5},
    "A100 PCIe": {"bf16": 312.0, "fp32": 19.5},
    "RTX 4090": {"bf16": 165.2, "fp32": 82.6},
    "RTX 3090": {"bf16": 71.0, "fp32": 35.6},
    "L4": {"bf16": 121.0, "fp32": 30.3},
    "T4": {"fp32": 8.1},
}
# Words in torch's name of a GPU that do not change how fast it computes. Any other word means a different model: an
# "RTX 4090 D", a "Laptop GPU", a "MIG" (a part of a GPU) or an H100 with the slower HBM2e.
NO_MODEL = re.compile(r"nvidia|tesla|geforce|\d+gb|hbm3e?|sxm[456]")

# Assumed in addition to the live storages: CUDA's context and NCCL's buffers, and the allocator's gaps.
CONTEXT_BYTES = 2e9
GAPS = 0.05
GPUS = (24, 40, 80, 141)  # GB of 10^9 bytes: RTX 4090, A100, A100 and H100, H200


def needed_bytes(peak: float) -> float:
    """Bytes that a GPU must have for `peak` live bytes. `memory` and `plan` both use it."""
    return peak * (1 + GAPS) + CONTEXT_BYTES


def fits_on(peak: float) -> list[int]:
    """The GPUs, in GB, that have room for `peak` live bytes."""
    return [gigabytes for gigabytes in GPUS if needed_bytes(peak) <= gigabytes * 1e9]


def peak_flops(name: str, dtype: str) -> float | None:
    """FLOP per second of the GPU `name` in "fp32" or "bf16"; None if it is not in the table."""
    words = {word for word in re.split(r"[^a-z0-9]+", name.lower()) if not NO_MODEL.fullmatch(word)}
    for model, teraflops in PEAK_TFLOPS.items():
        if words == set(model.lower().split()):
            return teraflops[dtype] * 1e12 if dtype in teraflops else None
    return None


def flops_per_token(config: GPTConfig, parameters: int, seq: int) -> float:
    """FLOP per token of one training step, as the PaLM paper (appendix B) counts for MFU: 6Ψ + 12 layers width seq.

    Ψ here excludes what is only looked up: the positions, and an embedding that is not also the head's weight.
    Attention counts in full, although a causal kernel may compute half of it. Recomputation does not count.
    """
    looked_up = config.seq + (0 if config.tied else config.vocab)
    return 6 * (parameters - looked_up * config.width) + 12 * config.layers * config.width * seq


def mfu(tokens_per_s: float, config: GPTConfig, seq: int, dtype: str, ranks: int, device: torch.device) -> float | None:
    """The model's FLOP per second as a fraction of the GPUs' peak rate. Ranks on the same GPU share its peak.

    None for a GPU whose peak rate is not known, and with TF32.
    """
    module = torch.get_device_module(device)
    peak = peak_flops(module.get_device_name(device), dtype)
    if peak is None or (dtype == "fp32" and process_group.tf32()):  # the table has float32 without TF32
        return None
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    gpus = 1 if ranks == 1 else ranks * min(here, module.device_count()) / here
    flops = flops_per_token(config, number_of_parameters(config), seq) * tokens_per_s
    return round(flops / (gpus * peak), 4)
