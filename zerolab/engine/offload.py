"""Offload: shards, their gradients and the optimizer state are in the host's memory, and the update runs there.

A shard is copied to the device right before its all-gather, and its gradient is copied back after its reduction. The
device then needs no memory for 16Ψ/N bytes of float32 training, only for what is gathered, for whole gradients and for
activations. The price is 4Ψ/N bytes over PCIe in each direction per gather and per step, and an update on the CPU:
use an optimizer with `fused=True`, which is about six times faster there.

The copies run on the compute stream, so computation waits for them. FSDP2, which has the same option
(`CPUOffloadPolicy`), hides them on separate streams. The paper is ZeRO-Offload (Ren et al., 2021).
"""

import torch


def to_host(tensor, policy):
    """A copy in the host's memory, pinned if the policy asks for it. A GPU can write to pinned memory by itself.

    The copy may still be in flight when this returns: see `wait_for_copies`.
    """
    pinned = policy.pin_memory and tensor.device.type != "cpu"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    return host.copy_(tensor, non_blocking=pinned)


def wait_for_copies(device):
    """Wait until the host may read gradients copied to it, and may overwrite shards copied from it."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
