"""A group of some ranks: trained over alone, beside others, or as one dimension of a mesh."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.engine.gradients import GradScaler
from harness.properties import parts
from harness.properties.property import holds, refused, same
from harness.properties.training import Pair


class Branches(nn.Module):
    """Three heads, of which a group uses one and nobody the third, and a buffer."""

    def __init__(self, shift: float = 0.0):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))
        self.register_buffer("shift", torch.full((5,), shift))

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.blocks[0](x)) + self.shift)


@holds("values", sizes=(4,))
def groups_keep_to_themselves(engine):
    """Two groups side by side that differ in buffers, unused parameters, norms and overflows see nothing of each other.

    A collective over all ranks instead of the group's would be matched by the other group, and only its values wrong.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(start, world_size, 2))) for start in (0, 1)]
    side, who, size = rank % 2, rank // 2, world_size // 2
    plain = parts.seeded(lambda: Branches(side), side)
    model = parts.seeded(lambda: Branches(rank), rank)  # rank 0 of each group has the right one
    optimizer = parts.DECAY(plain.parameters())
    trained = engine(model, parts.DECAY, group=groups[side], find_unused=True)
    scaler = GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        for other in range(size):
            x, y = parts.vector_batch(step, 2 * other + side, 5, torch.float64)
            (F.mse_loss(plain(x, side), y[:, :3]) / size).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        overflow = step == 1 and side == 0
        if not overflow:
            optimizer.step()
        optimizer.zero_grad()
        x, y = parts.vector_batch(step, rank, 5, torch.float64)
        loss = F.mse_loss(trained(x, side), y[:, :3])
        scaler.scale(loss * torch.inf if overflow and who else loss).backward()
        scaler.unscale_(trained)
        norm = trained.clip_grad_norm_(0.1)
        if not overflow:
            same("the norm of the group's gradients", norm, expected, 1e-12, step=3)
        scaler.step(trained)
        scaler.update()
        trained.zero_grad()
    same("the scale of the group's loss scaler", scaler.get_scale(), 2.0 if side == 0 else 4.0, step=4)
    if who:
        model.shift.add_(1)  # as running statistics would: the group's rank 0 has those that count
    state = trained.full_state_dict()
    same("the weights", state, plain.state_dict(), 1e-12, step=5)
    trained.load_full_state_dict(state)
    same("the buffer of the group", model.shift, plain.shift, step=0)
    dist.barrier()
    refused(lambda: engine(parts.seeded(parts.OddModel), parts.ADAMW, group=groups[1 - side]), "group")
    dist.barrier()


@holds("values", sizes=(4,))
def one_dimension_of_a_mesh_is_a_group(engine):
    """Four ranks as 2 x 2: sharded over one dimension, each pair trains on its own data and alone."""
    rank = dist.get_rank()
    mesh = parts.mesh(2, 2, names=("tensor", "data"))
    row = mesh.get_local_rank("tensor")
    pair = Pair(engine, parts.OddModel, parts.DECAY, seed=row, group=mesh.get_group("data"),
                batch=lambda step, who: parts.token_batch(step, 2 * row + who))  # fmt: skip
    same("world size and rank", (pair.trained.world_size, pair.trained.rank), (2, rank % 2), step=0)
    for step in range(3):
        pair.backward(step)
        pair.step()
        dist.barrier()
    pair.same_weights()
    shards = sum(bucket.shard_numel for bucket in pair.trained.trained_buckets)
    same("elements of all buckets", sum(bucket.numel for bucket in pair.trained.trained_buckets), 2 * shards, step=0)
