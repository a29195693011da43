"""Clipping: the norm of a whole model's gradients, of which each rank has a shard.

The squared norm of a vector is the sum of the squared norms of its parts. So each rank computes the norm of its shards,
and an all-gather of one number per rank gives the other norms. Torch's own function would see only one rank's shards.
This costs 4N bytes of traffic, and no memory.

A gradient's norm is computed in the gradient's dtype, as in torch. The norms are added up in float32, or in float64 if
a shard has double precision.

FSDP2's parameters are DTensors, so `torch.nn.utils.clip_grad_norm_` does the same there. DeepSpeed clips inside `step`.
"""

import torch

from zero1 import all_gather
from zerolab.engine import tensor_parallel


@torch.no_grad()
def clip_grad_norm_(engine, max_norm, norm_type=2.0):
    """Between backward and `step()`: scale the gradients so that their norm is at most `max_norm`. A collective.

    Returns the norm before clipping, a 0-d tensor with the same value on every rank. It is what
    `torch.nn.utils.clip_grad_norm_` returns for the whole model. A tied parameter counts once. If one rank has a NaN,
    the norm is NaN on all ranks.
    """
    engine.reduce_gradients()
    device = engine.buckets[0].flat.device
    mesh = tensor_parallel.mesh_of(engine.model.parameters())
    norms = []
    for bucket in engine.buckets:
        for param, piece in bucket.pieces.items():
            if piece.grad is not None and tensor_parallel.is_counted(param, mesh):
                norms.append(torch.linalg.vector_norm(piece.grad, norm_type))
    # In the same dtype on all ranks, including a rank that owns only padding.
    double = any(bucket.shard.dtype.to_real() == torch.float64 for bucket in engine.buckets)
    dtype = torch.float64 if double else torch.float32
    own = torch.zeros(1, dtype=dtype, device=device)
    if norms:
        own = torch.linalg.vector_norm(torch.stack([norm.to(dtype) for norm in norms]), norm_type).to(device).reshape(1)
    # An all-gather, and not an all-reduce of the maximum or the sum, because a maximum may lose a NaN.
    everyone = own.new_empty(engine.world_size)  # replicas have the same shards
    all_gather(everyone, own, group=engine.group)
    total = torch.linalg.vector_norm(everyone, norm_type)
    total = torch.linalg.vector_norm(tensor_parallel.gather_over(mesh, total), norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # like torch's function; NaN stays NaN
    for bucket in engine.buckets:
        for gradient in gradients_of(bucket):
            gradient *= factor.to(gradient.device)
    return total


@torch.no_grad()
def clip_grad_value_(engine, clip_value):
    """Between backward and `step()`: clamp every element of the gradients to [-clip_value, clip_value]. A collective.

    Does what `torch.nn.utils.clip_grad_value_` does for the whole model. It reduces the gradients first.
    """
    engine.reduce_gradients()
    for bucket in engine.buckets:
        for gradient in gradients_of(bucket):
            gradient.clamp_(-clip_value, clip_value)


def gradients_of(bucket):
    """The reduced gradients of a bucket. In ZeRO-1 all of them, because a later backward adds to the whole buffer."""
    own = bucket.shard.grad
    if bucket.gradient is None:
        return [own]
    if own is None or own.untyped_storage()._cdata == bucket.gradient.untyped_storage()._cdata:
        return [bucket.gradient]
    return [bucket.gradient, own]
