"""Mixed precision: weights and gradients travel and compute in one dtype, and shards keep another.

Without `param_dtype` and `reduce_dtype` nothing here does anything.
"""

import copy
import dataclasses
import functools

import torch
from torch.utils._pytree import tree_map

from zerolab.engine import accelerator
from zerolab.engine.hooks import not_compiled
from zerolab.engine.options.tensor_parallel import local
from zerolab.engine.units import default_units


def bucket_dtypes(own: torch.dtype, param_dtype=None, reduce_dtype=None) -> tuple[torch.dtype, torch.dtype]:
    """(dtype to compute in, dtype to reduce gradients in) for parameters of dtype `own`, as FSDP2's policy has it."""
    if not own.is_floating_point:  # quantized weights, for example, which nobody trains
        return own, own
    param_dtype = param_dtype or own
    return param_dtype, reduce_dtype or param_dtype


def alignment(param: torch.Tensor, param_dtype: torch.dtype) -> int:
    """Of how many elements a weight's start in its buffer is a multiple: of 16 bytes, and on an accelerator of 256.

    An accelerator's libraries choose kernels by how weights are aligned, CUDA's by up to 256 bytes, and another kernel
    rounds differently. It costs at most 240 bytes per weight. On `meta` a weight is not yet where it will be.
    """
    on_host = param.device.type == "cpu" or accelerator.kind() == "cpu"
    return max(1, (16 if on_host else 256) // min(param.dtype.itemsize, param_dtype.itemsize))


def round_weights(bucket) -> None:
    """Let the model compute with a `flat` of `param_dtype`. The shard keeps the parameters' dtype.

    bfloat16 has no digits for an update that is small beside its weight. A freed `flat` stays freed.
    """
    if bucket.param_dtype == bucket.flat.dtype:
        return
    freed = bucket.flat.untyped_storage().nbytes() == 0
    if freed:
        bucket.flat = torch.empty_like(bucket.flat, dtype=bucket.param_dtype)
    else:
        bucket.shard, bucket.flat = bucket.shard.clone(), bucket.flat.to(bucket.param_dtype)
    for param, view in zip(map(local, bucket.params), bucket.views(bucket.flat)):
        param.data = view
    if freed:
        bucket.flat.untyped_storage().resize_(0)


# What gloo has a name for. Of the rest (int16, float8 and others) the bytes are sent.
_KNOWN = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
}  # fmt: skip


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor, or its bytes where its dtype cannot be sent."""
    return tensor if tensor.dtype in _KNOWN else tensor.reshape(-1).view(torch.uint8)


def is_rounded(bucket) -> bool:
    """Whether `rounded` has something to do: in mixed precision, in offload, and for a dtype that cannot be sent."""
    flat, shard = bucket.flat, bucket.shard
    return flat.dtype != shard.dtype or flat.device != shard.device or flat.dtype not in _KNOWN


def rounded(bucket) -> tuple[torch.Tensor, torch.Tensor]:
    """What an all-gather of `bucket` fills, and what this rank brings: its shard.

    It is copied into its place: rounded in mixed precision, and from the host's memory in offload.
    """
    shard = bucket.flat[bucket.own].copy_(bucket.shard, non_blocking=True)
    return sendable(bucket.flat), sendable(shard)


def divisors(dtype: torch.dtype, world_size: int) -> tuple[float, float]:
    """By what gradients are divided before they are summed over the ranks, and by what the sum.

    float16 ends at 65,504, and the sum of N numbers may lie above it where their mean does not. So a part of the
    division by N comes first. It is a power of two, N or the next above it, which costs no digit. Other dtypes have
    room, and are divided once, after the sum.
    """
    before = 1 << (world_size - 1).bit_length() if dtype == torch.float16 else 1
    return before, world_size / before


def common_dtype(buckets) -> torch.dtype:
    """The dtype that holds all shards' values: the same on every rank, also where one owns only a bucket's padding."""
    return functools.reduce(torch.promote_types, (bucket.shard.dtype for bucket in buckets))


def cast_inputs(engine) -> list:
    """Have floating point inputs of the model and of its units cast. Returns the hooks' handles."""
    if engine.dtypes[0] is None:
        return []
    units = getattr(engine, "units", None)
    modules = default_units(engine.model) if units is None else [unit.module for unit in units]
    cast = Cast(engine.dtypes[0])
    return [module.register_forward_pre_hook(cast, with_kwargs=True) for module in (engine.model, *modules)]


class Cast:
    """A forward pre-hook that casts floating point inputs, also those in containers and dataclasses.

    FSDP2 casts at each module that it wraps, so that a float32 buffer in between does no harm. Buffers and outputs
    keep their dtype.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    @not_compiled
    def __call__(self, module, args, kwargs):
        first = next(module.parameters(), None)
        if first is not None and first.dtype != self.dtype and first.is_floating_point():
            return None  # a copy of the model, which somebody has moved to another dtype
        return tree_map(self._one, args), tree_map(self._one, kwargs)

    def _one(self, value):
        if isinstance(value, torch.Tensor):
            return value.to(self.dtype) if value.is_floating_point() else value
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        cast = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(cast, field.name, tree_map(self._one, getattr(value, field.name)))  # frozen or not
        return cast
