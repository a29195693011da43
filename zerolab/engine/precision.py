"""Mixed precision: compute and communicate in one dtype, keep the shards in another.

With `param_dtype=torch.bfloat16` a model of float32 parameters computes in bfloat16. The optimizer updates the shards,
which stay in float32, because bfloat16 has 8 significant bits, so an update that is 256 times smaller than its weight
would be lost. A gather sends a rounded copy of the shards. With `reduce_dtype=torch.float32` the gradients of all ranks
are summed in float32, although backward has computed them in bfloat16.

The cost, in bytes (bfloat16, float32 shards, AdamW; Ψ parameters, N ranks), with `reduce_dtype=torch.float32`:

    ZeRO-1   2Ψ whole weights + 4Ψ/N shards + 4Ψ gradients + 8Ψ/N optimizer state = 6Ψ + 12Ψ/N
    ZeRO-2   2Ψ whole weights + 4Ψ/N shards + 4Ψ/N gradients + 8Ψ/N optimizer state = 2Ψ + 16Ψ/N
    ZeRO-3   4Ψ/N shards + 4Ψ/N gradients + 8Ψ/N optimizer state = 16Ψ/N, and 2 bytes per gathered parameter

In ZeRO-1 the optimizer's gradients are a view of the whole float32 gradients. Without `reduce_dtype` the whole
gradients are in bfloat16, so the optimizer needs a float32 copy of its part, and the sum is 4Ψ + 16Ψ/N.

A gather sends 2 bytes per parameter, a reduction 2 or 4. FSDP2's `MixedPrecisionPolicy` does the same, with the same
losses to the bit on two ranks. DeepSpeed calls the float32 shards master weights.
"""

import copy
import dataclasses

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten


def compute_dtype(param, options):
    """The dtype to compute in. Integer parameters, such as quantized frozen weights, keep their dtype."""
    if options.param_dtype is None or not param.is_floating_point():
        return param.dtype
    return options.param_dtype


def reduce_dtype(param, options):
    """The dtype to reduce gradients in. Complex parameters keep their dtype."""
    if options.reduce_dtype is None or not param.is_floating_point():
        return compute_dtype(param, options)
    return options.reduce_dtype


def alignment(param, options):
    """The chapter's alignment of 16 or 256 bytes, in elements of the smaller one of the two dtypes."""
    nbytes = 256 if param.is_cuda else 16
    size = min(param.element_size(), compute_dtype(param, options).itemsize)
    return max(1, nbytes // size)


def divisors(dtype, world_size):
    """The divisor of the gradients before they are summed over the ranks, and the divisor of the sum.

    The largest float16 is 65,504. A sum of N numbers can exceed it even if their mean does not. So float16 gradients
    are divided by a power of two first, which is exact. Other dtypes have room for the sum.
    """
    if dtype != torch.float16:
        return 1, world_size
    before = 1 << (world_size - 1).bit_length()  # N, or the next larger power of two
    return before, world_size / before


def sendable(tensor):
    """A flat tensor on the same memory. It is a view as bytes if gloo and NCCL cannot send the dtype."""
    if tensor.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return tensor.reshape(-1)
    return tensor.reshape(-1).view(torch.uint8)


def as_real(tensor):
    """The real and imaginary parts of a flat complex tensor: a view (2 * numel,)."""
    return torch.view_as_real(tensor).reshape(-1)


def tensors_in(value):
    """All tensors in `value`: in tuples, lists, dictionaries and dataclasses, also nested."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass_instance(leaf):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name, None))


def is_dataclass_instance(value):
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def cast_inputs(module, dtype):
    """Cast floating point inputs of `module` to `dtype` before its forward.

    Like FSDP2, engines do this for every unit, in case the model computes in float32 between two of them. An argument
    that has nothing to cast is passed on as it is: a module may fill a list or a dictionary that it was given.
    """

    def before_forward(module, args, kwargs):
        args = tuple(cast(value, dtype) for value in args)
        return args, {name: cast(value, dtype) for name, value in kwargs.items()}

    module.register_forward_pre_hook(before_forward, with_kwargs=True)


def cast(value, dtype):
    """`value` itself if it has nothing to cast. Else a copy, also of the containers and dataclasses around a tensor."""
    leaves, structure = tree_flatten(value)
    changed = [cast_leaf(leaf, dtype) for leaf in leaves]
    if all(new is old for new, old in zip(changed, leaves)):
        return value
    return tree_unflatten(changed, structure)


def cast_leaf(leaf, dtype):
    if isinstance(leaf, torch.Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() else leaf
    if not is_dataclass_instance(leaf):
        return leaf
    fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    changed = {name: cast(value, dtype) for name, value in fields.items()}
    if all(changed[name] is fields[name] for name in fields):
        return leaf
    new = copy.copy(leaf)  # unlike `dataclasses.replace`, it does not run `__post_init__` again
    for name, value in changed.items():
        object.__setattr__(new, name, value)  # also where the dataclass is frozen
    return new
