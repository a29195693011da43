"""What the memory of GPUs has room for, and how much a GPU computes for a token."""

from zerolab.run.model import GPTConfig

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


def flops_per_token(config: GPTConfig, parameters: int, seq: int) -> float:
    """FLOP per token of one training step, as the PaLM paper (appendix B) counts for MFU: 6Ψ + 12 layers width seq.

    Ψ here excludes what is only looked up: the positions, and an embedding that is not also the head's weight.
    Attention counts in full, although a causal kernel may compute half of it. Recomputation does not count.
    """
    looked_up = config.seq + (0 if config.tied else config.vocab)
    return 6 * (parameters - looked_up * config.width) + 12 * config.layers * config.width * seq
