"""Faults in a step, freed weights, and ranks that part: clear errors, and training goes on where it can."""

import contextlib
import copy
import datetime
import io
import time
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from zerolab.engine import checkpoint
from zerolab.engine.safety import waiting
from zerolab.measure.traffic import TrafficLedger
from zerolab.properties.fixtures import (
    ADAMW,
    DECAY,
    VECTORS,
    Lanes,
    OddModel,
    Pair,
    Stack,
    a_step,
    a_step_on_vectors,
    alone,
    odd,
    own_tokens,
    seeded,
    vector_batch,
)
from zerolab.properties.loops import forked
from zerolab.properties.property import ask, ask_thorough, expect, holds, only, refused, same, stages_hold
from zerolab.properties.shared_folder import shared_folder
from zerolab.run.data import while_all_have

# Faults, and freed weights.


def trip(pair: Pair, where: str) -> None:
    """A forward and a backward of the engine, with an error in one of them or between."""

    def raises(*_):
        raise ZeroDivisionError(f"tripped in {where}")

    def hook(module, args):
        if where == "forward":
            raises()
        if where == "backward":
            args[0].register_hook(raises)

    with pair.model.blocks[1].register_forward_pre_hook(hook):
        with pair.trained.no_sync() if where == "no_sync" else contextlib.nullcontext():
            loss = pair.alone(0)
            if where in ("loss", "no_sync"):
                raises()
        loss.backward()


@stages_hold(
    "life",
    ask(more_ranks=(1, 3)),
    only("zero2", more_ranks=(1, 3), bucket_mb=0),
    ask(more_ranks=(1, 3), build=forked),
    ask_thorough(ranks=(1, 2, 3), find_unused=True),
)
def faults_reach_the_caller_and_training_goes_on(engine, build=None, **options):
    """An exception anywhere in a step reaches the caller as it is; after `zero_grad` training goes on.

    Also where buckets wait for gradients of unused parameters, which do not come.
    """
    pair = build(engine, ADAMW) if build else Pair(engine, OddModel, ADAMW, **options)
    for step, where in enumerate((None, "forward", "loss", "backward", "no_sync", "forward")):
        if where:
            with refused(f"tripped in {where}", error=ZeroDivisionError):
                trip(pair, where)
        if where == "forward":
            pair.nothing_gathered("a fault in forward")
        if where == "backward":  # before that nothing was accumulated: the next step works as it is
            # In ZeRO-1, and where each parameter has a bucket, gradients add up whatever came before, as in torch.
            if engine.like in ("zero2", "zero3") and "bucket_mb" not in options:
                with refused("backward", "engine.zero_grad()"):
                    pair.alone(0).backward()
            with TrafficLedger() as traffic:
                pair.trained.zero_grad()
            same("collectives for gradients that are dropped", len(traffic.collectives), 0)
        pair.backward(10 * step)
        pair.step()
    pair.same_weights()


# What needs no values: attributes, and methods without arguments.
ATTRIBUTES = "shape dtype device layout ndim requires_grad is_leaf grad grad_fn"
METHODS = "__len__ type size stride dim numel element_size is_contiguous is_shared is_inference"


@stages_hold("misuse", only("zero3", more_ranks=1))
def looking_at_freed_weights_is_an_error_and_no_crash(engine):
    """Every way to look at or use a freed weight says so and names the way out; what needs no values still answers."""
    trained = odd(engine)
    model, x = trained.model, torch.ones(2, 5, dtype=torch.float64)
    weight, whole = model.blocks[0].up.weight, seeded(OddModel).blocks[0].up.weight
    for moment in range(2):  # right after construction, and after a step
        for action in (
            lambda: model.state_dict(),
            lambda: copy.deepcopy(model),
            lambda: repr(weight),
            lambda: model.blocks[1].up(x),
            lambda: weight.sum(),
            lambda: weight.detach(),
            lambda: weight.data.sum(),
            lambda: weight.numpy(),
            lambda: weight.tolist(),
            lambda: weight.cpu().sum(),  # itself, as for a plain one, and freed
            lambda: weight[0],
            lambda: weight.copy_(torch.ones_like(weight)),
            lambda: torch.stack([torch.ones(7, 5, dtype=torch.float64), weight]),
            lambda: torch.save(model, io.BytesIO()),
            lambda: model.to(torch.float32),
        ):
            with refused("sharded", "full_state_dict"):
                action()
        for name in f"{ATTRIBUTES} {METHODS}".split():
            found, expected = getattr(weight, name), getattr(whole, name)
            if callable(found):
                found, expected = found(), expected()
            same(f"what a freed weight answers: {name}", found, expected)
        for of in (weight, torch.empty_like(weight, dtype=torch.float64), weight.data):
            same("shape and dtype of what is like a freed weight", (of.shape, of.dtype), (whole.shape, whole.dtype))
        assert (
            isinstance(weight, nn.Parameter) and isinstance(weight._version, int) and isinstance(weight.data_ptr(), int)
        )
        same("the bytes under a freed weight", weight.untyped_storage().nbytes(), 0)
        assert "OddBlock" in repr(model)
        a_step(trained, moment)
    OddModel().double().load_state_dict(trained.full_state_dict())


