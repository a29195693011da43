"""Run on every rank: what may happen around a backward, against plain PyTorch on the whole batch."""

import parts
import torch
import torch.distributed as dist
from cases_errors import message
from cases_unused import Forked, loss_of

from harness.measure.traffic import TrafficLedger
from harness.properties.loops import Trip

MOMENTUM = parts.OPTIMIZERS["momentum"]


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
