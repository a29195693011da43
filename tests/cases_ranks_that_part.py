"""Run on every rank: a rank that leaves out a unit, or stays away."""

import datetime
import time

import parts
import torch
import torch.distributed as dist
from cases_errors import message
from torch import nn
from torch.nn import functional as F

from harness.measure.traffic import TrafficLedger
from harness.run.data import while_all_have


def short_group(seconds: float):
    """All ranks, with a timeout of their own, so that what goes wrong there leaves the other cases alone."""
    return dist.new_group(timeout=datetime.timedelta(seconds=seconds), backend="gloo")


class Skipping(nn.Module):
    """Units of different sizes or of the same, of which one may be skipped."""

    def __init__(self, sizes):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, size), nn.Linear(size, 8)) for size in sizes])
        self.skip = None

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            if index != self.skip:
                x = block(x)
        return x


def a_unit_that_only_some_ranks_run(sizes: tuple, at_step: int, skip: int, prefetch: int) -> str:
    """The last rank skips a unit in one step: an error on every rank, by the timeout at the latest."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = short_group(1)
    model = parts.seeded(lambda: Skipping(sizes), dtype=torch.float32)
    engine = parts.ZeRO3(model, parts.DECAY, group=group, find_unused=True, prefetch=prefetch)
    for step in range(at_step):
        engine.training_step(*parts.vector_batch(step, rank, 8), F.mse_loss)
    model.skip = skip if rank == world_size - 1 else None
    found = message(lambda: engine.training_step(*parts.vector_batch(9, rank, 8), F.mse_loss), RuntimeError)
    dist.barrier()  # the others may still be on their way to their error
    return found


def a_unit_left_out_at_the_end() -> str:
    """Evaluation, in which the last rank leaves out the last unit: its next forward must not meet their gather."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = parts.seeded(lambda: Skipping((8, 8, 8, 8)), dtype=torch.float32)
    engine = parts.ZeRO3(model, parts.DECAY, group=short_group(1), prefetch=0)
    x, _ = parts.vector_batch(0, rank, 8)

    def evaluate():
        with torch.no_grad():
            engine(x)
            model.skip = 3 if rank == world_size - 1 else None
            engine(x)
            engine(x)

    found = message(evaluate, RuntimeError)
    dist.barrier()
    return found


def all_ranks_may_skip_alike(stage: str) -> None:
    """A unit that no rank runs in a step is no mistake: with `find_unused` training goes on right."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = parts.seeded(lambda: Skipping((8, 9, 8, 9)))
    optimizer = parts.DECAY(plain.parameters())
    model = parts.seeded(lambda: Skipping((8, 9, 8, 9)))
    engine = parts.STAGES[stage](model, parts.DECAY, find_unused=True)
    for step in range(8):
        plain.skip = model.skip = (None, 1, 1, None, 3, 0, None, 2)[step]

        def batch_of(step, who):
            return parts.vector_batch(step, who, 8, torch.float64)

        x, y = parts.whole(batch_of, step, world_size)
        F.mse_loss(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.training_step(*batch_of(step, rank), F.mse_loss)
        with torch.no_grad():  # another kind of forward in between
            engine(x)
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


def steps_of_several_kinds() -> int:
    """Training, evaluation and `no_sync` in turn, each known from before: nothing is compared any more. And a second
    engine over the same ranks makes no group of its own. Returns how many groups there are now."""
    rank = dist.get_rank()
    engine = parts.ZeRO3(parts.seeded(lambda: parts.Stack(3, 8)), parts.DECAY, prefetch=0)
    x, y = parts.vector_batch(0, rank, 8, torch.float64)
    for turn in range(2):
        with TrafficLedger() as traffic:
            engine.training_step(x, y, F.mse_loss)
            with torch.no_grad():
                engine(x)
            with engine.no_sync():
                F.mse_loss(engine(x), y).backward()
            F.mse_loss(engine(x), y).backward()
            engine.step()
            engine.zero_grad()
        whole = engine.units[0].buckets[0].flat.nbytes
        assert {c.whole_bytes for c in traffic.collectives} == {whole} or turn == 0, traffic.collectives
    return len(dist.distributed_c10d._world.pg_map)


def a_rank_that_does_not_come(stage: str, late: int) -> str:
    """One rank stays away from a step: the others say, within the timeout, which collective they waited in."""
    rank = dist.get_rank()
    group = short_group(1)
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), parts.DECAY, group=group)
    engine.training_step(*parts.token_batch(0, rank), F.cross_entropy)
    found = ""
    if rank != late:
        started = time.monotonic()
        found = message(lambda: engine.training_step(*parts.token_batch(1, rank), F.cross_entropy), RuntimeError)
        assert time.monotonic() - started < 10
    dist.barrier()
    return found


def unequal_numbers_of_batches(stage: str, longest: int) -> int:
    """`while_all_have` ends on all ranks with the shortest, in order; then the ranks go on together."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), parts.DECAY)
    own = 4 if rank == longest else 2 + rank
    shortest = min(4 if other == longest else 2 + other for other in range(world_size))
    made, steps = [], 0

    def batches():
        for number in range(own):
            made.append(number)
            yield parts.token_batch(number, rank)

    for tokens, targets in while_all_have(batches()):
        assert torch.equal(tokens, parts.token_batch(steps, rank)[0])
        engine.training_step(tokens, targets, F.cross_entropy)
        steps += 1
    assert steps == shortest and len(made) <= shortest + 1
    _, expected = parts.oracle(
        parts.seeded(parts.OddModel), parts.DECAY, F.cross_entropy, parts.token_batch, steps, world_size
    )
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)
    assert list(while_all_have([0, [], False])) == [0, [], False]  # a batch may be empty
    assert list(while_all_have([1] * (rank == 0))) == []
    alone = [dist.new_group([other]) for other in range(world_size)][rank]
    assert list(while_all_have(range(rank), alone)) == list(range(rank))
    return steps
