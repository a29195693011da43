"""What an engine holds and sends, to the byte, against arithmetic done here; and live bytes at the worst moment."""

import contextlib
import math
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from zerolab.measure.held import held_bytes, storage_bytes
from zerolab.measure.ledger import MemoryLedger
from zerolab.measure.traffic import TrafficLedger
from zerolab.measure.watched_step import watched_step
from zerolab.properties.fixtures import (
    ADAMW,
    LOW,
    VECTORS,
    Lanes,
    OddModel,
    Pair,
    Stack,
    a_step_on_vectors,
    grid,
    in_float64,
    of_all_ranks,
    of_output,
    of_vectors,
    seeded,
    silent_group,
    stack,
    token_batch,
    vector_batch,
)
from zerolab.properties.property import (
    STAGES,
    NotApplicable,
    Subject,
    ask,
    ask_each,
    ask_thorough,
    expect,
    holds,
    only,
    same,
    stages_hold,
)
from zerolab.run import engines

# How parameters lie in their buffers: aligned, padded, each element owned once.


def padded(sizes, world_size: int, align: int = 4) -> tuple[int, int]:
    """(elements of the buffer, elements of a shard) of these sizes; each starts on a multiple of `align`."""
    end = sum(math.ceil(size / align) * align for size in sizes)
    shard = math.ceil(end / (world_size * align)) * align
    return shard * world_size, shard


def owned(sizes, rank: int, world_size: int, align: int = 4) -> list[int]:
    """How many elements of each parameter lie in this rank's shard; only those with any."""
    _, shard = padded(sizes, world_size, align)
    found, offset = [], 0
    for size in sizes:
        overlap = min(offset + size, (rank + 1) * shard) - max(offset, rank * shard)
        if overlap > 0:
            found.append(overlap)
        offset += math.ceil(size / align) * align
    return found


def sizes_by_bucket(model: OddModel, stage: str) -> list[list[int]]:
    """The layout of what is trained, worked out anew: one bucket in reverse order for ZeRO-1 and -2, units and root."""

    def sizes(*modules):
        return [param.numel() for param in nn.ModuleList(modules).parameters() if param.requires_grad]

    if stage != "zero3":
        return [sizes(model)[::-1]]
    return [*map(sizes, model.blocks), sizes(model.embedding, model.head)]


# What our stages hold and send.


@stages_hold(
    "bytes",
    ask(more_ranks=(1, 3, 4), chapters=STAGES),
    ask(more_ranks=(1, 3, 4), **LOW),
)
def held_bytes_equal_the_theory(engine, device="cpu", **options):
    """Right before the update a rank holds what the theory says, to the byte, and nothing else is alive.

    In mixed precision no float32 weights stay besides the shards.
    """
    stage, low = engine.like, "param_dtype" in options
    rank, world_size = engine.rank, engine.size
    model = seeded(OddModel, dtype=torch.float32, device=device)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    trainable = sizes_by_bucket(model, stage)
    tokens, targets = (part.to(device) for part in token_batch(0, rank))
    outside, held = [model.shift, tokens, targets], {}
    with MemoryLedger() as memory:
        for tensor in (*outside, *model.parameters()):
            memory.track(tensor)
        trained = engine(model, ADAMW, group=silent_group(), **options)
        trained.training_step(tokens, targets, in_float64)
        loss = of_output(trained, tokens, targets)
        loss.backward()
        trained.optimizer.register_step_pre_hook(lambda *_: held.update(held_bytes(trained), live=memory.live))
        trained.step()
    # (elements of the whole buffer, of a shard): all parameters, and those that are trained.
    # Parameters and shards start on multiples of so many bytes, here in elements of the smallest dtype.
    align = (16 if device == "cpu" else 256) // (2 if low else 4)
    lengths = [padded(sizes, world_size, align) for sizes in trainable]
    whole, shard = (sum(each) for each in zip(*lengths))
    # A chapter leaves what is frozen as it is.
    frozen_whole, frozen_shard = (frozen, frozen) if engine.chapter else padded([frozen], world_size, align)
    pieces = []
    for sizes in trainable:
        pieces += owned(sizes, rank, world_size, align)
    in_use = 0 if stage == "zero3" else (2 if low else 4) * (whole + frozen_whole)
    expected = {
        # A shard in float32 is a part of the weights in use, where those are float32 and whole.
        "parameters": in_use + (4 * (shard + frozen_shard) if low or stage == "zero3" else 0),
        "gradients": 4 * (whole if stage == "zero1" else shard),
        # AdamW: two moments per element and a 4-byte counter per piece; padding has no state
        "optimizer": 8 * sum(pieces) + 4 * len(pieces),
    }
    # Besides, what was outside, and the loss.
    expected["live"] = sum(expected.values()) + storage_bytes(outside) + loss.nbytes
    same("bytes held in step 4", held, expected)


