"""What an engine holds between two steps, to the byte, against arithmetic done here; and what steps leave behind."""

import time

import torch
import torch.distributed as dist
from torch.nn import functional as F

from harness.measure.memory import MemoryLedger, held_bytes
from harness.properties import parts
from harness.properties.layout import owned, padded, sizes_by_bucket
from harness.properties.property import holds, same

ADAMW = parts.OPTIMIZERS["adamw"]


def settle(memory: MemoryLedger, expected: int) -> None:
    """Give gloo's thread a moment: it lets go of a collective's buffers shortly after `wait()` returns, not before."""
    for _ in range(100):
        if memory.live <= expected:
            return
        time.sleep(0.01)


@holds("bytes", sizes=(2, 3), further_sizes=(1, 4))
def held_bytes_equal_the_theory(engine):
    """Right before the update a rank holds what the theory says, to the byte, and nothing else is alive."""
    engine.needs("zero1", "zero1_2psi", "zero2", "zero3")
    stage = engine.like
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
        trained = engine(model, ADAMW)
        trained.training_step(*batches[0], F.cross_entropy)
        loss = F.cross_entropy(trained(batches[1][0]), batches[1][1])
        loss.backward()

        def look(optimizer, *_):
            settle(memory, outside + sum(held_bytes(trained).values()) + 4)
            held.update(held_bytes(trained), live=memory.live - outside)

        trained.optimizer.register_step_pre_hook(look)
        trained.step()
    cut = layout[:-1] if stage == "zero3" else layout  # the last is the root's frozen scale
    whole = 4 * sum(padded(sizes, world_size)[0] for sizes in cut)
    shard = 4 * sum(padded(sizes, world_size)[1] for sizes in cut)
    pieces = [size for sizes in cut for size in owned(sizes, rank, world_size)]
    expected = {
        # AdamW: two moments per element and a 4-byte counter per piece; padding has no state
        "optimizer": 8 * sum(pieces) + 4 * len(pieces),
        "gradients": whole if stage in ("zero1", "zero1_2psi") else shard,
        "parameters": shard + 4 * padded([frozen], world_size)[1]
        if stage == "zero3"
        else whole + 4 * padded([frozen], world_size)[0],
    }
    if stage == "zero1_2psi" and held["gradients"] > whole:  # the mean came into a buffer of its own, as it may
        expected["gradients"] += shard
    live = held.pop("live")
    for kind, nbytes in expected.items():
        same(f"bytes of the {kind} held in step 4", held[kind], nbytes, step=4)
    # Only the loss of the forward before.
    same("bytes that are alive besides", live - sum(expected.values()), 4, step=4)


@holds("life", sizes=(2,))
def steps_leave_no_hooks_behind(engine):
    """The engine's hooks are set once: steps of every kind leave as many as they found."""
    model = parts.seeded(parts.OddModel)
    trained = engine(model, ADAMW, find_unused=True)
    tokens, targets = parts.token_batch(0, dist.get_rank())

    def hooks() -> int:
        owners = (*model.modules(), trained.optimizer)
        return sum(len(value or ()) for owner in owners for key, value in vars(owner).items() if "hooks" in key)

    before = hooks()
    for _ in range(2):
        trained.training_step(tokens, targets, F.cross_entropy)
        with torch.no_grad():
            trained(tokens)
        with trained.no_sync():
            F.cross_entropy(trained(tokens), targets).backward()
        F.cross_entropy(trained(tokens), targets).backward()
        trained.clip_grad_norm_(1.0)
        trained.step()
        trained.zero_grad()
        trained.load_full_state_dict(trained.full_state_dict())
        same("hooks on modules and optimizer after a step", hooks(), before)
