"""Run on every rank: frozen weights and running statistics, in and out."""

import parts
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def loading_reaches_frozen_weights(stage: str) -> None:
    """What forward uses after loading is what was loaded, the frozen weights on every rank included."""
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), parts.DECAY)
    other = parts.seeded(parts.OddModel, seed=3)
    with torch.no_grad():
        other.frozen.copy_(torch.linspace(2, 3, 5))
        other.shift.add_(0.5)
    engine.load_full_state_dict(other.state_dict())
    tokens, _ = parts.token_batch(0, dist.get_rank())
    with torch.no_grad():
        torch.testing.assert_close(engine(tokens), other(tokens), rtol=0, atol=1e-12)
    parts.assert_same_state(engine.full_state_dict(), other.state_dict(), atol=0)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def batch_norm_keeps_rank_0(stage: str) -> None:
    """Running statistics are every rank's own; `full_state_dict` has rank 0's, and loading gives these to all."""
    rank = dist.get_rank()

    def batch_of(step, who):
        generator = torch.Generator().manual_seed(100 * step + who)
        return torch.randn(8, 6, generator=generator, dtype=torch.float64) + who, torch.zeros(8, 3, dtype=torch.float64)

    model = parts.seeded(Normed)
    engine = parts.STAGES[stage](model, parts.DECAY)
    for step in range(4):
        engine.training_step(*batch_of(step, rank), F.mse_loss)
    mean = model.blocks[0][1].running_mean
    everyone = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mean)
    assert all(not torch.equal(everyone[0], other) for other in everyone[1:])  # each has seen its own data
    state = engine.full_state_dict()
    assert torch.equal(state["blocks.0.1.running_mean"], everyone[0])
    assert torch.equal(mean, everyone[rank])  # and asking has changed nothing
    assert state["blocks.0.1.num_batches_tracked"] == 4
    engine.load_full_state_dict(state)
    assert torch.equal(mean, everyone[0])
    engine.model.eval()
    with torch.no_grad():
        out = engine(batch_of(9, 0)[0])
    plain = parts.seeded(Normed, seed=3)
    plain.load_state_dict(state)
    torch.testing.assert_close(out, plain.eval()(batch_of(9, 0)[0]), rtol=0, atol=1e-12)