@stages_hold(
    "traffic",
    ask(ranks=(2, 3), more_ranks=1, chapters=STAGES),
    ask(ranks=4, hybrid=True),
    ask_thorough(ranks=(1, 2, 3), **LOW),
)
def collectives_are_those_of_the_stage(engine, hybrid=False, **options):
    """Kind, bytes, order, step and ranks of every collective of a training step.

    On a grid of 2 x 2 it is the same within a row, and across replicas only the shards' gradients go.
    """
    rank, layers, width, low = engine.rank, 4, 12, "param_dtype" in options
    group = grid() if hybrid else None
    row = tuple(dist.get_process_group_ranks(group.get_group("shards") if hybrid else dist.group.WORLD))
    model, world_size = stack(layers, width), len(row)
    sizes = [width * width, width]
    whole = padded(sizes, world_size, 8 if low else 4)[0]
    options |= {} if engine.like == "zero3" else {"bucket_mb": 4 * sum(sizes) / 2**20}
    trained = engine(model, ADAMW, group=group, **options)

    for step in range(3):
        with TrafficLedger() as traffic:  # of the last step in the end
            trained.training_step(*vector_batch(step, rank, width), lambda out, y: (out - y).square().mean())
    gather = ("all-gather", "5 gather parameters", (2 if low else 4) * whole)
    reduce = ("reduce-scatter", "3 reduce gradients", 4 * whole)
    expected = {
        "zero1": [("all-reduce", *reduce[1:])] * layers + [gather] * layers,
        "zero2": [reduce] * layers + [gather] * layers,
        # Forward gathers every unit; so does backward, each before the reduction of the unit behind it. A rank that
        # is alone gathers nothing ahead.
        "zero3": [gather] * layers + [gather] + [gather, reduce] * (layers - 1) + [reduce]
        if world_size > 1
        else [gather] * layers + [gather, reduce] * layers,
    }[engine.like]
    own = [(each.kind, each.step, each.whole_bytes) for each in traffic.collectives if each.ranks == row]
    same("the collectives of a step, where they are issued, and bytes", own, expected)
    across = [(c.kind, c.whole_bytes) for c in traffic.collectives if c.ranks != row]
    replicas = [("all-reduce", 4 * whole // world_size)] * layers if hybrid else []
    same("collectives with other ranks than the row's", across, replicas)


@stages_hold("order", *ask_each("reverse", (False, True), "zero2", asks=only, chapters="zero2"))
def buckets_are_reduced_in_one_order(engine, reverse):
    """ZeRO-2's buckets are reduced last parameters first, in whatever order autograd finishes, and rightly."""
    pair = Pair(engine, lambda: Lanes((8, 16, 24, 32)), ADAMW, bucket_mb=0, **VECTORS)
    for model, _ in pair.both:
        model.way = range(4)[:: -1 if reverse else 1]
    params = reversed(list(pair.plain.parameters()))
    expected = [8 * padded([param.numel()], pair.size, 2)[0] for param in params]
    for step in range(4):
        with TrafficLedger() as traffic:
            pair.backward(step)
            pair.step()
        sizes = [c.whole_bytes for c in traffic.collectives if c.kind == "reduce-scatter"]
        same("bytes of the reduce-scatters, each once, in the order of self.buckets", sizes, expected)
    pair.same_weights()


# What every engine says of itself, ours and others: to the order.


def promised(engine: Subject):
    """(what its ranks share out between steps, how often Ψ (N-1)/N elements leave a rank in a step)."""
    entry = engines.ENGINES.get(engine.like or engine.name)
    if entry is None or entry.promise is None:
        raise NotApplicable(f"{engine.name} says nothing of its memory and traffic: COUNTERPART would")
    return entry.promise


def seen_of_a_step(engine: Subject):
    """(bytes of the parameters, what was seen of the engine's third step, bytes of a buffer that it documents)."""
    trained = engine(stack(4, 32), ADAMW)
    inner = getattr(trained, "_engine", trained)  # others' are inside of what properties call

    for step in range(3):
        with MemoryLedger() as memory, watched_step(inner, memory) as seen:
            a_step_on_vectors(trained, step, 32)
    return sum(param.nbytes for param in Stack(4, 32).parameters()), seen, getattr(inner, "bucket_bytes", 0)


@holds("bytes", ask(ranks=4, chapters=STAGES))
def what_is_shared_out_is_no_more_than_twice_there(engine):
    """Of what the ranks share out, all four together have two copies at most before the update, and not four."""
    kinds, _ = promised(engine)
    whole, seen, buffer = seen_of_a_step(engine)
    for kind in kinds:
        total = of_all_ranks(torch.tensor(seen.held[kind])).sum()
        most = 2.1 * whole * (1 + (kind == "optimizer"))  # AdamW has two moments
        if kind == "gradients":  # an engine may document a buffer that gradients go through, of a size of its own
            most += engine.size * buffer
        expect(total <= most, f"bytes of {kind} on all ranks", f"{most:.0f} at most", total.item())


@holds("traffic", ask(more_ranks=4, chapters=STAGES))
def a_step_sends_no_more_than_is_promised(engine):
    """A step sends the 2Ψ or 3Ψ (N-1)/N elements that the engine's documentation says, and 1 % for notes."""
    _, times = promised(engine)
    whole, seen, _ = seen_of_a_step(engine)
    most = 1.01 * times * whole * (1 - 1 / engine.size)
    expect(seen.sent_bytes <= most, "bytes that a rank sends in a step", f"{most:.0f} at most", seen.sent_bytes)


# Live bytes at the worst moment of forward and of backward.


LAYERS, WIDTH = 12, 64
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of one layer of a `Stack`
NOISE = (16 + 2 * LAYERS) * 4 * WIDTH  # activations, and what else is small


def at_most(what: str, nbytes: float, allowed: float, means: str = "") -> None:
    found = f"{nbytes / LAYER:.2f} layers"
    expect(nbytes <= allowed, what, f"at most {allowed / LAYER:.2f} layers of {LAYER:,} bytes{means}", found)


def peaks_of(engine, model, train=True, turn=False, no_sync=False, **options) -> SimpleNamespace:
    """Bytes alive around a step behind two others: in all when the engine is `built`, and `between` two steps; then
    how many more than that forward and backward have at the worst moment, and when they are over, `kept` and `left`.

    The step may `turn`, and go through the model the other way; or be no step to `train` in, but forward alone.
    """
    with MemoryLedger() as memory:
        trained = engine(model, ADAMW, group=silent_group(), **options)
        found = SimpleNamespace(built=memory.live)
        for step in range(2):
            a_step_on_vectors(trained, step, WIDTH)
        model.reverse ^= turn
        memory.reset_peak()
        found.between = before = memory.live
        with torch.set_grad_enabled(train), trained.no_sync() if no_sync else contextlib.nullcontext():
            loss = of_vectors(trained, *vector_batch(2, engine.rank, WIDTH))
            found.forward, found.kept = memory.peak - before, memory.live - before
            memory.reset_peak()
            if train:
                loss.backward()
        found.backward, found.left = memory.peak - before, memory.live - before
    return found


@stages_hold(
    "bytes",
    *ask_each("reverse", (False, True), "zero2", asks=only, more_ranks=(3, 4), chapters="zero2"),
)
def zero2_has_two_buckets_of_whole_gradients_at_most(engine, reverse):
    """In backward ZeRO-2 has parameters, state, 1/N of the gradients, and at most two buckets of whole gradients."""
    most = peaks_of(engine, stack(LAYERS, WIDTH, reverse), bucket_mb=LAYER / 2**20).backward
    activations = (4 + LAYERS) * 4 * WIDTH  # all of the layers' inputs, and the gradients between them
    allowed = LAYERS * LAYER / engine.size + 2 * LAYER + activations
    what = "gradients in backward at the worst moment"
    if reverse:  # documented: every bucket waits for bucket 0, whose gradients come last
        assert most > allowed, "in the opposite order all gradients should be whole at once"
        at_most(what, most, LAYERS * LAYER + 2 * LAYER + activations)
    else:
        means = " (4Ψ/N of gradients, 2 buckets of a layer each: receive the one before first; and activations)"
        at_most(what, most, allowed, means=means)
        assert most > allowed - activations - LAYER, "the bound is far from tight: what was measured here?"


@stages_hold(
    "bytes",
    only("zero3", more_ranks=(3, 4), chapters="zero3"),
    only("zero3", more_ranks=(3, 4), reshard_after_forward=False),
    only("zero3", more_ranks=(3, 4), **LOW),
    ask_thorough("zero3", (2, 3, 4), prefetch=0),
    ask_thorough("zero3", (2, 3, 4), prefetch=3),
)
def zero3_has_only_the_units_in_use_gathered(engine, **options):
    """Gathered are the root, the unit at work and `prefetch` more; none after backward."""
    own = LAYERS * LAYER / engine.size  # a rank's share of the parameters, or of the gradients
    found = peaks_of(engine, stack(LAYERS, WIDTH), **options)
    at_most("what is alive after the construction", found.built, own + NOISE)
    # Parameters, and AdamW's two moments with a counter for each piece.
    at_most("what is alive between steps", found.between, 3 * own + 4 * 2 * LAYERS + NOISE)
    if "reshard_after_forward" not in options:
        units = 1 + min(options.get("prefetch", 1), LAYERS - 1)
        # In bfloat16 they are half as large, and two rounded shards may be on their way.
        unit, sent = (LAYER / 2, LAYER / engine.size) if "param_dtype" in options else (LAYER, 0)
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


@stages_hold(
    "bytes",
    only("zero3", frozen=11),
    only("zero3", frozen=11, kind=ByKeyword),
    only("zero3", no_sync=True),
    only("zero3", kind=Idle, find_unused=True),
)
def zero3_frees_units_in_backward(engine, kind=Stack, frozen=0, **options):
    """A unit without a gradient that tells when to free it, as it is frozen or unused in part, is freed in time.

    Under `no_sync()` gradients stay whole, as documented; parameters are freed.
    """
    model = stack(LAYERS, WIDTH, kind=kind)
    for layer in model.layers[LAYERS - frozen :]:
        layer.requires_grad_(False)
    gradients = (LAYERS - frozen) * LAYER / (1 if "no_sync" in options else engine.size)
    allowed = gradients + (2 if "no_sync" in options else 3 + ("find_unused" in options)) * LAYER + NOISE
    most = peaks_of(engine, model, **options).backward
    at_most("units gathered in backward, and gradients", most, allowed)


@stages_hold(
    "bytes",
    only("zero3", reshard_after_forward=False, train=False),
    only("zero3", turn=True),
)
def zero3_gathers_little_where_it_cannot_know(engine, **options):
    """Few units are gathered where no backward will come, although `reshard_after_forward=False` keeps them for it.

    Nor are many where a forward takes another order than the last, by which they are gathered ahead.
    """
    most = peaks_of(engine, stack(LAYERS, WIDTH), **options).forward
    allowed = 3 if "turn" in options else 2
    at_most("units gathered in forward", most, allowed * LAYER + NOISE)
