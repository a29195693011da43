"""How parameters lie in their buffers, worked out anew: aligned, padded, each element owned once."""

import math

import torch
import torch.distributed as dist
from torch import nn

from harness.properties import parts
from harness.properties.property import holds, same


def alignment(device: str) -> int:
    """Parameters and shards start on multiples of so many bytes."""
    return 16 if device == "cpu" else 256


def padded(sizes, world_size: int, align: int = 4) -> tuple[int, int]:
    """(elements of the buffer, elements of a shard) for parameters of these sizes, each 16-byte aligned."""
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


@holds("bytes", sizes=(3,), cases=({"param_dtype": None}, {"param_dtype": torch.bfloat16}))
def parameters_start_on_16_byte_boundaries(engine, param_dtype, device="cpu"):
    """Every parameter and every shard starts on a multiple of 16 bytes, also when its unit is gathered.

    On a GPU of 256.
    """
    to = alignment(device)
    model = parts.seeded(parts.OddModel, dtype=torch.float32, device=device)
    trained = engine(model, parts.ADAMW, param_dtype=param_dtype)
    for bucket in trained.buckets:
        size = bucket.flat.element_size()
        beyond = [number * size % to for number in (*bucket.offsets, bucket.shard_numel)]
        same(f"bytes of offsets and shard beyond a multiple of {to}", beyond, [0] * len(beyond), step=0)
        same("elements of a buffer", bucket.numel, bucket.shard_numel * trained.world_size, step=0)
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda m, i: seen.extend(p.data_ptr() % to for p in m.parameters()))
    tokens, targets = (part.to(device) for part in parts.token_batch(0, dist.get_rank()))
    trained.training_step(tokens, targets, parts.in_float32)
    same(f"addresses of a block's parameters beyond a multiple of {to}", seen, [0] * 5, step=1)
