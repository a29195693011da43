"""Run on every rank: the layout of buffers and shards, worked out anew."""

import math

import parts
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

ADAMW = parts.OPTIMIZERS["adamw"]


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


def sizes_by_bucket(model: nn.Module, stage: str, bucket_mb: float = 25) -> list[list[int]]:
    """The layout, worked out anew: buckets in reverse order for ZeRO-1 and -2, units and root for ZeRO-3."""
    named = [(n, p.numel()) for n, p in model.named_parameters() if p.requires_grad]
    if stage == "zero3":
        frozen = [p.numel() for p in model.parameters() if not p.requires_grad]
        children = [name for name, module in model.named_children() if isinstance(module, nn.ModuleList)]
        units = {}
        for name, size in named:
            inside = name.split(".")[0] in children
            units.setdefault(".".join(name.split(".")[:2]) if inside else "root", []).append(size)
        root = units.pop("root", None)
        return [*units.values(), *([root] if root else []), *([frozen] if frozen else [])]
    buckets, nbytes = [], 0
    for _, size in reversed(named):
        if not buckets or nbytes + 4 * size > bucket_mb * 2**20:
            buckets.append([])
            nbytes = 0
        buckets[-1].append(size)
        nbytes += 4 * size
    return buckets


def weights_start_aligned(stage: str, param_dtype) -> None:
    model = parts.seeded(parts.OddModel, dtype=torch.float32)
    engine = parts.STAGES[stage](model, ADAMW, param_dtype=param_dtype)
    for bucket in engine.buckets:
        size = bucket.flat.element_size()
        assert all(offset * size % 16 == 0 for offset in bucket.offsets)
        assert bucket.shard_numel * size % 16 == 0 and bucket.numel == bucket.shard_numel * engine.world_size
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda m, i: seen.extend(p.data_ptr() % 16 for p in m.parameters()))
    tokens, targets = parts.token_batch(0, dist.get_rank())
    F.cross_entropy(engine(tokens).float(), targets).backward()
    assert seen == [0] * len(seen) and seen


def only_padding(stage: str) -> None:
    """Two elements over N ranks: the first owns both, the others nothing but padding, and still take part."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def build():
        return parts.seeded(lambda: nn.Linear(2, 1, bias=False))

    def batch_of(step, who):
        generator = torch.Generator().manual_seed(10 * step + who)
        return torch.randn(2, 2, generator=generator, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)

    _, expected = parts.oracle(build(), ADAMW, F.mse_loss, batch_of, 10, world_size)
    engine = parts.STAGES[stage](build(), ADAMW)
    for step in range(10):
        engine.training_step(*batch_of(step, rank), F.mse_loss)
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)
    owners = torch.tensor([sum(p.numel() for g in engine.optimizer.param_groups for p in g["params"])])
    assert bool(owners) == (rank == 0), "two elements of float64 make 16 bytes, which are not cut"
    dist.all_reduce(owners)
    assert owners.item() == 2, "each element has exactly one owner"
