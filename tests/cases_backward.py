"""Run on every rank: what may happen around a backward, against plain PyTorch on the whole batch."""

import contextlib

import parts
import torch
import torch.distributed as dist
from cases_errors import message
from cases_unused import Forked, loss_of
from torch import nn
from torch.nn import functional as F

from harness.measure.memory import storage_bytes
from harness.measure.traffic import TrafficLedger

MOMENTUM = parts.OPTIMIZERS["momentum"]


def twice_through_one_graph(model, batch, scale):
    loss = scale * F.cross_entropy(model(batch[0]), batch[1])
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def two_losses_of_one_forward(model, batch, scale):
    out = model(batch[0])
    (scale * F.cross_entropy(out, batch[1])).backward(retain_graph=True)
    (scale * out.square().mean()).backward()


def an_evaluation_before_backward(model, batch, scale):
    loss = scale * F.cross_entropy(model(batch[0]), batch[1])
    with torch.no_grad():
        model(batch[0])
    loss.backward()


def a_gradient_of_an_activation_first(model, batch, scale):
    """`autograd.grad` down to the middle: what it returns is not added to any parameter's gradient."""
    seen = []
    blocks = getattr(model, "model", model).blocks
    hook = blocks[1].register_forward_hook(lambda module, args, out: seen.append(out))
    loss = scale * F.cross_entropy(model(batch[0]), batch[1])
    hook.remove()
    assert torch.autograd.grad(loss, seen, retain_graph=True)[0].abs().max() > 0
    loss.backward()


def forwards_first(model, batch, scale):
    """Two graphs at once, and the older one's backward first."""
    losses = [scale * F.cross_entropy(model(batch[0][rows]), batch[1][rows]) for rows in (slice(0, 1), slice(1, 4))]
    for loss in losses:
        loss.backward()


WAYS = (
    twice_through_one_graph,
    two_losses_of_one_forward,
    an_evaluation_before_backward,
    a_gradient_of_an_activation_first,
    forwards_first,
)


def ways_to_call_backward(stage: str, options: dict) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = parts.seeded(parts.OddModel)
    optimizer = MOMENTUM([param for param in plain.parameters() if param.requires_grad])
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), MOMENTUM, **options)
    for step, way in enumerate(WAYS):
        for other in range(world_size):
            way(plain, parts.token_batch(step, other), 1 / world_size)
        optimizer.step()
        optimizer.zero_grad()
        way(engine, parts.token_batch(step, rank), 1)
        if stage == "zero3":
            assert storage_bytes(engine.model.parameters()) == 0, f"gathered parameters outlive {way.__name__}"
        engine.step()
        engine.zero_grad()
        parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


def steps_without_zero_grad(stage: str) -> None:
    """A step leaves the gradients where they are, as torch's optimizers do: the next adds to them or reuses them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = parts.seeded(parts.OddModel)
    optimizer = MOMENTUM([param for param in plain.parameters() if param.requires_grad])
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), MOMENTUM)
    for step in range(3):
        tokens, targets = parts.whole(parts.token_batch, step, world_size)
        F.cross_entropy(plain(tokens), targets).backward()
        tokens, targets = parts.token_batch(step, rank)
        F.cross_entropy(engine(tokens), targets).backward()
        for _ in range(1 + step % 2):
            optimizer.step()
            engine.step()
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


def clipping_between_with_unused(stage: str) -> None:
    """Clip, another backward, step: what some rank used before counts, what none used does not decay."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = parts.seeded(Forked)
    optimizer = MOMENTUM(plain.parameters())
    engine = parts.STAGES[stage](parts.seeded(Forked), MOMENTUM, find_unused=True)
    for step in range(4):
        for micro in range(2):
            for other in range(world_size):
                (loss_of(plain, step, other, False, micro) / world_size).backward()
            loss_of(engine, step, rank, False, micro).backward()
            if micro == 0:
                expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                torch.testing.assert_close(engine.clip_grad_norm_(0.1), expected, rtol=1e-12, atol=0)
        assert any(param.grad is None for param in plain.parameters())
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
        engine.zero_grad()
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


