"""How parameters lie in their buffers, worked out anew: aligned, padded, each element owned once."""

import math

from torch import nn


def alignment(device: str) -> int:
    """Parameters and shards start on multiples of so many bytes."""
    return 16 if device == "cpu" else 256


def padded(sizes, world_size: int, align: int = 4) -> tuple[int, int]:
    """(elements of the buffer, elements of a shard) of these sizes; each starts on a multiple of `align`."""
    end = sum(math.ceil(size / align) * align for size in sizes)
    shard = math.ceil(end / (world_size * align)) * align
    return shard * world_size, shard


def owned(sizes, rank: int, world_size: int, align: int = 4) -> list[int]:
    """How many elements of each parameter lie in this rank's shard; only those with any."""
    _, shard = padded(sizes, world_size, align)
    found, offset = [], 0
    for size in sizes:
        overlap = min(offset + size, (rank + 1) * shard) - max(offset, rank * shard)
        if overlap > 0:
            found.append(overlap)
        offset += math.ceil(size / align) * align
    return found


def sizes_by_bucket(model: nn.Module, stage: str) -> list[list[int]]:
    """The layout, worked out anew: one bucket in reverse order for ZeRO-1 and -2, units and root for ZeRO-3."""
    named = [(n, p.numel()) for n, p in model.named_parameters() if p.requires_grad]
    if stage != "zero3":
        return [[size for _, size in reversed(named)]]
    frozen = [p.numel() for p in model.parameters() if not p.requires_grad]
    children = [name for name, module in model.named_children() if isinstance(module, nn.ModuleList)]
    units = {}
    for name, size in named:
        inside = name.split(".")[0] in children
        units.setdefault(".".join(name.split(".")[:2]) if inside else "root", []).append(size)
    root = units.pop("root", None)
    return [*units.values(), *([root] if root else []), *([frozen] if frozen else [])]
