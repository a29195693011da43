"""What GPUs are sold with: dense peak rates, which a measured rate is held against (MFU); and what fits on one."""

import os
import re
import tomllib
from pathlib import Path

import torch

from zerolab.run import process_group
from zerolab.run.model import GPTConfig, number_of_parameters

PEAK_TFLOPS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
# Words in torch's name of a GPU that do not change how fast it computes. Any other word does: an "RTX 4090 D", a
# "Laptop GPU", a "MIG" (a part of a GPU) and an H100 with the slower HBM2e are other models.
NO_MODEL = re.compile(r"nvidia|tesla|geforce|\d+gb|hbm3e?|sxm[456]")

# Assumed beside the live storages that a GPU must hold: CUDA's context, NCCL's buffers, and the allocator's gaps.
CONTEXT_BYTES = 2e9
GAPS = 0.05
GPUS = (24, 40, 80, 141)  # GB of 10^9 bytes: RTX 4090, A100, A100 and H100, H200


def needed_bytes(peak: float) -> float:
    """Bytes that a GPU must have for `peak` live bytes. `memory` and `plan` both say "fits" by it."""
    return peak * (1 + GAPS) + CONTEXT_BYTES


def fits_on(peak: float) -> list[int]:
    """The GPUs, in GB, on which a peak of so many live bytes fits."""
    return [gigabytes for gigabytes in GPUS if needed_bytes(peak) <= gigabytes * 1e9]


def peak_flops(name: str, dtype: str) -> float | None:
    """FLOP per second that the GPU `name` can do in "fp32" or "bf16"; None for one that is not in the table."""
    words = {word for word in re.split(r"[^a-z0-9]+", name.lower()) if not NO_MODEL.fullmatch(word)}
    for model, teraflops in PEAK_TFLOPS.items():
        if words == set(model.lower().split()):
            return teraflops[dtype] * 1e12 if dtype in teraflops else None
    return None


def flops_per_token(config: GPTConfig, parameters: int, seq: int) -> float:
    """FLOP per token of one training step, as the PaLM paper (appendix B) counts for MFU: 6Ψ + 12 layers width seq.

    Ψ here without what is only looked up: the positions, and an embedding that is not the head's weight as well.
    Attention counts in full, although a causal kernel may leave out half of it. Recomputation does not count.
    """
    looked_up = config.seq + (0 if config.tied else config.vocab)
    return 6 * (parameters - looked_up * config.width) + 12 * config.layers * config.width * seq


def mfu(tokens_per_s: float, config: GPTConfig, seq: int, dtype: str, ranks: int, device: torch.device) -> float | None:
    """The model's FLOP per second as a share of what the GPUs can do at most. Ranks that share a GPU share its peak.

    None for a GPU whose peak is not known, and with TF32.
    """
    module = torch.get_device_module(device)
    peak = peak_flops(module.get_device_name(device), dtype)
    if peak is None or (dtype == "fp32" and process_group.tf32()):  # the table has float32 without TF32
        return None
    here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    gpus = 1 if ranks == 1 else ranks * min(here, module.device_count()) / here
    flops = flops_per_token(config, number_of_parameters(config), seq) * tokens_per_s
    return round(flops / (gpus * peak), 4)
