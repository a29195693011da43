"""Offload: shards, their gradients and the optimizer state are in the host's memory, and the optimizer runs on the CPU.

A shard is copied to the device right before its all-gather, and its gradient is copied back after its reduction. The
device then does not need the 16Ψ/N bytes of float32 training. It needs memory only for gathered parameters, whole
gradients and activations. The cost is 4Ψ/N bytes over PCIe for each gather and, in the other direction, for each step,
and an update on the CPU: use an optimizer with `fused=True`, which is about four times faster there than the default.
If several backwards are reduced before a step, each of them after the first copies the sum so far back to the device,
which is another 4Ψ/N bytes. The device adds up, so that the host does not have to wait in the middle of backward.

The copies run on the compute stream, so computation waits for them. The host waits only in `reduce_gradients()`, for
the last copy of each bucket and for nothing else on the device. FSDP2, which has the same option (`CPUOffloadPolicy`),
hides the copies on separate streams. The paper is ZeRO-Offload (Ren et al., 2021).
"""

import torch


def to_host(tensor, policy):
    """A copy in the host's memory, pinned if the policy asks for it. A GPU can write to pinned memory by itself.

    The copy may still be in flight when this returns: see `wait_for_copies`.
    """
    pinned = policy.pin_memory and tensor.device.type != "cpu"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    return host.copy_(tensor, non_blocking=pinned)


def mark_copy(bucket):
    """Called after a copy between the host and the device was queued for `bucket`. Sets `bucket.copied`, an event.

    Waiting for an event is enough, while synchronizing the device would also wait for unrelated collectives. A later
    copy of the same bucket is in the same stream, so waiting for the last event waits for all of them.
    """
    device = bucket.flat.device
    if device.type != "cpu":
        bucket.copied = torch.get_device_module(device).current_stream(device).record_event()


def wait_for_copies(buckets):
    """Wait until the host may read gradients copied to it, and may overwrite shards copied from it."""
    for bucket in buckets:
        if bucket.copied is not None:
            bucket.copied.synchronize()
            bucket.copied = None
