"""A step computes what plain PyTorch, DDP and FSDP2 compute on the whole batch, and an engine what its chapter does."""

import contextlib
import itertools
import warnings
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from zerolab.measure.ledger import MemoryLedger
from zerolab.measure.watched_step import watched_step
from zerolab.properties.fixtures import (
    ADAMW,
    LOW,
    OPTIMIZERS,
    Lanes,
    Pair,
    TiedAcross,
    byte_batch,
    gpt,
    in_float64,
    of_all_ranks,
    pieces_of,
    seeded,
    silent_group,
    started_by,
    three_groups,
    token_batch,
    vector_batch,
)
from zerolab.properties.property import (
    CHAPTERS,
    STAGES,
    ask,
    ask_each,
    ask_thorough,
    chapter_of,
    holds,
    only,
    same,
    stages_hold,
    subject,
)
from zerolab.run.model import next_token_loss

LAYOUTS = {  # one bucket per parameter, or small ones; units of several kinds
    ("zero1", "zero2"): ({"bucket_mb": 0}, {"bucket_mb": 0.0003}),
    "zero3": (
        {"prefetch": 0},
        {"prefetch": 5},
        {"reshard_after_forward": False},
        {"units": []},
        {"units": "the whole model"},
    ),
}


def laid_out(asks, *ranks, **more) -> list:
    """The ways in which a stage can be laid out."""
    found = []
    for stages, ways in LAYOUTS.items():
        found += [asks(stages, ranks, **way, **more) for way in ways]
    return found


FURTHER = {"more_ranks": (1, 2, 4)}


@holds(
    "values",
    ask(STAGES, 3, chapters=STAGES, **FURTHER),
    *laid_out(only, 3, **FURTHER),
    *ask_each("optimizer", OPTIMIZERS, "zero2", 3, chapters="zero3", **FURTHER),
)
def equals_one_process_on_the_whole_batch(engine, optimizer="adamw", **options):
    """Losses and weights equal those of one process on the whole batch, from rank 0's start, under any optimizer."""
    # Rank 0 has the right start, and every other rank something else, where the engine is to mend that.
    own = started_by(engine.rank if engine.broadcasts else 0)
    pair = Pair(engine, (started_by(0), own), OPTIMIZERS[optimizer], **options)
    for step in range(4):
        expected = torch.stack(pair.step_of_plain(step))
        found = pair.trained.training_step(*pair.own_batch(step), in_float64)
        assert not found.requires_grad, "the loss that training_step returns is not detached"
        # All are compared on every rank: where one is wrong, no rank waits for another that has left.
        losses = of_all_ranks(found)
        same(f"the ranks' losses of step {step}", losses, expected, pair.atol)
        pair.nothing_gathered("the step")
    pair.same_weights()
    assert len(losses.unique()) == pair.size, "the ranks had the same data: this proves nothing"


def trained_on_bytes(engine, dtype, device, micro_batches, **options) -> tuple[torch.Tensor, dict]:
    """The losses of a GPT in four steps, and its weights then."""
    trained = engine(gpt(dtype, device), partial(torch.optim.AdamW, lr=1e-2, fused=device != "cpu"), **options)
    losses = []
    for step in range(4 * micro_batches):
        last = step % micro_batches == micro_batches - 1
        tokens, targets = byte_batch(step, engine.rank, device)
        with contextlib.nullcontext() if last else trained.no_sync():
            outputs = trained(tokens)
            same("the dtype of what the model computes", outputs.dtype, options["param_dtype"] or dtype)
            losses.append(next_token_loss(outputs, targets) / micro_batches)
            losses[-1].backward()
        if last:
            trained.step()
            trained.zero_grad()
    return torch.stack(losses), trained.full_state_dict()


@holds(
    "values",
    ask(chapters=STAGES),
    ask("zero1", **LOW, micro_batches=3),
    ask(("zero2", "zero3"), param_dtype=torch.bfloat16),
    *laid_out(ask_thorough, 2),
    ask_thorough(**LOW),
    ask_thorough(reduce_dtype=torch.bfloat16),
)
def equals_ddp_and_fsdp2(engine, device="cpu", micro_batches=1, param_dtype=None, reduce_dtype=None, **options):
    """A GPT's losses and weights equal DDP's and FSDP2's, also in mixed precision, and with sums under `no_sync`.

    To the bit on two ranks, in float32: they add the same two numbers, a + b or b + a, and the half of a sum is exact.
    With more ranks the order of a sum is the library's: then in float64, where three bfloat16 numbers add up exactly in
    any order, unless one is a million million times another, and equal to 1e-10.
    """
    exact = engine.size <= 2
    own, atol = (torch.float32, 0.0) if exact else (torch.float64, 1e-10)
    mixed = param_dtype is not None or reduce_dtype is not None
    of_all = {"param_dtype": param_dtype, "reduce_dtype": own if mixed and not exact else reduce_dtype}
    losses, state = trained_on_bytes(engine, own, device, micro_batches, **of_all, **options)
    # The weights that the optimizer updates, not the low-precision ones that compute.
    same("the dtypes of the weights", {value.dtype for value in state.values()}, {own})
    for name in ("fsdp2",) if mixed else ("ddp", "fsdp2"):  # DDP has no such options
        expected = trained_on_bytes(subject(name), own, device, micro_batches, **of_all)
        same(f"the losses, beside {name}'s", losses, expected[0], atol)
        same(f"the weights, beside {name}'s", state, expected[1], atol)


