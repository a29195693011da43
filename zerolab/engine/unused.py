"""Unused parameters: a step may leave some parameters without a gradient, on some ranks or on all.

A chapter waits for every gradient of a bucket, on all ranks alike. With `find_unused=True` a bucket is final when no
more gradients can come: in ZeRO-2 when backward ends, in ZeRO-3 when backward moves on to the next unit. For a
parameter without a gradient a rank sends zeros, because another rank may have used it. If no rank used it, its pieces
have no gradient, so the optimizer skips them as in plain PyTorch: no weight decay, no momentum.

The cost: an all-reduce of one byte per parameter in each step, and the host waits for its result. ZeRO-2 sends
incomplete buckets only after backward. All ranks must still run the same units in the same order.

DDP's option is `find_unused_parameters=True`. DDP walks the graph after each forward, which an engine does not need.
"""

import torch
import torch.distributed as dist

from zerolab.engine import accelerator


def find_used(buckets, group):
    """The parameters that some rank used since `zero_grad()`. A collective."""
    params = [(bucket, param) for bucket in buckets for param in bucket.params]
    # The device from which the group sends: a group of some ranks is over gloo, which sends from the host.
    device = accelerator.device_of(group)
    used = torch.tensor([param in bucket.used for bucket, param in params], dtype=torch.uint8, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    return {param for (_, param), flag in zip(params, used.tolist()) if flag}


def drop_unused(buckets, group):
    """Set the gradient, which is zero, to None for the pieces of parameters that no rank used."""
    used = find_used(buckets, group)
    for bucket in buckets:
        for param, piece in bucket.pieces.items():
            if param not in used:
                piece.grad = None
