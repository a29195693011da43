"""Offload: shards, their gradients and the optimizer state are in the host's memory, and the update runs there.

A shard is copied to the device right before its all-gather, and its gradient is copied back after its reduction. The
device then needs no memory for 16Ψ/N bytes of float32 training, only for what is gathered, for whole gradients and for
activations. The price is 4Ψ/N bytes over PCIe in each direction per gather and per step, and an update on the CPU:
use an optimizer with `fused=True`, which is about six times faster there.

The copies run on the stream that computes, so computation waits for them. FSDP2 (`CPUOffloadPolicy`), from which the
option is borrowed, hides them on separate streams. ZeRO-Offload (Ren et al., 2021) is the paper.
"""

import torch


def to_host(tensor, policy):
    """A copy in the host's memory. Pinned, if the policy says so: the system never moves it, so a GPU can write to it.

    The copy may still be on its way when this returns: see `wait_for_copies`.
    """
    pinned = policy.pin_memory and tensor.device.type != "cpu"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    return host.copy_(tensor, non_blocking=pinned)


def wait_for_copies(device):
    """The host may read gradients that were copied to it, and overwrite shards that were copied from it."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
