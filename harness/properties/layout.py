"""How parameters lie in their buffers, worked out anew: aligned, padded, each element owned once."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.properties import parts
from harness.properties.property import holds, same

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


@holds("bytes", sizes=(3,), cases=({"param_dtype": None}, {"param_dtype": torch.bfloat16}))
def parameters_start_on_16_byte_boundaries(engine, param_dtype):
    """Every parameter and every shard starts on a multiple of 16 bytes, also when its unit is gathered."""
    model = parts.seeded(parts.OddModel, dtype=torch.float32)
    trained = engine(model, ADAMW, param_dtype=param_dtype)
    for bucket in trained.buckets:
        size = bucket.flat.element_size()
        same(
            "bytes of offsets beyond a multiple of 16",
            [o * size % 16 for o in bucket.offsets if o * size % 16],
            [],
            step=0,
        )
        same("bytes of a shard beyond a multiple of 16", bucket.shard_numel * size % 16, 0, step=0)
        same("elements of a buffer", bucket.numel, bucket.shard_numel * trained.world_size, step=0)
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda m, i: seen.extend(p.data_ptr() % 16 for p in m.parameters()))
    tokens, targets = parts.token_batch(0, dist.get_rank())
    F.cross_entropy(trained(tokens).float(), targets).backward()
    same("addresses of a block's parameters beyond a multiple of 16", seen, [0] * 5, step=1)


@holds("values", sizes=(2, 4))
def a_rank_may_own_only_padding(engine):
    """Two elements over N ranks: the first owns both, the others nothing but padding, and still take part."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def build():
        return parts.seeded(lambda: nn.Linear(2, 1, bias=False))

    def batch_of(step, who):
        generator = torch.Generator().manual_seed(10 * step + who)
        return torch.randn(2, 2, generator=generator, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)

    _, expected = parts.oracle(build(), ADAMW, F.mse_loss, batch_of, 10, world_size)
    trained = engine(build(), ADAMW)
    for step in range(10):
        trained.training_step(*batch_of(step, rank), F.mse_loss)
    same("the weights", trained.full_state_dict(), expected, atol=1e-12, step=5)
    owners = torch.tensor([sum(p.numel() for g in trained.optimizer.param_groups for p in g["params"])])
    # Two elements of float64 make 16 bytes, which are not cut.
    same("elements that this rank's optimizer updates", owners.item(), 2 if rank == 0 else 0, step=4)
