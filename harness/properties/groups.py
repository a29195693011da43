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
    side, who = rank % 2, rank // 2

    def batch(step, who):
        x, y = parts.vector_batch(step, 2 * who + side, 5, torch.float64)
        return x, y[:, :3], torch.inf if step == 1 and who == 1 and side == 0 else 1.0

    # Rank 0 of each group has the right one.
    built = parts.seeded(lambda: Branches(side), side), parts.seeded(lambda: Branches(rank), rank)
    pair = Pair(engine, built, parts.DECAY, batch=batch, group=groups[side], find_unused=True,
                loss=lambda model, x, y, factor: F.mse_loss(model(x, side), y) * factor)  # fmt: skip
    scaler = GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        pair.scaled_step(step, scaler, 0.1, skipped=step == 1 and side == 0)
    same("the scale of the group's loss scaler", scaler.get_scale(), 2.0 if side == 0 else 4.0, step=4)
    trained = pair.trained
    if who:
        trained.model.shift.add_(1)  # as running statistics would: the group's rank 0 has those that count
    pair.same_weights()
    trained.load_full_state_dict(trained.full_state_dict())
    same("the buffer of the group", trained.model.shift, pair.plain.shift, step=0)
    dist.barrier()
    refused(lambda: engine(parts.seeded(parts.OddModel), parts.ADAMW, group=groups[1 - side]), "group")
    dist.barrier()


@holds("values", sizes=(4,))
def one_dimension_of_a_mesh_is_a_group(engine):
    """A mesh of one dimension, or its group, may be given: of four ranks as 2 x 2 each pair trains alone."""
    rank = dist.get_rank()
    mesh = parts.mesh(2, 2, names=("tensor", "data"))
    row = mesh.get_local_rank("tensor")
    for group in (mesh.get_group("data"), mesh["data"]):
        pair = Pair(engine, parts.OddModel, parts.DECAY, seed=row, group=group,
                    batch=lambda step, who: parts.token_batch(step, 2 * row + who))  # fmt: skip
        if not engine.foreign:
            same("world size and rank", (pair.trained.world_size, pair.trained.rank), (2, rank % 2), step=0)
        for step in range(3):
            pair.backward(step)
            pair.step()
            dist.barrier()
        pair.same_weights()
        buckets = [] if engine.foreign else pair.trained.trained_buckets
        shards = sum(bucket.shard_numel for bucket in buckets)
        same("elements of all buckets", sum(bucket.numel for bucket in buckets), 2 * shards, step=0)
