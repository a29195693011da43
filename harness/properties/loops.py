"""What a training loop does around a step: clipping, accumulation, recomputation, backwards of all kinds, faults."""

import contextlib
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.measure.memory import storage_bytes
from harness.measure.traffic import TrafficLedger
from harness.properties import parts
from harness.properties.models import Checkpointed
from harness.properties.property import expect, holds, refused, same
from harness.properties.training import Pair
from harness.properties.values import PLAIN

UNITS = (PLAIN, {"options": {"prefetch": 0}, "on": ("zero3",)},
         {"options": {"reshard_after_forward": False}, "on": ("zero3",)})  # fmt: skip

# Clipping.


@holds("values", sizes=(3,), further_sizes=(2,), further_cases=({"norm_type": 1.0},),
       cases=({"norm_type": 2.0}, {"norm_type": math.inf}, {"norm_type": 2.0, "model": "Twice"}))  # fmt: skip
def clipping_takes_the_norm_of_the_whole_model(engine, norm_type, model="OddModel"):
    """The norm is that of all gradients, on every rank the same: no padding, and a tied weight once."""
    pair, clipped = Pair(engine, getattr(parts, model), parts.ADAMW), 0
    for step in range(5):
        max_norm = (0.05, 1e6)[step % 3 == 2]
        pair.backward(step)
        norm = pair.clip(max_norm, norm_type)
        expect(not norm.requires_grad, "the norm", "detached", "it requires a gradient")
        everyone = [torch.empty_like(norm) for _ in range(pair.size)]
        dist.all_gather(everyone, norm)
        # One number, which all ranks have computed from the same numbers in the same order.
        same("the ranks' norms", len({value.item() for value in everyone}), 1, step=3)
        clipped += norm > max_norm
        pair.step()
    assert 0 < clipped < 5, "the norms lie on one side of what they are clipped to: this proves nothing"
    pair.same_weights()


@holds("values", sizes=(2,), further_sizes=(3,))
def a_backward_after_clipping_adds_to_what_was_clipped(engine):
    """Backward, clip, backward, step: the second backward adds to clipped gradients."""
    pair = Pair(engine, parts.OddModel)
    for step in range(4):
        pair.backward(2 * step)
        pair.clip(0.05)
        pair.backward(2 * step + 1)
        pair.step()
    pair.same_weights()


@holds("values", sizes=(3,),
       cases=tuple({"value": v, "norm_type": n} for v in (math.nan, math.inf) for n in (2.0, math.inf)))  # fmt: skip
def one_ranks_nan_is_in_every_ranks_norm(engine, value, norm_type):
    """A NaN or inf in one element of one rank's gradient shows in the norm on all ranks."""
    trained = engine(parts.seeded(parts.OddModel), parts.ADAMW)
    tokens, targets = parts.token_batch(0, dist.get_rank())
    loss = F.cross_entropy(trained(tokens), targets)
    if dist.get_rank() == 0:
        loss = loss + trained.model.head.bias[0] * value  # which only one rank has in its shard
    loss.backward()
    norm = trained.clip_grad_norm_(1.0, norm_type).item()
    right = math.isnan(norm) if math.isnan(value) else not math.isfinite(norm)
    said = str(value).replace("nan", "NaN")
    what = f"the norm with norm_type {norm_type:g} when rank 0 has a {said}"
    expect(right, what, f"{said} on every rank", norm, step=3)


class Gained(nn.Module):
    """A single element of another dtype, which only rank 0 has a piece of; or nothing else than one element."""

    def __init__(self, low, high):
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=low) if low else None
        self.gain = nn.Parameter(torch.ones(1, dtype=high))

    def forward(self, x):
        return self.gain * (x if self.linear is None else self.linear(x.to(self.linear.weight.dtype)))


FEW = ((None, torch.float32), (torch.float32, torch.float64), (torch.bfloat16, torch.float32))


@holds("values", sizes=(3,), further_sizes=(2,),
       cases=tuple({"low": a, "high": b, "norm_type": norm} for a, b in FEW for norm in (2.0, math.inf)))  # fmt: skip