# Ranks that part: one runs other units, does not come, or has fewer batches.


@contextlib.contextmanager
def a_short_group():
    """All ranks, with a timeout of a second, so that what goes wrong there leaves other properties alone.

    In the end each waits for the others, which may still be on their way to their error.
    """
    try:
        yield dist.new_group(timeout=datetime.timedelta(seconds=1), backend="gloo")
    finally:
        dist.barrier()


@stages_hold(
    "misuse",
    only("zero3", 3),
    only("zero3", 3, evaluation=True, at_step=1, skip=3, prefetch=0),
    ask_thorough("zero3", at_step=0),
    ask_thorough("zero3", skip=3),
    ask_thorough("zero3", skip=0, prefetch=0),
)
def a_unit_that_only_some_ranks_run_is_named(engine, at_step=2, skip=1, prefetch=1, evaluation=False):
    """Where the last rank skips a unit in one step, there is an error on every rank, by the timeout at the latest.

    In an evaluation it leaves out the last unit: its next forward must not meet the others' gather.
    """
    rank, last = engine.rank, engine.size - 1
    model = seeded(lambda: Lanes((5, 6, 7, 8) if last == 2 else [8] * 4), dtype=torch.float32)
    x, _ = vector_batch(0, rank, 8)
    # A rank between the first and the last may meet it a unit later.
    unit = f" 'blocks.{skip}'" if rank in (0, last) else ""
    with a_short_group() as group:
        trained = engine(model, DECAY, group=group, find_unused=True, prefetch=prefetch)
        with refused(f"all-gather of unit{unit}"), torch.set_grad_enabled(not evaluation):
            for step in range(at_step + 1 + evaluation):
                model.skip = skip if rank == last and step >= at_step else None
                if evaluation:
                    trained(x)
                else:
                    a_step_on_vectors(trained, 0, 8)


@stages_hold("misuse", only("zero3", 3))
def a_rank_that_goes_on_after_its_own_error_is_noticed(engine):
    """The last rank alone has an error in forward, catches it and begins anew: no rank computes with mixed weights."""
    trips = engine.rank == engine.size - 1
    with a_short_group() as group:
        pair = Pair(engine, OddModel, DECAY, group=group)
        pair.step_alone()
        if trips:
            with refused("tripped in forward", error=ZeroDivisionError):
                trip(pair, "forward")
            pair.trained.zero_grad()
        with refused("next forward" if trips else "waited in vain"):
            pair.step_alone()


@stages_hold("traffic", only("zero3"))
def only_the_first_step_of_a_kind_is_compared(engine):
    """Once training, evaluation and `no_sync` are known, ranks compare no more notes; a second engine adds no group."""
    groups = []
    for _ in range(2):
        pair = Pair(engine, partial(Stack, 3, 8), DECAY, prefetch=0, **VECTORS)
        for _ in range(2):
            with TrafficLedger() as traffic:  # of the second turn in the end
                pair.step_alone()
                with torch.no_grad():
                    pair.alone()
                with pair.trained.no_sync():
                    pair.alone().backward()
                pair.step_alone()
        whole = pair.trained.units[0].buckets[0].flat.nbytes
        same("bytes of the collectives", {c.whole_bytes for c in traffic.collectives}, {whole})
        groups.append(len(dist.distributed_c10d._world.pg_map))
    same("process groups with a second engine", groups[1], groups[0])