def a_fault_under_no_sync(stage: str) -> None:
    """An exception leaves `no_sync()`, and the steps after it are reduced as ever."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    _, expected = parts.oracle(
        parts.seeded(parts.OddModel), parts.DECAY, F.cross_entropy, parts.token_batch, 3, world_size
    )
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), parts.DECAY)

    def interrupted():
        with engine.no_sync():
            engine(parts.token_batch(9, rank)[0])
            raise ZeroDivisionError("tripped under no_sync")

    for step in range(3):
        message(interrupted, ZeroDivisionError)
        engine.training_step(*parts.token_batch(step, rank), F.cross_entropy)
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)


class Trip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("tripped in backward")


def going_on_after_half_a_backward(stage: str) -> str:
    """Without `zero_grad()` half a backward would be mixed with the next: an error that names the way out."""
    rank = dist.get_rank()
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), parts.DECAY)
    tokens, targets = parts.token_batch(0, rank)
    hook = engine.model.blocks[1].register_forward_pre_hook(lambda module, args: (Trip.apply(args[0]),))
    message(F.cross_entropy(engine(tokens), targets).backward, ZeroDivisionError)
    hook.remove()
    found = message(lambda: F.cross_entropy(engine(tokens), targets).backward(), RuntimeError)
    engine.zero_grad()
    engine.training_step(tokens, targets, F.cross_entropy)
    return found


class TwoHeads(parts.OddModel):
    """A second head, which is in no unit, and a parameter that only one of two losses reaches."""

    def __init__(self):
        super().__init__()
        self.second, self.ask = nn.Linear(5, 3), nn.Parameter(torch.ones(3))

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1) * self.frozen + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x), self.second(x) * self.ask


def several_losses(stage: str, kept: bool, options: dict) -> None:
    """Each loss has a backward of its own and reaches a part of the model; the last one reaches the smallest part."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = parts.seeded(TwoHeads)
    optimizer = MOMENTUM([param for param in plain.parameters() if param.requires_grad])
    engine = parts.STAGES[stage](parts.seeded(TwoHeads), MOMENTUM, **options)

    def backward(model, batch, scale, quiet=contextlib.nullcontext):
        first, second = model(batch[0])
        bare = getattr(model, "model", model)
        with quiet():
            (scale * F.cross_entropy(first, batch[1])).backward(retain_graph=True)
            (scale * F.cross_entropy(second, batch[1])).backward()
        if stage == "zero3" and bare is not model:
            return  # a freed weight cannot be used outside of the model's forward
        (scale * bare.ask.square().sum()).backward()

    for step in range(4):
        for other in range(world_size):
            backward(plain, parts.token_batch(step, other), 1 / world_size)
            if stage == "zero3":  # what this loss adds on the plain side, which it leaves out
                plain.ask.grad -= 2 / world_size * plain.ask.detach()
        backward(engine, parts.token_batch(step, rank), 1, *([engine.no_sync] if kept and stage != "zero3" else []))
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
        engine.zero_grad()
        parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


def a_fault_before_unused_parameters(stage: str) -> None:
    """After half a backward and `zero_grad()`, buckets that wait for gradients which do not come are still reduced."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = parts.seeded(Forked)
    optimizer = MOMENTUM(plain.parameters())
    engine = parts.STAGES[stage](parts.seeded(Forked), MOMENTUM, find_unused=True)
    for step in range(3):
        hook = engine.model.blocks[1].register_forward_pre_hook(lambda module, args: (Trip.apply(args[0]), *args[1:]))
        message(loss_of(engine, step, rank, False).backward, ZeroDivisionError)
        hook.remove()
        with TrafficLedger() as traffic:
            engine.zero_grad()
        assert not traffic.collectives, "gradients that are dropped were sent"
        for other in range(world_size):
            (loss_of(plain, step, other, False) / world_size).backward()
        loss_of(engine, step, rank, False).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
        engine.zero_grad()
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)
