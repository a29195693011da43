"""Clipping: the norm of a whole model's gradients, of which each rank has a shard.

The squared norm of a vector is the sum of the squared norms of its parts. So each rank computes the norm of its shards,
and an all-gather of one number per rank brings the norms of all ranks. torch's own function would see only one rank's
shards. The cost is 4N bytes of traffic, and no memory.

A gradient's norm is computed in the gradient's dtype, as in torch. The norms are added up in float32, or in float64 if
a shard has double precision.

FSDP2's parameters are DTensors, so `torch.nn.utils.clip_grad_norm_` works for them. DeepSpeed clips inside `step`.
"""

import torch

from zero1 import all_gather
from zerolab.engine import tensor_parallel


@torch.compiler.disable
@torch.no_grad()
def clip_grad_norm_(engine, max_norm, norm_type=2.0):
    """Between backward and `step()`: scale the gradients so that their norm is at most `max_norm`. A collective.

    Returns the norm before clipping, a 0-d tensor with the same value on every rank. This is the value that
    `torch.nn.utils.clip_grad_norm_` returns for the whole model. A tied parameter counts once. If one rank has a NaN,
    the norm is NaN on all ranks.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be a positive number or math.inf, got {norm_type}")
    engine.reduce_gradients()
    device = engine.buckets[0].flat.device
    mesh = tensor_parallel.mesh_of(engine.model.parameters())
    norms = []
    for bucket in engine.buckets:
        for param, piece in bucket.pieces.items():
            if piece.grad is not None and tensor_parallel.is_counted(param, mesh):
                norms.append(torch.linalg.vector_norm(piece.grad, norm_type))
    # The dtype must be the same on all ranks, including a rank that owns only padding.
    double = any(bucket.shard.dtype.to_real() == torch.float64 for bucket in engine.buckets)
    dtype = torch.float64 if double else torch.float32
    own = torch.zeros(1, dtype=dtype, device=device)
    if norms:
        own = torch.linalg.vector_norm(torch.stack([norm.to(dtype) for norm in norms]), norm_type).to(device).reshape(1)
    # An all-gather, and not an all-reduce of the maximum or the sum, because a maximum may lose a NaN.
    rank_norms = own.new_empty(engine.world_size)  # replicas have the same shards
    all_gather(rank_norms, own, group=engine.group)
    total = torch.linalg.vector_norm(rank_norms, norm_type)
    total = torch.linalg.vector_norm(tensor_parallel.gather_over(mesh, total), norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as in torch's function; NaN stays NaN
    gradients = gradients_of(engine)
    if gradients:  # a rank may own only padding
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))  # as torch's function does
    return total


@torch.compiler.disable
@torch.no_grad()
def clip_grad_value_(engine, clip_value):
    """Between backward and `step()`: clamp every element of the gradients to [-clip_value, clip_value]. A collective.

    It reduces the gradients first, and then does the same as `torch.nn.utils.clip_grad_value_` for the whole model.
    """
    engine.reduce_gradients()
    gradients = gradients_of(engine)
    if gradients:
        torch._foreach_clamp_min_(gradients, -clip_value)
        torch._foreach_clamp_max_(gradients, clip_value)


def gradients_of(engine):
    """The gradients that the optimizer gets on this rank: the gradients of all pieces that have one."""
    pieces = [piece for bucket in engine.buckets for piece in bucket.pieces.values()]
    return [piece.grad for piece in pieces if piece.grad is not None]
