"""Ranks that part: one runs other units, does not come, or has fewer batches. Every rank learns where."""

import datetime
import io
import sys
import time
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn import functional as F

from harness.engine import checkpoint
from harness.engine.safety import waiting
from harness.measure.traffic import TrafficLedger
from harness.properties.fixtures import DECAY, Lanes, OddModel, Stack, odd, own_tokens, seeded, vector_batch
from harness.properties.property import ask, ask_thorough, expect, holds, refused, same
from harness.properties.training import Pair
from harness.run.data import while_all_have
from harness.run.shared_folder import shared_folder


def short_group():
    """All ranks, with a timeout of a second, so that what goes wrong there leaves other properties alone."""
    return dist.new_group(timeout=datetime.timedelta(seconds=1), backend="gloo")


@holds(
    "misuse",
    ask("zero3", 3, more_ranks=2),
    ask("zero3", 3, more_ranks=2, evaluation=True, prefetch=0),
    ask_thorough("zero3", at_step=0),
    ask_thorough("zero3", skip=3),
    ask_thorough("zero3", skip=0, prefetch=0),
    of_stages=True,
)
def a_unit_that_only_some_ranks_run_is_named(engine, at_step=2, skip=1, prefetch=1, evaluation=False):
    """Where the last rank skips a unit in one step, there is an error on every rank, by the timeout at the latest.

    In an evaluation it leaves out the last unit: its next forward must not meet the others' gather.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model = seeded(lambda: Lanes((5, 6, 7, 8) if last == 2 else [8] * 4), dtype=torch.float32)
    trained = engine(model, DECAY, group=short_group(), find_unused=True, prefetch=prefetch)
    x, y = vector_batch(0, rank, 8)

    def evaluate():
        with torch.no_grad():
            trained(x)
            model.skip = 3 if rank == last else None
            trained(x)
            trained(x)

    def train():
        for step in range(at_step + 1):
            model.skip = skip if rank == last and step == at_step else None
            trained.training_step(x, y, F.mse_loss)

    # A rank between the first and the last may meet it a unit later.
    unit = f" 'blocks.{3 if evaluation else skip}'" if rank in (0, last) else ""
    try:
        refused(evaluate if evaluation else train, f"all-gather of unit{unit}", error=RuntimeError)
    finally:
        dist.barrier()  # the others may still be on their way to their error


@holds("misuse", ask("zero3", 3, more_ranks=2), of_stages=True)
def a_rank_that_goes_on_after_its_own_error_is_noticed(engine):
    """The last rank alone has an error in forward, catches it and begins anew: no rank computes with mixed weights."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model = seeded(lambda: Lanes([8] * 4), dtype=torch.float32)
    trained = engine(model, DECAY, group=short_group())
    x, y = vector_batch(0, rank, 8)

    def trips(module, args):
        raise ZeroDivisionError("tripped")

    def train():
        trained.training_step(x, y, F.mse_loss)
        if rank == last:
            hook = model.blocks[2].register_forward_pre_hook(trips)
            refused(lambda: trained(x), "tripped", error=ZeroDivisionError)
            hook.remove()
            trained.zero_grad()
        trained.training_step(x, y, F.mse_loss)

    try:
        refused(train, "next forward" if rank == last else "waited in vain", error=RuntimeError)
    finally:
        dist.barrier()


@holds("traffic", ask("zero3"), of_stages=True)
def only_the_first_step_of_a_kind_is_compared(engine):
    """Once training, evaluation and `no_sync` are known, ranks compare no more notes; a second engine adds no group."""
    x, y = vector_batch(0, dist.get_rank(), 8, torch.float64)
    groups = []
    for _ in range(2):
        trained = engine(seeded(lambda: Stack(3, 8)), DECAY, prefetch=0)
        for _ in range(2):
            with TrafficLedger() as traffic:  # of the second turn in the end
                trained.training_step(x, y, F.mse_loss)
                with torch.no_grad():
                    trained(x)
                with trained.no_sync():
                    F.mse_loss(trained(x), y).backward()
                trained.training_step(x, y, F.mse_loss)
        whole = trained.units[0].buckets[0].flat.nbytes
        same("bytes of the collectives", {c.whole_bytes for c in traffic.collectives}, {whole})
        groups.append(len(dist.distributed_c10d._world.pg_map))
    same("process groups with a second engine", groups[1], groups[0])


