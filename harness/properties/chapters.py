"""The chapters and the engines that build on them."""

import contextlib
import itertools
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from harness.measure.ledger import MemoryLedger
from harness.measure.watched_step import watched_step
from harness.properties.chapter_subjects import CHAPTERS, chapter_of
from harness.properties.fixtures import (
    ADAMW,
    Lanes,
    TiedAcross,
    byte_batch,
    gpt,
    pieces_of,
    seeded,
    silent_group,
    token_batch,
    vector_batch,
)
from harness.properties.property import ask, ask_each, ask_thorough, only, same, stages_hold
from harness.run.model import next_token_loss

STEPS = 3  # the last one is watched: AdamW makes its state in the first


# {name: (model, its batch in a step on a rank, the loss)}. The MLP's units, and its buckets, have different sizes.
MODELS = {
    "gpt": (gpt, byte_batch, next_token_loss),
    "mlp": (lambda: Lanes((8, 16, 24, 32)), lambda *which: vector_batch(*which, width=8), nn.functional.mse_loss),
    "tied": (TiedAcross, token_batch, nn.functional.cross_entropy),
}


@contextlib.contextmanager
def waits_noted(note):
    """`note()` is called before this rank waits for a collective."""
    plain = dist.Work.wait

    def wait(work, *timeout):
        note()
        return plain(work, *timeout)

    with mock.patch.object(dist.Work, "wait", wait):
        yield


EVENTS = "collectives, waits, and the bytes that live then"


def watched(build, model: str, silent: bool, **options) -> dict:
    """Three steps of what `build` puts around the model: what happened in the last one, in its order.

    `silent`: the bytes of what it keeps alive itself, and no values.
    """
    make, batch, loss_fn = MODELS[model]
    module, rank = seeded(make, dtype=torch.float32), dist.get_rank()
    group, gradients, events = silent_group() if silent else None, [], []

    def note(what="wait", depth=0, collective=None):
        if what == "wait" or collective is not None:  # and no label alone: a unit without parameters has one, too
            events.append((collective or what, memory.live if silent else None))

    def copy_gradients(*_):
        gradients.extend(piece.grad.clone() for piece in pieces_of(engine))

    with MemoryLedger() as memory:
        engine = build(module, ADAMW, group=group, **options)
        for step in range(STEPS - 1):
            engine.training_step(*batch(step, rank), loss_fn)
        if not silent:
            engine.optimizer.register_step_pre_hook(copy_gradients)
        with watched_step(engine, memory, on_event=note) as seen, waits_noted(note):
            loss = engine.training_step(*batch(STEPS - 1, rank), loss_fn)
    if silent:
        return {EVENTS: events, "bytes held before the update": seen.held, "the peak of a step": seen.peak}
    state = engine.full_state_dict()
    return {
        EVENTS: events,
        "the loss": loss,
        "gradients before the update": dict(enumerate(gradients)),
        "weights": state,
    }


@stages_hold(
    "traffic",
    only("zero3", (1, 2, 3, 4), model="mlp"),
    only(("zero1", "zero2"), (1, 2, 3, 4), model="mlp", bucket_mb=0.001),  # nine buckets
    ask(model="gpt", more_ranks=(1, 3, 4)),
    ask(ranks=3, model="tied", more_ranks=(1, 2, 4)),
    *ask_each("prefetch", (0, 2), "zero3", asks=only, model="mlp"),
    ask_thorough(("zero1", "zero2"), model="gpt", bucket_mb=0),
)
def an_engine_does_what_its_chapter_does(engine, model, **options):
    """Without options of its own an engine sends, holds and computes what its chapter does, to the bit.

    That is in models whose forward runs the units in the order in which they are declared. In others an engine
    remembers the order of the last forward and prefetches by that; a chapter does not.

    Once with all ranks: collectives and waits come in the same order, and values are equal to the bit, as both hand
    the same numbers to the same operations. And once where collectives move nothing and keep nothing alive: there the
    same bytes live at each of these moments.
    """
    for silent in (False, True):
        chapter = watched(CHAPTERS[chapter_of(engine.like)], model, silent, **options)
        found = watched(engine, model, silent, **options)
        for number, pair in enumerate(itertools.zip_longest(found.pop(EVENTS), chapter.pop(EVENTS))):
            same(f"event {number} of {EVENTS}", *pair)
        for what, expected in chapter.items():
            same(what, found[what], expected)
