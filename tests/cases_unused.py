"""Run on every rank: steps that leave parameters unused."""

import parts
import torch
import torch.distributed as dist
from cases_errors import message
from torch import nn
from torch.nn import functional as F

from harness.measure.memory import MemoryLedger, storage_bytes
from harness.measure.traffic import TrafficLedger
from harness.properties import models


class Adapted(nn.Module):
    """A block with adapters, of which a forward uses one or none. With a single one some ranks use all there is."""

    def __init__(self, width: int, adapters: int):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.adapters = nn.ParameterList([nn.Parameter(torch.randn(width)) for _ in range(adapters)])

    def forward(self, x, choice):
        x = torch.tanh(self.base(x))
        return x if choice is None else x * self.adapters[choice % len(self.adapters)]


class Forked(nn.Module):
    """Parts that a step may leave unused: adapters in units, a whole unit, an early and a late root parameter."""

    def __init__(self, width: int = 5):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.early = nn.Parameter(torch.randn(width))
        self.blocks = nn.ModuleList([Adapted(width, 4), Adapted(width, 1), Adapted(width, 4)])
        self.spare = nn.ModuleList([nn.Linear(width, 3)])  # a unit of its own, that only some steps run
        self.heads = nn.ModuleDict({"a": nn.Linear(width, 3), "b": nn.Linear(width, 3)})

    def forward(self, tokens, choice=None, early=False, spare=False):
        x = self.embedding(tokens).mean(1)
        if early:
            x = x + self.early
        for block in self.blocks:
            x = block(x, choice)
        out = {name: head(x) for name, head in self.heads.items()}
        return {**out, "spare": self.spare[0](x) if spare else None}


