"""Run on every rank: groups side by side."""

from functools import partial

import parts
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.engine.gradients import GradScaler


def subgroup(stage: str) -> None:
    """The even ranks and the odd ones train two models side by side, each over its own group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(start, world_size, 2))) for start in (0, 1)]
    mine = groups[rank % 2]
    adam, size = parts.OPTIMIZERS["adamw"], dist.get_world_size(groups[rank % 2])

    def batch_of(step, group_rank):
        return parts.token_batch(step, 2 * group_rank + rank % 2)

    _, expected = parts.oracle(parts.seeded(parts.OddModel, seed=rank % 2), adam, F.cross_entropy, batch_of, 10, size)
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel, seed=rank), adam, group=mine)
    for step in range(10):
        engine.training_step(*batch_of(step, dist.get_rank(mine)), F.cross_entropy)
    state = engine.full_state_dict()
    parts.assert_same_state(state, expected, atol=1e-12)
    try:
        parts.STAGES[stage](parts.seeded(parts.OddModel), adam, group=groups[1 - rank % 2])
    except (ValueError, TypeError) as error:
        assert "group" in str(error)
    else:
        raise AssertionError("a group without this rank was accepted")
    dist.barrier()


class Branches(nn.Module):
    """Two heads, of which a group uses one, and a buffer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])
        self.heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
        self.register_buffer("shift", torch.zeros(5))

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.blocks[0](x)) + self.shift)


def a_group_keeps_to_itself(stage: str) -> None:
    """Two groups side by side that differ in buffers, unused parameters, norms and overflows: neither sees the other's.

    A collective over all ranks instead of the group's would be matched by the other group, and only its values wrong.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(start, world_size, 2))) for start in (0, 1)]
    side, who, size = rank % 2, rank // 2, world_size // 2
    decay = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3)
    plain, model = parts.seeded(Branches, side), parts.seeded(Branches, rank)
    with torch.no_grad():
        plain.shift.fill_(side)
        model.shift.fill_(rank)  # rank 0 of each group has the right one
    optimizer = decay(plain.parameters())
    engine = parts.STAGES[stage](model, decay, group=groups[side], find_unused=True)
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
        loss = F.mse_loss(engine(x, side), y[:, :3])
        scaler.scale(loss * torch.inf if overflow and who else loss).backward()
        scaler.unscale_(engine)
        norm = engine.clip_grad_norm_(0.1)
        assert overflow or torch.allclose(norm, expected, rtol=1e-12, atol=0)
        scaler.step(engine)
        scaler.update()
        engine.zero_grad()
    assert scaler.get_scale() == (2.0 if side == 0 else 4.0)
    if who:
        model.shift.add_(1)  # as running statistics would: the group's rank 0 has those that count
    state = engine.full_state_dict()
    parts.assert_same_state(state, plain.state_dict(), atol=1e-12)
    engine.load_full_state_dict(state)
    assert (model.shift == side).all()
    dist.barrier()


def one_dimension_of_a_mesh(stage: str) -> None:
    """Four ranks as 2 x 2: sharded over one dimension, each pair trains on its own data and alone."""
    rank = dist.get_rank()
    mesh = parts.mesh(2, 2, names=("tensor", "data"))
    row, column = mesh.get_local_rank("tensor"), mesh.get_local_rank("data")
    assert rank == 2 * row + column
    build = parts.OddModel
    plain = parts.seeded(build, seed=row)
    optimizer = parts.DECAY([param for param in plain.parameters() if param.requires_grad])
    engine = parts.STAGES[stage](parts.seeded(build, seed=row), parts.DECAY, group=mesh.get_group("data"))
    assert engine.world_size == 2 and engine.rank == column
    for step in range(5):
        for other in range(2):
            tokens, targets = parts.token_batch(step, 2 * row + other)
            (F.cross_entropy(plain(tokens), targets) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.training_step(*parts.token_batch(step, rank), F.cross_entropy)
        dist.barrier()
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)
    shards = sum(bucket.shard_numel for bucket in engine.trained)
    whole = sum(bucket.numel for bucket in engine.trained)
    assert whole == 2 * shards
