"""Live bytes at the worst moment of forward and of backward."""

import contextlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.measure.ledger import MemoryLedger
from harness.properties.fixtures import ADAMW, Stack, seeded, silent_group, vector_batch
from harness.properties.property import ask, ask_each, ask_thorough, expect, holds


class Alive(MemoryLedger):
    """Bytes that are alive; after `mark()` also how many `more` there are than then, and the `most` meanwhile."""

    def mark(self) -> None:
        self.before = self.live
        self.reset_peak()

    @property
    def more(self) -> int:
        return self.live - self.before

    @property
    def most(self) -> int:
        return self.peak - self.before


LAYERS, WIDTH = 12, 64
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of one layer of a `Stack`
NOISE = (16 + 2 * LAYERS) * 4 * WIDTH  # activations, and what else is small


def stack(reverse: bool = False, kind=Stack):
    return seeded(lambda: kind(LAYERS, WIDTH, reverse), dtype=torch.float32)


def batch(step: int = 0):
    return vector_batch(step, dist.get_rank(), WIDTH)


def at_most(what: str, nbytes: float, allowed: float, means: str = "") -> None:
    found = f"{nbytes / LAYER:.2f} layers"
    expect(nbytes <= allowed, what, f"at most {allowed / LAYER:.2f} layers of {LAYER:,} bytes{means}", found)


def peaks_of(engine, model, train=True, turn=False, no_sync=False, **options) -> SimpleNamespace:
    """Bytes alive around a step behind two others: in all when the engine is `built`, and `between` two steps; then
    how many more than that forward and backward have at the worst moment, and when they are over, `kept` and `left`.

    The step may `turn`, and go through the model the other way; or be no step to `train` in, but forward alone.
    """
    with Alive() as memory:
        trained = engine(model, ADAMW, group=silent_group(), **options)
        found = SimpleNamespace(built=memory.live)
        for step in range(2):
            trained.training_step(*batch(step), F.mse_loss)
        model.reverse ^= turn
        memory.mark()
        found.between = memory.live
        with torch.set_grad_enabled(train), trained.no_sync() if no_sync else contextlib.nullcontext():
            loss = F.mse_loss(trained(batch(2)[0]), batch(2)[1])
            found.forward, found.kept = memory.most, memory.more
            memory.reset_peak()
            if train:
                loss.backward()
        found.backward, found.left = memory.most, memory.more
    return found


@holds(
    "bytes",
    *ask_each("reverse", (False, True), "zero2", more_ranks=(3, 4), chapters="zero2"),
    of_stages=True,
)
def zero2_has_two_buckets_of_whole_gradients_at_most(engine, reverse):
    """In backward ZeRO-2 has parameters, state, 1/N of the gradients, and at most two buckets of whole gradients."""
    most = peaks_of(engine, stack(reverse), bucket_mb=LAYER / 2**20).backward
    activations = (4 + LAYERS) * 4 * WIDTH  # all of the layers' inputs, and the gradients between them
    allowed = LAYERS * LAYER / dist.get_world_size() + 2 * LAYER + activations
    what = "gradients in backward at the worst moment"
    if reverse:  # documented: every bucket waits for bucket 0, whose gradients come last
        assert most > allowed, "in the opposite order all gradients should be whole at once"
        at_most(what, most, LAYERS * LAYER + 2 * LAYER + activations)
    else:
        means = " (4Ψ/N of gradients, 2 buckets of a layer each: receive the one before first; and activations)"
        at_most(what, most, allowed, means=means)
        assert most > allowed - activations - LAYER, "the bound is far from tight: what was measured here?"


@holds(
    "bytes",
    ask("zero3", more_ranks=(3, 4), chapters="zero3"),
    ask("zero3", more_ranks=(3, 4), reshard_after_forward=False),
    ask("zero3", more_ranks=(3, 4), param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ask_thorough("zero3", (2, 3, 4), prefetch=0),
    ask_thorough("zero3", (2, 3, 4), prefetch=3),
    of_stages=True,
)
def zero3_has_only_the_units_in_use_gathered(engine, **options):
    """Gathered are the root, the unit at work and `prefetch` more; none after backward."""
    own = LAYERS * LAYER / dist.get_world_size()  # a rank's share of the parameters, or of the gradients
    found = peaks_of(engine, stack(), **options)
    at_most("what is alive after the construction", found.built, own + NOISE)
    # Parameters, and AdamW's two moments with a counter for each piece.
    at_most("what is alive between steps", found.between, 3 * own + 4 * 2 * LAYERS + NOISE)
    if "reshard_after_forward" not in options:
        units = 1 + min(options.get("prefetch", 1), LAYERS - 1)
        # In bfloat16 they are half as large, and two rounded shards may be on their way.
        unit, sent = (LAYER / 2, LAYER / dist.get_world_size()) if "param_dtype" in options else (LAYER, 0)
        at_most("units gathered in forward", found.forward, units * unit + sent + NOISE)
        assert found.forward >= units * unit, "fewer units than promised were gathered: is prefetching on?"
        at_most("units gathered after forward", found.kept, NOISE)
        # Backward adds the gradients' shards, and at most two units of whole gradients.
        means = f" (4Ψ/N of gradients, {units} units' parameters and 2 units' gradients, and activations)"
        what = "bytes alive at backward's worst moment"
        at_most(what, found.backward, (units + 2) * LAYER + own + NOISE, means=means)
    else:
        at_most("units that are kept for backward", found.kept, LAYERS * LAYER + NOISE)
        assert found.kept >= LAYERS * LAYER, "units were freed after forward, and should not have been"
    at_most("units and gradients after backward", found.left, own + NOISE)


class ByKeyword(Stack):
    def forward(self, x):
        for layer in self.layers:
            x = layer(input=x)
        return x


class Idle(Stack):
    """Each unit has a weight that is never used: with `find_unused` no unit is ever complete."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        for layer in self.layers:
            layer.idle = nn.Parameter(torch.ones(1))


@holds(
    "bytes",
    ask("zero3", frozen=11),
    ask("zero3", frozen=11, kind=ByKeyword),
    ask("zero3", no_sync=True),
    ask("zero3", kind=Idle, find_unused=True),
    of_stages=True,
)
def zero3_frees_units_in_backward(engine, kind=Stack, frozen=0, **options):
    """A unit without a gradient that tells when to free it, as it is frozen or unused in part, is freed in time.

    Under `no_sync()` gradients stay whole, as documented; parameters are freed.
    """
    model = stack(kind=kind)
    for layer in model.layers[LAYERS - frozen :]:
        layer.requires_grad_(False)
    gradients = (LAYERS - frozen) * LAYER / (1 if "no_sync" in options else dist.get_world_size())
    allowed = gradients + (2 if "no_sync" in options else 3 + ("find_unused" in options)) * LAYER + NOISE
    most = peaks_of(engine, model, **options).backward
    at_most("units gathered in backward, and gradients", most, allowed)


@holds(
    "bytes",
    ask("zero3", reshard_after_forward=False, train=False),
    ask("zero3", turn=True),
    of_stages=True,
)
def zero3_gathers_little_where_it_cannot_know(engine, **options):
    """Few units are gathered where no backward will come, although `reshard_after_forward=False` keeps them for it.

    Nor are many where a forward takes another order than the last, by which they are gathered ahead.
    """
    most = peaks_of(engine, stack(), **options).forward
    allowed = 3 if "turn" in options else 2
    at_most("units gathered in forward", most, allowed * LAYER + NOISE)