def by_keyword(model, x, y):
    return in_float64(model(tokens=x), y)


@holds(
    "values",
    ask(more_ranks=(1, 3)),
    ask(more_ranks=(1, 3), named=True),
    *laid_out(ask_thorough, 1, 2, 3),
)
def a_loop_of_ones_own_trains_alike(engine, named=False, **options):
    """Parameter groups, a scheduler, keyword arguments, and evaluations between two steps act as in plain PyTorch."""
    pair = Pair(engine, groups=partial(three_groups, named=named), loss=by_keyword, **options)
    same("groups of the engine's optimizer", len(pair.trained.optimizer.param_groups), 3)
    # It changes the rate and the momentum of each group, and warns if it does not see the optimizer's steps.
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2, 0.05], total_steps=9) for _, optimizer in pair.both
    ]
    for step in range(5):
        tokens, _ = token_batch(step, pair.rank)
        pair.backward(step)
        pair.trained(tokens)  # a forward without backward, right before the weights change: nothing may survive it
        pair.step()
        with warnings.catch_warnings(action="error"):
            for schedule in schedules:
                schedule.step()
        same("the rates", schedules[1].get_last_lr(), schedules[0].get_last_lr())
        with torch.no_grad():
            first = pair.trained(tokens)
        pair.model.eval()
        # The same weights, and the same operations on them.
        same("an evaluation", pair.trained(tokens).detach(), first)
        pair.model.train()
    pair.same_weights()


# The chapters and the engines that build on them.

# {name: (model, its batch in a step on a rank, the loss)}. The MLP's units, and its buckets, have different sizes.
MODELS = {
    "gpt": (gpt, byte_batch, next_token_loss),
    "mlp": (lambda: Lanes((8, 16, 24, 32)), partial(vector_batch, width=8), nn.functional.mse_loss),
    "tied": (TiedAcross, token_batch, in_float64),
}


class Events:
    """Collectives and waits as they come, each with the bytes that live then if there is a ledger of them."""

    def __init__(self, memory: MemoryLedger | None):
        self.memory, self.found = memory, []

    def note(self, what):
        self.found.append((what, self.memory and self.memory.live))

    def begins(self, step, depth):
        """Nothing that counts: a unit without parameters has its steps, too."""

    ends = begins

    def sends(self, collective, depth):
        self.note(collective)

    def waits(self):
        """Around what waits."""
        plain = dist.Work.wait

        def wait(work, *timeout):
            self.note("wait")
            return plain(work, *timeout)

        return mock.patch.object(dist.Work, "wait", wait)


EVENTS = "collectives, waits, and the bytes that live then"


def watched(build, model: str, silent: bool, **options) -> dict:
    """Three steps of what `build` puts around the model: what happened in the last one, in its order.

    `silent`: the bytes of what it keeps alive itself, and no values.
    """
    make, batch, loss_fn = MODELS[model]
    module, rank = seeded(make, dtype=torch.float32), dist.get_rank()
    group, gradients = silent_group() if silent else None, []

    def copy_gradients(*_):
        gradients.extend(piece.grad.clone() for piece in pieces_of(engine))

    with MemoryLedger() as memory:
        events = Events(memory if silent else None)
        engine = build(module, ADAMW, group=group, **options)
        for step in range(2):  # AdamW makes its state in the first
            engine.training_step(*batch(step, rank), loss_fn)
        if not silent:
            engine.optimizer.register_step_pre_hook(copy_gradients)
        with watched_step(engine, memory, story=events) as seen, events.waits():
            loss = engine.training_step(*batch(2, rank), loss_fn)
    if silent:
        return {EVENTS: events.found, "bytes held before the update": seen.held, "the peak of a step": seen.peak}
    state = engine.full_state_dict()
    return {
        EVENTS: events.found,
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