@stages_hold("misuse")
def a_rank_that_does_not_come_is_an_error_that_names_the_collective(engine):
    """One rank stays away from a step: the others say, within the timeout, which collective they waited in."""
    rank, late = engine.rank, engine.size - 1
    first = {  # of a step
        "zero1": "all-reduce of the bucket of",
        "zero2": "reduce-scatter of the bucket of",
        "zero3": "all-gather of unit",
    }[engine.like]
    with a_short_group() as group:
        trained = odd(engine, group=group)
        a_step(trained)
        started = time.monotonic()
        if rank != late:
            with refused(f"waited in vain for the {first} '"):
                a_step(trained, 1)
        assert time.monotonic() - started < 40, "the timeout is one second"


class Heard(io.StringIO):
    """In the place of stderr: what is written is kept, and a `key` in the ranks' store says that something was."""

    key = ""

    def write(self, text: str) -> int:
        written = super().write(text)
        dist.distributed_c10d._get_default_store().set(self.key, "heard")
        return written


# (what a rank waits for that is alone, the call), of an engine and a folder with a checkpoint
CALLS = (
    ("the ", lambda trained, _: a_step(trained)),
    ("checkpoint.save()", checkpoint.save),
    ("checkpoint.async_save()", lambda trained, folder: checkpoint.async_save(trained, folder).result()),
    ("checkpoint.load()", checkpoint.load),
    ("full_state_dict()", lambda trained, _: trained.full_state_dict()),
    ("load_full_state_dict()", lambda trained, _: trained.load_full_state_dict(seeded(OddModel).state_dict())),
    ("all ranks to build the engine", lambda trained, _: type(trained)(seeded(OddModel), DECAY)),
    ("close()", lambda trained, _: trained.close()),
)


@stages_hold("misuse")
def a_rank_that_waits_long_says_for_what(engine):
    """After a while it says on stderr, once, what it waits for and who has come; when the others come, it goes on."""
    rank, size = engine.rank, engine.size
    late, trained, store = size - 1, odd(engine), dist.distributed_c10d._get_default_store()
    with shared_folder() as folder, patch.object(waiting, "NOTICE", 0.25):
        checkpoint.save(trained, folder)
        for words, call in CALLS:
            keys = [f"{words} {engine.name} {size} {other}" for other in range(size)]
            dist.barrier()
            with contextlib.redirect_stderr(Heard()) as heard:
                heard.key = keys[rank]
                if rank == late:
                    store.wait(keys[:late])  # the others have spoken
                call(trained, folder)
            said = heard.getvalue()
            same("lines that are said", said.count("\n"), int(rank != late))
            for word in (f"[rank {rank}] has waited", words, f"rank {late} has not come") if said else ():
                expect(word in said, "what a rank says that waits", word, said)
            dist.barrier()
            left = [other for other in range(size) if store.check([f"zero waits {other}"])]
            same("ranks of which the store says that they wait", left, [])
            for key in keys[:late] if rank == late else ():
                store.delete_key(key)


@holds("life", ask(ranks=3, shift=0), ask(ranks=3, shift=1))
def ranks_may_have_unequal_numbers_of_batches(engine, shift):
    """`while_all_have` ends on all ranks with the shortest, in order; then the ranks go on together."""
    rank, size = engine.rank, engine.size
    pair, made = Pair(engine, OddModel, DECAY), []

    def batches():
        for number in range(2 + (rank + shift) % size):
            made.append(number)
            yield own_tokens(number)

    for step, (tokens, _) in enumerate(while_all_have(batches())):
        same("the batch", tokens, own_tokens(step)[0])
        pair.backward(step)
        pair.step()
    same("steps", step + 1, 2)
    expect(len(made) <= 3, "batches that were made", "at most 3", len(made))
    pair.same_weights()
    same("what is yielded, also where a batch is empty", list(while_all_have([0, [], False])), [0, [], False])
    same("batches where all but one rank have none", list(while_all_have([1] * (rank == 0))), [])
    same("batches in a group of one", list(while_all_have(range(rank), alone())), list(range(rank)))