def path(step: int, rank: int, same: bool) -> tuple[dict, str]:
    """What forward is told in this step, and the output that the loss uses: on every rank the same, or not."""
    who = 0 if same else rank
    choice = (None, 0, 1, 2)[(step + who) % 4]
    return {"choice": choice, "early": (step + who) % 3 == 0, "spare": step % 2 == 0}, ("a", "b")[(step + who) // 2 % 2]


def loss_of(model, step: int, rank: int, same: bool, micro: int = 0):
    tokens, targets = parts.token_batch(10 * step + micro, rank)
    told, used = path(step + micro, rank, same)
    out = model(tokens, **told)
    loss = F.cross_entropy(out[used], targets)
    if out["spare"] is not None and step % 4 == 0:  # else the unit ran and nobody asks for its output
        loss = loss + F.cross_entropy(out["spare"], targets)
    return loss


def find_unused(stage: str, same: bool, micro_batches: int, no_sync: bool, options: dict) -> None:
    """Equal to one process that leaves out what nobody used: no decay, no momentum, no state for those."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = parts.seeded(Forked)
    optimizer = parts.DECAY(plain.parameters())
    engine = parts.STAGES[stage](parts.seeded(Forked), parts.DECAY, find_unused=True, **options)
    pieces = {}
    for bucket in engine.trained:
        for index, piece in bucket.pieces:
            pieces[bucket.names[index]] = piece
    for step in range(8):
        for micro in range(micro_batches):
            for other in range(world_size):
                (loss_of(plain, step, other, same, micro) / world_size).backward()
            if no_sync and micro < micro_batches - 1:
                with engine.no_sync():
                    loss_of(engine, step, rank, same, micro).backward()
            else:
                loss_of(engine, step, rank, same, micro).backward()
        unused = {name for name, param in plain.named_parameters() if param.grad is None}
        if step % 3 == 1:
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            torch.testing.assert_close(engine.clip_grad_norm_(0.1), expected, rtol=1e-12, atol=0)
        before = {name: dict(engine.optimizer.state.get(piece, {})) for name, piece in pieces.items()}
        counts = {name: int(state["step"]) if state else 0 for name, state in before.items()}
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
        for name, piece in pieces.items():
            state = engine.optimizer.state.get(piece, {})
            assert (int(state["step"]) if state else 0) == counts[name] + (name not in unused), name
        engine.zero_grad()
        assert "blocks.2.adapters.3" in unused and len(unused) < len(list(plain.parameters()))
        if stage == "zero3":
            assert storage_bytes(engine.model.parameters()) == 0, "gathered parameters outlive the step"
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


def find_unused_traffic(stage: str) -> list:
    """The collectives of one step with the option and without it, on a model that uses everything."""
    rank = dist.get_rank()
    found = []
    for option in (False, True):
        engine = parts.STAGES[stage](parts.seeded(parts.OddModel), parts.DECAY, find_unused=option)
        tokens, targets = parts.token_batch(0, rank)
        engine.training_step(tokens, targets, F.cross_entropy)
        with TrafficLedger() as traffic:
            F.cross_entropy(engine(tokens), targets).backward()
            engine.clip_grad_norm_(1e9)
            engine.step()
            engine.zero_grad()
        found.append(sorted((c.kind, c.whole_bytes) for c in traffic.collectives))
    small = ("all-reduce", sum(1 for p in engine.model.parameters() if p.requires_grad))
    assert small in found[1]
    found[1].remove(small)
    assert found[0] == found[1]
    return small[1]


def find_unused_memory() -> None:
    """ZeRO-3 with `find_unused`: what is alive in backward stays bounded, also where no unit is ever complete."""
    layers, width = 8, 64

    def idle():
        model = parts.Stack(layers, width)
        for layer in model.layers:
            layer.idle = nn.Parameter(torch.ones(1))
        return model

    peaks = []
    for option, build in ((False, lambda: parts.Stack(layers, width)), (True, idle)):
        engine = parts.ZeRO3(
            parts.seeded(build, dtype=torch.float32),
            parts.OPTIMIZERS["adamw"],
            group=parts.silent_group(),
            find_unused=option,
        )
        x, y = parts.vector_batch(0, dist.get_rank())
        with MemoryLedger() as memory:
            loss = F.mse_loss(engine(x), y)
            memory.reset_peak()
            loss.backward()
            peaks.append(memory.peak)
    unit = 4 * (width * width + width)
    assert peaks[1] <= peaks[0] + unit + 4096, peaks


def unused_by_default(stage: str) -> str:
    """Without the option: an error on every rank that names the parameters and the option."""
    rank = dist.get_rank()
    engine = parts.STAGES[stage](parts.seeded(Forked), parts.DECAY)
    tokens, targets = parts.token_batch(0, rank)
    F.cross_entropy(engine(tokens, choice=1, early=True, spare=True)["a"], targets).backward()
    return message(engine.step, RuntimeError)


def nothing_is_lost(stage: str) -> str:
    """A backward after which gradients wait for ever: step() says so and does not leave them out."""
    rank = dist.get_rank()
    engine = parts.STAGES[stage](parts.seeded(Forked), parts.DECAY, find_unused=True)
    with engine.no_sync():
        loss_of(engine, 0, rank, True).backward()
    found = message(engine.step, RuntimeError)
    engine.zero_grad()
    loss_of(engine, 0, rank, True).backward()
    engine.step()
    engine.zero_grad()
    return found


def combinations(stage: str, model: str, options: dict) -> None:
    """`find_unused` where everything is used, with units that run twice, ties, checkpoints: nothing may change."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    build = {
        "twice": parts.Twice,
        "tied": models.TiedAcross,
        "around": lambda: models.Checkpointed("around"),
        "inside": lambda: models.Checkpointed("inside"),
        "several": lambda: models.Checkpointed("around several"),
        "odd": parts.OddModel,
    }[model]
    _, expected = parts.oracle(parts.seeded(build), parts.DECAY, F.cross_entropy, parts.token_batch, 6, world_size)
    engine = parts.STAGES[stage](parts.seeded(build), parts.DECAY, find_unused=True, **options)
    for step in range(6):
        tokens, targets = parts.token_batch(step, rank)
        if step % 2:  # two forwards, one backward
            loss = F.cross_entropy(engine(tokens), targets) / 2
            loss = loss + F.cross_entropy(engine(tokens), targets) / 2
        else:
            loss = F.cross_entropy(engine(tokens), targets)
        loss.backward()
        if stage == "zero3":
            assert storage_bytes(engine.model.parameters()) == 0
        engine.step()
        engine.zero_grad()
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)
