"""Live bytes at the worst moment of forward and of backward."""

import contextlib

import torch
import torch.distributed as dist
from torch.nn import functional as F

from harness.measure.ledger import MemoryLedger
from harness.properties import parts
from harness.properties.property import expect, holds


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


def stack(reverse: bool = False):
    return parts.seeded(lambda: parts.Stack(LAYERS, WIDTH, reverse), dtype=torch.float32)


def batch(step: int = 0):
    return parts.vector_batch(step, dist.get_rank(), WIDTH)


def at_most(what: str, nbytes: float, allowed: float, step: int, means: str = "") -> None:
    found = f"{nbytes / LAYER:.2f} layers"
    expect(nbytes <= allowed, what, f"at most {allowed / LAYER:.2f} layers of {LAYER:,} bytes{means}", found, step)


@holds("bytes", engines=("zero2",), sizes=(2, 3), further_sizes=(4,), cases=({"reverse": False}, {"reverse": True}))
def zero2_has_two_buckets_of_whole_gradients_at_most(engine, reverse):
    """In backward ZeRO-2 has parameters, state, 1/N of the gradients, and at most two buckets of whole gradients."""
    with Alive() as memory:
        trained = engine(stack(reverse), parts.ADAMW, bucket_mb=LAYER / 2**20, group=parts.silent_group())
        for step in range(2):
            trained.training_step(*batch(step), F.mse_loss)
        memory.mark()
        loss = F.mse_loss(trained(batch(2)[0]), batch(2)[1])
        memory.reset_peak()
        loss.backward()
        most = memory.most
    activations = (4 + LAYERS) * 4 * WIDTH  # all of the layers' inputs, and the gradients between them
    allowed = LAYERS * LAYER / dist.get_world_size() + 2 * LAYER + activations
    what = "gradients in backward at the worst moment"
    if reverse:  # documented: every bucket waits for bucket 0, whose gradients come last
        assert most > allowed, "in the opposite order all gradients should be whole at once"
        at_most(what, most, LAYERS * LAYER + 2 * LAYER + activations, step=3)
    else:
        means = " (4Ψ/N of gradients, 2 buckets of a layer each, and activations)"
        at_most(what, most, allowed, step=3, means=means)
        assert most > allowed - activations - LAYER, "the bound is far from tight: what was measured here?"


IN_BFLOAT16 = {"options": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}}
KEPT = {"options": {"reshard_after_forward": False}}


@holds("bytes", engines=("zero3",), further_sizes=(3, 4), cases=({"options": {}}, KEPT, IN_BFLOAT16),
       further_cases=({"options": {"prefetch": 0}}, {"options": {"prefetch": 3}}))  # fmt: skip
def zero3_has_only_the_units_in_use_gathered(engine, options):
    """Gathered are the root, the unit at work and `prefetch` more; none after backward."""
    own = LAYERS * LAYER / dist.get_world_size()  # a rank's share of the parameters, or of the gradients
    noise = (16 + 2 * LAYERS) * 4 * WIDTH
    with Alive() as memory:
        trained = engine(stack(), parts.ADAMW, group=parts.silent_group(), **options)
        at_most("what is alive after the construction", memory.live, own + noise, step=0)
        for step in range(2):
            trained.training_step(*batch(step), F.mse_loss)
        # Parameters, and AdamW's two moments with a counter for each piece.
        at_most("what is alive between steps", memory.live, 3 * own + 4 * 2 * LAYERS + noise, step=5)
        memory.mark()
        loss = F.mse_loss(trained(batch(2)[0]), batch(2)[1])
        in_forward, after_forward = memory.most, memory.more
        memory.reset_peak()
        loss.backward()
        in_backward, after_backward = memory.most, memory.more
    if "reshard_after_forward" not in options:
        units = 1 + min(options.get("prefetch", 1), LAYERS - 1)
        # In bfloat16 they are half as large, and two rounded shards may be on their way.
        unit, sent = (LAYER / 2, LAYER / dist.get_world_size()) if "param_dtype" in options else (LAYER, 0)
        at_most("units gathered in forward", in_forward, units * unit + sent + noise, step=1)
        assert in_forward >= units * unit, "fewer units than promised were gathered: is prefetching on?"
        at_most("units gathered after forward", after_forward, noise, step=1)
        # Backward adds the gradients' shards, and at most two units of whole gradients.
        means = f" (4Ψ/N of gradients, {units} units' parameters and 2 units' gradients, and activations)"
        what = "bytes alive at backward's worst moment"
        at_most(what, in_backward, (units + 2) * LAYER + own + noise, step=2, means=means)
    else:
        at_most("units that are kept for backward", after_forward, LAYERS * LAYER + noise, step=1)
        assert after_forward >= LAYERS * LAYER, "units were freed after forward, and should not have been"
    at_most("units and gradients after backward", after_backward, own + noise, step=2)


class ByKeyword(parts.Stack):
    def forward(self, x):
        for layer in self.layers:
            x = layer(input=x)
        return x


@holds("bytes", engines=("zero3",), cases=({"frozen": 11}, {"frozen": 11, "kind": ByKeyword}, {"no_sync": True}))
def zero3_frees_units_in_backward(engine, kind=parts.Stack, frozen=0, no_sync=False):
    """A frozen unit has no gradient that tells when to free it, and is freed in time all the same.

    Under `no_sync()` gradients stay whole, as documented; parameters are freed.
    """
    model = parts.seeded(lambda: kind(LAYERS, WIDTH), dtype=torch.float32)
    for layer in model.layers[LAYERS - frozen :]:
        layer.requires_grad_(False)
    trained = engine(model, parts.ADAMW, group=parts.silent_group())
    inputs, targets = batch(2)
    with Alive() as memory, trained.no_sync() if no_sync else contextlib.nullcontext():
        loss = F.mse_loss(trained(inputs), targets)
        memory.mark()
        loss.backward()
    allowed = LAYERS * LAYER + 2.5 * LAYER if no_sync else 4 * LAYER
    at_most("units gathered in backward, and gradients", memory.most, allowed, step=2)


@holds("bytes", engines=("zero3",), cases=({"evaluation": True}, {"evaluation": False}))
def zero3_gathers_little_where_it_cannot_know(engine, evaluation):
    """Few units are gathered where no backward will come, although `reshard_after_forward=False` keeps them for it.

    Nor are many where a forward takes another order than the last, by which they are gathered ahead.
    """
    trained = engine(stack(), parts.ADAMW, group=parts.silent_group(), reshard_after_forward=not evaluation)
    if not evaluation:
        trained.training_step(*batch(), F.mse_loss)
        trained.model.reverse = True
    with MemoryLedger() as memory, torch.set_grad_enabled(not evaluation):
        trained(batch()[0])
    allowed = 2 * LAYER + 16 * 4 * WIDTH if evaluation else 3.5 * LAYER
    at_most("units gathered in forward", memory.peak, allowed, step=1)
