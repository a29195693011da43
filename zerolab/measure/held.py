"""Everything that the instruments read from an engine: its tensors, its layout, and the names of its units.

An engine is anything with `model` and `optimizer`. A stage also has:

    all_buckets       of an engine of zerolab/engine: trained and frozen ones
    buckets           of ZeRO-1 and -2: the trained ones
    units             of ZeRO-3: units are buckets with a name and a module; the module of the root is the model

A bucket has names, params, offsets, numel, shard_numel, flat and shard, and perhaps `gradient` (ZeRO-1's buffer) and
`kept` ({parameter: the whole gradient} that `no_sync` keeps).

An engine that keeps its state elsewhere has a method `held_tensors()`.
"""

from itertools import accumulate

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zero3 import default_units
from zerolab.engine.parameters import get_grad


def tensor_leaves(tree) -> list[torch.Tensor]:
    """The tensors among an operation's arguments or results, however they are nested."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage_under(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage under `tensor`, also where that is a freed parameter; of a DTensor this rank's part."""
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def storage_bytes(tensors) -> int:
    """Bytes of the storages under `tensors`: whole, each once, of a DTensor this rank's part."""
    sizes = {storage._cdata: storage.nbytes() for storage in map(storage_under, tensors)}
    return sum(sizes.values())


# The tensors that a rank holds.


def optimizer_of(engine) -> torch.optim.Optimizer:
    """The optimizer that has the state: ZeroRedundancyOptimizer wraps it."""
    return getattr(engine.optimizer, "optim", engine.optimizer)


BUCKET = ("names", "params", "offsets", "numel", "shard_numel", "flat", "shard", "gradient")


def buckets_of(engine) -> list:
    """All buckets of an engine or a chapter, frozen ones too; nothing of other people's engines.

    They may use these names for something else, so each bucket must have what the instruments read from it.
    """
    for name in ("all_buckets", "buckets", "units"):
        found = getattr(engine, name, None)
        if isinstance(found, (list, tuple)) and all(hasattr(each, part) for each in found for part in BUCKET):
            return list(found)
    return []


def units_of(engine) -> list:
    """The units of ZeRO-3: buckets with a name and a module."""
    return [bucket for bucket in buckets_of(engine) if hasattr(bucket, "module")]


def held_tensors(engine) -> dict[str, list[torch.Tensor]]:
    """{"parameters", "gradients", "optimizer"}: what this rank holds now, of anything with model and optimizer.

    Parameters are the model's, those that the optimizer updates, and the shards of a sharded engine's buckets (of
    frozen parameters no optimizer knows); gradients theirs, optimizer its state with AdamW's 4-byte step counters.
    An engine that keeps them elsewhere has a method `held_tensors`, whose values may be nested.
    """
    if hasattr(engine, "held_tensors"):
        return {kind: tensor_leaves(tree) for kind, tree in engine.held_tensors().items()}
    inner = optimizer_of(engine)
    params = list(engine.model.parameters())
    for group in inner.param_groups:
        params += group["params"]
    params += [bucket.shard for bucket in buckets_of(engine)]
    # Not `param.grad`: reading that raises an error where an engine has moved the gradient into its shard.
    gradients = [gradient for gradient in map(get_grad, params) if gradient is not None]
    for bucket in buckets_of(engine):  # ZeRO-1's buffer, and what `no_sync` keeps
        gradients += getattr(bucket, "kept", {}).values()
        gradients += tensor_leaves(bucket.gradient)
    return {"parameters": params, "gradients": gradients, "optimizer": tensor_leaves(list(inner.state.values()))}


def held_shards(engine) -> dict[str, list[torch.Tensor]]:
    """`held_tensors` without ZeRO-3's whole parameters, which come and go."""
    held = held_tensors(engine)
    if units_of(engine):
        own = {id(param) for param in engine.model.parameters()}
        held["parameters"] = [tensor for tensor in held["parameters"] if id(tensor) not in own]
    return held


def held_bytes(engine) -> dict[str, int]:
    """{"parameters", "gradients", "optimizer"}: bytes of `held_tensors`."""
    return {part: storage_bytes(tensors) for part, tensors in held_tensors(engine).items()}


def engine_tensors(engine) -> list[torch.Tensor]:
    """All that can be reached from an engine: what it holds, and its buffers."""
    return [*tensor_leaves(held_tensors(engine)), *engine.model.buffers()]


# A stage's layout.


def bucket_name(engine, bucket) -> str:
    """The name of a unit, or "bucket 2" for the third bucket."""
    return getattr(bucket, "name", f"bucket {buckets_of(engine).index(bucket)}")


def bucket_with(engine, tensors: list[torch.Tensor]):
    """The bucket or unit one of whose buffers has one of `tensors`, or None. A reduction in flight counts as well."""
    storages = {storage_under(tensor)._cdata for tensor in tensors}
    for bucket in buckets_of(engine):
        buffers = tensor_leaves([bucket.flat, bucket.shard, bucket.gradient])
        if not storages.isdisjoint(storage_under(buffer)._cdata for buffer in buffers):
            return bucket
    reduction = getattr(engine, "in_flight", None)  # of ZeRO-2 and -3: its tensors are new in every backward
    if reduction is not None and storage_under(reduction.shard_gradient)._cdata in storages:
        return reduction.bucket
    return None


def sizes_of_layout(stage) -> tuple[int, int, int]:
    """Elements: of all buckets, of this rank's shards, and of padding."""
    whole = sum(bucket.numel for bucket in buckets_of(stage))
    parameters = sum(param.numel() for param in stage.model.parameters())
    return whole, sum(bucket.shard_numel for bucket in buckets_of(stage)), whole - parameters


def owners(stage) -> list[tuple[str, tuple[int, ...], int, int]]:
    """(name, shape, first rank, last rank) of every parameter: the ranks that own a part of it."""
    found = []
    for bucket in buckets_of(stage):
        for name, offset, param in zip(bucket.names, bucket.offsets, bucket.params):
            last = offset + max(param.numel(), 1) - 1
            found.append((name, tuple(param.shape), offset // bucket.shard_numel, last // bucket.shard_numel))
    return found


# Units.


def unit_names(model: nn.Module) -> set[str]:
    """The names of the modules that are units by default."""
    units = {id(unit) for unit in default_units(model)}
    return {name for name, module in model.named_modules() if id(module) in units}


def unit_of(module: str, units: set[str]) -> str:
    """The unit among `units` that contains the module named `module`, or ""."""
    prefixes = accumulate(module.split("."), "{}.{}".format)
    return next((prefix for prefix in prefixes if prefix in units), "")