def a_rank_that_owns_only_padding_agrees_on_the_norm(engine, low, high, norm_type):
    """Ranks that own only padding, of all buckets or of those of one dtype, have the others' norm, in its dtype."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain, model = (parts.seeded(lambda: Gained(low, high), dtype=None) for _ in range(2))
    trained = engine(model, parts.ADAMW)
    for other in range(world_size):
        (plain(parts.vector_batch(0, other, 8)[0]).square().mean() / world_size).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    trained(parts.vector_batch(0, rank, 8)[0]).square().mean().backward()
    norm = trained.clip_grad_norm_(0.1, norm_type)
    same("the norm's dtype", norm.dtype, expected.dtype, step=3)
    # Gradients were added in the low precision: 8 bits of it, or float32's 24.
    tolerance = 1e-2 if low == torch.bfloat16 else 1e-5
    same("the norm", norm, expected, tolerance * expected.item(), step=3)
    trained.step()


# Several backwards, and what may stand between them.


@holds("traffic", sizes=(3,), further_sizes=(2,),
       cases=({"micro_batches": 3, "no_sync": False}, {"micro_batches": 3, "no_sync": True}))  # fmt: skip
def micro_batches_send_what_they_must(engine, micro_batches, no_sync):
    """Under `no_sync` nothing is sent and no piece gets a gradient; without it each backward of ZeRO-2 and -3 sends."""
    engine.needs("zero1", "zero2", "zero3")
    stage, width, k = engine.like, 8, micro_batches
    options = {} if stage == "zero3" else {"bucket_mb": 0.0005}

    def batch_of(step, who):
        return parts.vector_batch(step, who, width, torch.float64)

    pair = Pair(engine, lambda: parts.Stack(4, width), parts.ADAMW, batch=batch_of,
                loss=lambda model, x, y: F.mse_loss(model(x), y), **options)  # fmt: skip
    trained = pair.trained
    pieces = [p for group in trained.optimizer.param_groups for p in group["params"]]
    for step in range(3):
        with TrafficLedger() as traffic:
            for micro in range(k):
                quiet = no_sync and micro < k - 1
                pair.backward(
                    step * k + micro, scale=1 / k, inside=trained.no_sync if quiet else contextlib.nullcontext
                )
                if stage != "zero1" and quiet:
                    same(
                        "pieces that have a gradient under no_sync", sum(p.grad is not None for p in pieces), 0, step=3
                    )
                elif stage != "zero1":
                    whole = storage_bytes([p.grad for p in trained.model.parameters() if p.grad is not None])
                    same("bytes of whole gradients after backward", whole, 0, step=3)
            pair.step()
    times = {"zero1": 3, "zero2": 2 if no_sync else k + 1, "zero3": 2 * k + 1 if no_sync else 3 * k}[stage]
    psi = sum(8 * bucket.numel for bucket in trained.buckets) * (pair.size - 1) / pair.size
    same(f"bytes sent, {times}Ψ (N-1)/N", traffic.sent_bytes, round(times * psi), step=3)
    pair.same_weights()


def twice_through_one_graph(model, batch, scale):
    loss = scale * F.cross_entropy(model(batch[0]), batch[1])
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def two_losses_of_one_forward(model, batch, scale):
    out = model(batch[0])
    (scale * F.cross_entropy(out, batch[1])).backward(retain_graph=True)
    (scale * out.square().mean()).backward()


def an_evaluation_before_backward(model, batch, scale):
    loss = scale * F.cross_entropy(model(batch[0]), batch[1])
    with torch.no_grad():
        model(batch[0])
    loss.backward()


def a_gradient_of_an_activation_first(model, batch, scale):
    """`autograd.grad` down to the middle: what it returns is not added to any parameter's gradient."""
    seen = []
    blocks = getattr(model, "model", model).blocks
    hook = blocks[1].register_forward_hook(lambda module, args, out: seen.append(out))
    loss = scale * F.cross_entropy(model(batch[0]), batch[1])
    hook.remove()
    assert torch.autograd.grad(loss, seen, retain_graph=True)[0].abs().max() > 0
    loss.backward()