@holds("misuse", of_stages=True)
def a_rank_that_does_not_come_is_an_error_that_names_the_collective(engine):
    """One rank stays away from a step: the others say, within the timeout, which collective they waited in."""
    rank, late = dist.get_rank(), dist.get_world_size() - 1
    trained = odd(engine, group=short_group())
    trained.training_step(*own_tokens(0), F.cross_entropy)
    where = {
        "zero1": "all-reduce of the bucket of",
        "zero2": "reduce-scatter of the bucket of",
        "zero3": "all-gather of unit",
    }
    try:
        if rank != late:
            started = time.monotonic()
            refused(lambda: trained.training_step(*own_tokens(1), F.cross_entropy),
                    f"waited in vain for the {where[engine.like]} '", error=RuntimeError)  # fmt: skip
            seconds = time.monotonic() - started
            expect(seconds < 40, "seconds until the error", "about the timeout's one", seconds)
    finally:
        dist.barrier()


class Heard(io.StringIO):
    """In the place of stderr: what is written is kept, and a key in the ranks' store says that something was."""

    def __init__(self, key: str):
        super().__init__()
        self.key = key

    def write(self, text: str) -> int:
        written = super().write(text)
        dist.distributed_c10d._get_default_store().set(self.key, "heard")
        return written


def a_step(trained, folder):
    trained.training_step(*own_tokens(0), F.cross_entropy)


def a_save(trained, folder):
    checkpoint.save(trained, folder)


def a_save_in_the_background(trained, folder):
    checkpoint.async_save(trained, folder).result()


def a_load(trained, folder):
    checkpoint.load(trained, folder)


def the_whole_state(trained, folder):
    trained.full_state_dict()


def a_whole_state_to_load(trained, folder):
    trained.load_full_state_dict(seeded(OddModel).state_dict())


def another_engine(trained, folder):
    type(trained)(seeded(OddModel), DECAY)


def the_end(trained, folder):
    trained.close()


CALLS = {  # what a rank does that is alone, and what it waits for
    a_step: "the ",
    a_save: "checkpoint.save()",
    a_save_in_the_background: "checkpoint.async_save()",
    a_load: "checkpoint.load()",
    the_whole_state: "full_state_dict()",
    a_whole_state_to_load: "load_full_state_dict()",
    another_engine: "all ranks to build the engine",
    the_end: "close()",
}


@holds("misuse", ask(more_ranks=3), of_stages=True)
def a_rank_that_waits_long_says_for_what(engine):
    """After a while it says on stderr, once, what it waits for and who has come; when the others come, it goes on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    late, trained, store = size - 1, odd(engine), dist.distributed_c10d._get_default_store()
    with shared_folder() as folder, patch.object(waiting, "NOTICE", 0.4):
        checkpoint.save(trained, folder)
        for call, words in CALLS.items():
            keys = [f"{call.__name__} {engine.name} {size} {other}" for other in range(size)]
            dist.barrier()
            if rank == late:
                store.wait(keys[:late])  # the others have spoken
                call(trained, folder)
                same("what is said by who comes last", [key for key in keys[late:] if store.check([key])], [])
            else:
                with patch.object(sys, "stderr", Heard(keys[rank])) as heard:
                    call(trained, folder)
                said = heard.getvalue()
                same("lines that are said", said.count("\n"), 1)
                for word in (f"[rank {rank}] has waited", words, f"rank {late} has not come"):
                    expect(word in said, "what a rank says that waits", word, said)
            dist.barrier()
            left = [other for other in range(size) if store.check([f"zero waits {other}"])]
            same("ranks of which the store says that they wait", left, [])
            for key in keys[:late] if rank == late else ():
                store.delete_key(key)


@holds("life", ask(ranks=3, more_ranks=2, longest=0), ask(ranks=3, more_ranks=2, longest=1))
def ranks_may_have_unequal_numbers_of_batches(engine, longest):
    """`while_all_have` ends on all ranks with the shortest, in order; then the ranks go on together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shortest = min(4 if other == longest else 2 + other for other in range(size))
    pair, made = Pair(engine, OddModel, DECAY), []

    def batches():
        for number in range(4 if rank == longest else 2 + rank):
            made.append(number)
            yield own_tokens(number)

    steps = 0
    for tokens, _ in while_all_have(batches()):
        same("the batch", tokens, own_tokens(steps)[0])
        pair.backward(steps)
        pair.step()
        steps += 1
    same("steps", steps, shortest)
    expect(len(made) <= shortest + 1, "batches that were made", f"at most {shortest + 1}", len(made))
    pair.same_weights()
    same("what is yielded, also where a batch is empty", list(while_all_have([0, [], False])), [0, [], False])
    same("batches where all but one rank have none", list(while_all_have([1] * (rank == 0))), [])
    alone = [dist.new_group([other]) for other in range(size)][rank]
    same("batches in a group of one", list(while_all_have(range(rank), alone)), list(range(rank)))
