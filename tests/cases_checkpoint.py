"""Run on every rank: checkpoints from one stage, or torch's own class, into another."""

import os
import resource
import shutil
import warnings
from functools import partial
from pathlib import Path

import parts
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases_errors import message
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from harness.engine import checkpoint

OPTIMIZERS = {
    **parts.OPTIMIZERS,
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
}


class Zoo(nn.Module):
    """All that a checkpoint must carry: uneven, tied, frozen, unused and empty parameters, buffers, 3 dimensions.

    And, if `odd`, a scalar and an empty one, which FSDP2 does not take.
    """

    def __init__(self, odd: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 5))])
        self.blocks.append(nn.Sequential(nn.Linear(5, 9, bias=False), nn.Linear(9, 5)))
        self.mix = nn.Parameter(torch.randn(3, 5, 5) / 9)
        self.frozen = nn.Parameter(torch.full((5,), 1.5), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 5)) if odd else torch.zeros(0, 5)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("shift", torch.linspace(-1, 1, 5))
        self.register_buffer("table", torch.ones(5), persistent=False)
        self.scale = nn.Parameter(torch.tensor(0.7)) if odd else 0.7
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1) * self.frozen + self.shift * self.table
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        for matrix in self.mix:
            x = x + self.scale * (x @ matrix)
        return self.head(x + self.empty.sum())[:, :3]


def groups_of(model) -> list[dict]:
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 0.003},
    ]


def build(stage: str, optimizer: str = "adamw", seed: int = 0, odd: bool = True, dtype=torch.float64, **options):
    model = parts.seeded(partial(Zoo, odd), seed, dtype)
    options = {"param_groups": groups_of(model), "find_unused": True, **options}
    if stage != "zero3":
        options = {"bucket_mb": 0.0005, **options}
    return parts.STAGES[stage](model, OPTIMIZERS[optimizer], **options)


def train(engine, steps, batch_of=None) -> list:
    batch_of = batch_of or (lambda step: parts.token_batch(step, dist.get_rank()))
    return [engine.training_step(*batch_of(step), lambda out, y: F.cross_entropy(out.double(), y)) for step in steps]


def in_empty(folder: str, rank: int = 0) -> None:
    """An empty folder for all ranks."""
    if dist.get_rank() == rank:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
    dist.barrier()


def goes_on_to_the_bit(stage: str, optimizer: str, folder: str, in_background: bool = False, **options) -> None:
    """The loaded run is the uninterrupted one, also on an engine that had trained something else."""
    in_empty(folder)
    engine = build(stage, optimizer, **options)
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2)
    for step in range(3):
        train(engine, [step])
        schedule.step()
    extra = {"schedule": schedule.state_dict(), "rank": dist.get_rank(), "random": torch.get_rng_state(), 5: {7: None}}
    extra = {str(key): value for key, value in extra.items()} | {"keys": {1: (2, [3.0])}}
    if in_background:
        saving = checkpoint.async_save(engine, folder, **extra)
        ahead = train(engine, range(3, 6))  # the copy must not see this
        saved = saving.result()
    else:
        saved = checkpoint.save(engine, folder, **extra)
        ahead = train(engine, range(3, 6))
    assert saved.rank == engine.rank and saved.path == Path(folder) / "000001" and str(saved.nbytes)[0] != "0"
    other = build(stage, optimizer, seed=3, **options)
    schedule = torch.optim.lr_scheduler.StepLR(other.optimizer, 2)
    train(other, range(7, 9))
    found = checkpoint.load(other, folder)
    assert found["rank"] == dist.get_rank() and torch.equal(found["random"], extra["random"])
    assert found["keys"] == {1: (2, [3.0])} and found["5"] == {7: None}
    schedule.load_state_dict(found["schedule"])
    assert [group["lr"] for group in other.optimizer.param_groups] == schedule.get_last_lr()
    assert [torch.equal(a, b) for a, b in zip(ahead, train(other, range(3, 6)))] == [True] * 3
    parts.assert_same_state(
        {k: v for k, v in other.full_state_dict().items() if "running" not in k},
        {k: v for k, v in engine.full_state_dict().items() if "running" not in k},
        atol=0,
    )


def same_batch(step: int):
    return parts.token_batch(step, 0)


def leg(kind: str, source: str | None, copied: str, folder: str, steps: list, odd: bool) -> list | None:
    """One station of a journey: load, write the same again to `copied`, train on the same batch everywhere, save."""
    if kind in parts.STAGES:
        engine = build(kind, seed=0 if source is None else 5, odd=odd)
        if source is not None:
            checkpoint.load(engine, source)
            checkpoint.save(engine, copied)
        train(engine, steps, same_batch)
        checkpoint.save(engine, folder)
        return None
    model = parts.seeded(partial(Zoo, odd), 0 if source is None else 5)
    if kind == "fsdp2":
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    if source is not None:
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        path = checkpoint.newest(source)
        dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"], options=StateDictOptions(strict=False))
    for step in steps:
        inputs, targets = same_batch(step)
        F.cross_entropy(model(inputs).double(), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    return None
