"""Run on every rank: what the engines hold, against arithmetic done here."""

import time

import parts
import torch
import torch.distributed as dist
from cases_layout import owned, padded, sizes_by_bucket
from torch.nn import functional as F

from harness.measure.memory import MemoryLedger, held_bytes

ADAMW = parts.OPTIMIZERS["adamw"]


def settle(memory: MemoryLedger, expected: int) -> None:
    """Give gloo's thread a moment: it lets go of a collective's buffers shortly after `wait()` returns, not before."""
    for _ in range(100):
        if memory.live <= expected:
            return
        time.sleep(0.01)


def held_after_step_3(stage: str, engine_name: str | None = None) -> None:
    """Parameters, gradients and optimizer state to the byte, on every rank, padding included by name."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = parts.seeded(parts.OddModel, dtype=torch.float32)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    layout = sizes_by_bucket(model, stage)
    batches = [parts.token_batch(step, rank) for step in range(2)]
    held = {}
    with MemoryLedger() as memory:
        memory.track(model.shift)
        for tensor in [t for batch in batches for t in batch]:
            memory.track(tensor)
        outside = memory.live
        for param in model.parameters():
            memory.track(param)
        engine = parts.engine_class(engine_name or stage)(model, ADAMW)
        engine.training_step(*batches[0], F.cross_entropy)
        loss = F.cross_entropy(engine(batches[1][0]), batches[1][1])
        loss.backward()

        def look(optimizer, *_):
            settle(memory, outside + sum(held_bytes(engine).values()) + 4)
            held.update(held_bytes(engine), live=memory.live - outside)

        engine.optimizer.register_step_pre_hook(look)
        engine.step()
    trained = layout[:-1] if stage == "zero3" else layout  # the last is the root's frozen scale
    whole = 4 * sum(padded(sizes, world_size)[0] for sizes in trained)
    shard = 4 * sum(padded(sizes, world_size)[1] for sizes in trained)
    pieces = [size for sizes in trained for size in owned(sizes, rank, world_size)]
    expected = {
        "parameters": shard + 4 * padded([frozen], world_size)[1]
        if stage == "zero3"
        else whole + 4 * padded([frozen], world_size)[0],
        "gradients": whole if stage == "zero1" else shard,
        # AdamW: two moments per element and a 4-byte counter per piece; padding has no state
        "optimizer": 8 * sum(pieces) + 4 * len(pieces),
    }
    live = held.pop("live")
    assert held == expected, f"held {held}, expected {expected}"
    # and nothing else is alive anywhere: only the loss of the forward before
    assert live == sum(expected.values()) + 4, f"{live - sum(expected.values())} bytes are alive besides the held state"


def hooks_on_the_model(stage: str) -> None:
    """The engine's hooks are set once: steps of every kind leave as many as they found."""
    model = parts.seeded(parts.OddModel)
    engine = parts.STAGES[stage](model, ADAMW, find_unused=True)
    tokens, targets = parts.token_batch(0, dist.get_rank())

    def hooks() -> int:
        owners = (*model.modules(), engine.optimizer)
        return sum(len(value or ()) for owner in owners for key, value in vars(owner).items() if "hooks" in key)

    before = hooks()
    for _ in range(2):
        engine.training_step(tokens, targets, F.cross_entropy)
        with torch.no_grad():
            engine(tokens)
        with engine.no_sync():
            F.cross_entropy(engine(tokens), targets).backward()
        F.cross_entropy(engine(tokens), targets).backward()
        engine.clip_grad_norm_(1.0)
        engine.step()
        engine.zero_grad()
        engine.load_full_state_dict(engine.full_state_dict())
        assert hooks() == before > 0