def forwards_first(model, batch, scale):
    """Two graphs at once, and the older one's backward first."""
    losses = [scale * F.cross_entropy(model(batch[0][rows]), batch[1][rows]) for rows in (slice(0, 1), slice(1, 4))]
    for loss in losses:
        loss.backward()


def interleaved_with_the_next_forward(model, batch, scale):
    """The next forward runs before the backward of the one before, as in a pipeline's schedule."""
    first = scale * F.cross_entropy(model(batch[0]), batch[1])
    second = scale * F.cross_entropy(model((batch[0] + 1) % 11), batch[1])
    first.backward()
    third = scale * F.cross_entropy(model((batch[0] + 2) % 11), batch[1])
    second.backward()
    third.backward()


WAYS = {way.__name__: way for way in (
    twice_through_one_graph, two_losses_of_one_forward, an_evaluation_before_backward,
    a_gradient_of_an_activation_first, forwards_first, interleaved_with_the_next_forward)}  # fmt: skip


@holds("values", sizes=(3,), further_sizes=(2,), cases=UNITS,
       further_cases=({"options": {"find_unused": True}}, {"options": {"bucket_mb": 0}, "on": ("zero2",)}))  # fmt: skip
def backward_may_be_called_in_any_way(engine, options):
    """Twice through one graph, per loss, after an evaluation or `autograd.grad`, interleaved: as in plain PyTorch."""
    pair = Pair(engine, parts.OddModel, **options)
    for step, way in enumerate(WAYS.values()):
        for other in range(pair.size):
            way(pair.plain, parts.token_batch(step, other), 1 / pair.size)
        way(pair.trained, parts.token_batch(step, pair.rank), 1)
        pair.nothing_gathered(way.__name__, 2)
        pair.step()
        pair.same_weights()


@holds("values", sizes=(2,), further_sizes=(3,))
def a_step_leaves_the_gradients_alone(engine):
    """Without `zero_grad` the next backward adds to the gradients, and another step uses them again."""
    pair = Pair(engine, parts.OddModel)
    for step in range(3):
        pair.backward(step)
        for _ in range(1 + step % 2):
            pair.optimizer.step()
            pair.trained.step()
    pair.same_weights()


class TwoHeads(parts.OddModel):
    """A second head, which is in no unit, and a parameter that only one of two losses reaches."""

    def __init__(self):
        super().__init__()
        self.second, self.ask = nn.Linear(5, 3), nn.Parameter(torch.ones(3))

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1) * self.frozen + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x), self.second(x) * self.ask


@holds("values", sizes=(2,), further_sizes=(3,), cases=(
    {"kept": False, "options": {}}, {"kept": True, "options": {}, "on": ("zero1", "zero2")},
    {"kept": False, "options": {"bucket_mb": 0}, "on": ("zero2",)}))  # fmt: skip
def losses_with_a_backward_each_add_up(engine, kept, options):
    """Each loss has a backward of its own and reaches a part of the model; the last one reaches the smallest part."""
    pair, whole = Pair(engine, TwoHeads, **options), engine.like != "zero3"

    def backward(model, batch, scale, quiet=contextlib.nullcontext):
        first, second = model(batch[0])
        with quiet():
            (scale * F.cross_entropy(first, batch[1])).backward(retain_graph=True)
            (scale * F.cross_entropy(second, batch[1])).backward()
        if whole:  # ZeRO-3's freed weight cannot be used outside of the model's forward
            (scale * getattr(model, "model", model).ask.square().sum()).backward()

    for step in range(3):
        for other in range(pair.size):
            backward(pair.plain, parts.token_batch(step, other), 1 / pair.size)
        backward(pair.trained, parts.token_batch(step, pair.rank), 1, *([pair.trained.no_sync] if kept else []))
        pair.step()
        pair.same_weights()


