"""What the memory of GPUs has room for."""

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