@holds("values", sizes=(2,), cases=tuple({"where": w} for w in ("around", "inside", "around several")),
       further_sizes=(3,),
       further_cases=(*({"where": w, **each} for w in ("around", "inside") for each in UNITS[1:]),
                      *({"where": w, "options": {"find_unused": True}} for w in ("around", "inside", "around several")))
       )  # fmt: skip
def recomputation_changes_nothing(engine, where, options=None):
    """Activation checkpointing around each unit, inside the units, or around several, trains as without it."""
    pair = Pair(engine, lambda: Checkpointed(where), parts.ADAMW, **(options or {}))
    pair.train(4)
    pair.same_weights()


@holds("values", sizes=(2,), further_sizes=(3,))
def the_whole_model_may_be_recomputed(engine):
    """Activation checkpointing around the engine itself."""
    pair = Pair(engine, parts.OddModel, parts.DECAY,
                loss=lambda model, x, y: F.cross_entropy(checkpoint(model, x, use_reentrant=False), y))  # fmt: skip
    pair.train(3)
    pair.same_weights()


@holds("misuse", sizes=(2,), further_sizes=(3,))
def reentrant_checkpointing_is_right_or_refused(engine):
    """ZeRO-3 refuses reentrant checkpointing, around a unit and around the model, and trains on; the others take it."""
    model = parts.seeded(lambda: Checkpointed("around", use_reentrant=True))
    pair = Pair(engine, lambda: Checkpointed("around"), parts.DECAY)
    tokens, targets = parts.token_batch(0, pair.rank)
    if engine.like == "zero3":
        other = engine(model, parts.DECAY)
        for _ in range(2):
            refused(F.cross_entropy(other(tokens), targets).backward, "use_reentrant=False", step=2)
            other.zero_grad()
        embedded = torch.zeros((), dtype=torch.float64, requires_grad=True)
        out = checkpoint(lambda t, e: pair.trained(t) + e, tokens, embedded, use_reentrant=True)
        refused(F.cross_entropy(out, targets).backward, "use_reentrant=False", step=2)
        pair.trained.zero_grad()
    else:
        for module in (pair.plain, pair.trained.model):
            module.use_reentrant = True
    pair.train(3)
    pair.same_weights()


# Faults.


class Trip(torch.autograd.Function):
    """An error in the middle of backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("tripped in backward")


@contextlib.contextmanager
def tripping(block: nn.Module):
    """Inside, a backward through `block` ends in an error."""
    hook = block.register_forward_pre_hook(lambda module, args: (Trip.apply(args[0]), *args[1:]))
    yield
    hook.remove()


@holds("life", sizes=(2,), further_sizes=(3,))
def an_exception_leaves_no_sync(engine):
    """An exception leaves `no_sync()`, and the steps after it are reduced as ever."""
    pair = Pair(engine, parts.OddModel, parts.DECAY)

    def interrupted():
        with pair.trained.no_sync():
            pair.trained(parts.token_batch(9, pair.rank)[0])
            raise ZeroDivisionError("tripped under no_sync")

    for step in range(3):
        refused(interrupted, "tripped", error=ZeroDivisionError)
        pair.backward(step)
        pair.step()
    pair.same_weights()


@holds("misuse", engines=("zero2", "zero3"))  # in ZeRO-1 gradients add up whatever came before, as in torch
def going_on_after_half_a_backward_is_refused(engine):
    """Without `zero_grad()` half a backward would be mixed with the next: an error that names the way out."""
    trained = engine(parts.seeded(parts.OddModel), parts.DECAY)
    tokens, targets = parts.token_batch(0, dist.get_rank())
    with tripping(trained.model.blocks[1]):
        loss = F.cross_entropy(trained(tokens), targets)
    refused(loss.backward, "tripped", error=ZeroDivisionError)
    refused(lambda: F.cross_entropy(trained(tokens), targets).backward(), "backward", "engine.zero_grad()", step=2)
    trained.zero_grad()
    trained.training_step(tokens, targets, F.cross_entropy)
