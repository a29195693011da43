"""What a loop does around a step: clipping, accumulation, backwards of all kinds, recomputation, unused parameters."""

import contextlib
import itertools
import math
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zerolab.measure.held import sizes_of_layout, storage_bytes
from zerolab.measure.traffic import TrafficLedger
from zerolab.properties.fixtures import (
    ADAMW,
    DECAY,
    VECTORS,
    Checkpointed,
    OddModel,
    Pair,
    Stack,
    Twice,
    a_step,
    model_of,
    odd,
    of_all_ranks,
    of_output,
    own_tokens,
    pieces_of,
    seeded,
    token_batch,
    vector_batch,
)
from zerolab.properties.property import (
    STAGES,
    NotApplicable,
    ask,
    ask_thorough,
    expect,
    holds,
    only,
    refused,
    same,
    stages_hold,
)

# Clipping.


@holds(
    "values",
    ask(ranks=3, norm_type=2.0),
    ask("zero2", 3, norm_type=math.inf),
    ask("zero3", 3, norm_type=2.0, model=Twice),
    ask_thorough(norm_type=1.0),
)
def clipping_takes_the_norm_of_the_whole_model(engine, norm_type, model=OddModel, device="cpu"):
    """The norm is that of all gradients, on every rank: no padding, and a tied weight once."""
    pair, clipped = Pair(engine, model, ADAMW, device=device), 0
    for step in range(5):
        max_norm = (0.05, 1e6)[step % 3 == 2]
        pair.backward(step)
        norm = pair.clip(max_norm, norm_type)
        assert not norm.requires_grad
        same("the norm's device", norm.device.type, device)
        # One number, which all ranks have computed from the same numbers in the same order.
        same("the ranks' norms", len(of_all_ranks(norm).unique()), 1)
        clipped += norm > max_norm
        pair.step()
    assert 0 < clipped < 5, "the norms lie on one side of what they are clipped to: this proves nothing"
    pair.same_weights()


@holds("values")
def a_backward_after_clipping_adds_to_what_was_clipped(engine):
    """Backward, clip, backward, step: the second backward adds to clipped gradients."""
    pair = Pair(engine)
    for step in range(4):
        pair.backward(2 * step)
        pair.clip(0.05)
        pair.backward(2 * step + 1)
        pair.step()
    pair.same_weights()


@holds("values", ask(ranks=3))
def one_ranks_nan_is_in_every_ranks_norm(engine):
    """A NaN or inf in one element of one rank's gradient shows in the norm on all ranks."""
    trained = odd(engine)
    tokens, targets = own_tokens(0)
    for value, norm_type in itertools.product((math.nan, math.inf), (2.0, math.inf)):
        trained.zero_grad()
        out = trained(tokens)
        loss = F.cross_entropy(out, targets)
        if engine.rank == 0:  # a parameter which only one rank has in its shard
            loss = loss + (out[0, 0] if engine.foreign else trained.model.head.bias[0]) * value
        loss.backward()
        norm = trained.clip_grad_norm_(1.0, norm_type).item()
        right = math.isnan(norm) if math.isnan(value) else not math.isfinite(norm)
        what = f"the norm with norm_type {norm_type:g} when rank 0 has {value}"
        expect(right, what, f"{value} on every rank", norm)


@holds("values", ask(ranks=3))
def clipping_by_value_is_torchs_on_the_whole_model(engine):
    """`engine.clip_grad_value_` is torch's on the whole model, also between two backwards of one step."""
    pair = Pair(engine)
    for step in range(3):
        for part in range(2):
            pair.backward(2 * step + part)
            pair.trained.clip_grad_value_(0.01)
            nn.utils.clip_grad_value_(pair.plain.parameters(), 0.01)
        pair.step()
    pair.same_weights()


class Gained(nn.Module):
    """A single element of another dtype, which only rank 0 has a piece of; or nothing else than one element."""

    def __init__(self, low, high):
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=low) if low else None
        self.gain = nn.Parameter(torch.ones(1, dtype=high))

    def forward(self, x):
        return self.gain * (x if self.linear is None else self.linear(x.to(self.linear.weight.dtype)))


def gained(engine, low, high, **options) -> Pair:
    return Pair(engine, lambda: Gained(low, high), batch=lambda step, who: vector_batch(step, who, 8)[:1],
                loss=lambda model, x: model(x).square().mean(), **options)  # fmt: skip


@holds("values", ask(ranks=(2, 4), chapters=STAGES))
def a_rank_may_own_only_padding(engine):
    """One element over N ranks: the first owns it, the others own nothing but padding, and still take part."""
    gained(engine, None, torch.float64).alike(4)


@holds(
    "values",
    ask(ranks=3, low=None, high=torch.float32),
    ask(ranks=3, low=torch.float32, high=torch.float64),
    ask(ranks=3, low=torch.bfloat16, high=torch.float32),
)
def a_rank_that_owns_only_padding_agrees_on_the_norm(engine, low, high):
    """Ranks that own only padding, of all buckets or of those of one dtype, have the others' norm, in its dtype."""
    # Gradients are added in the low precision: 8 bits of it, or float32's 24.
    pair = gained(engine, low, high, dtype=None, atol=1e-2 if low == torch.bfloat16 else 1e-5)
    for step, norm_type in enumerate((2.0, math.inf)):
        pair.backward(step)
        expected = torch.nn.utils.get_total_norm([p.grad for p in pair.plain.parameters()], norm_type)
        same("the norm's dtype", pair.clip(0.1, norm_type).dtype, expected.dtype)
        pair.step()


# Several backwards, and what may stand between them.


@holds("values", ask(chapters=STAGES))
def backwards_before_a_step_add_up(engine):
    """Several backwards before a step add up, with evaluations in between."""
    pair = Pair(engine)
    for step in range(3):
        for micro in range(2):
            pair.backward(2 * step + micro)
            pair.evaluate()
        pair.step()
    pair.same_weights()


@stages_hold("traffic", ask(no_sync=False), ask(no_sync=True))
def micro_batches_send_what_they_must(engine, no_sync):
    """Under `no_sync` nothing is sent and no piece gets a gradient; without it each backward of ZeRO-2 and -3 sends.

    The inner exit of nested ones, or an exception in it, does not end the outer one.
    """
    stage, k = engine.like, 3
    options = {} if stage == "zero3" else {"bucket_mb": 0.0005}
    pair = Pair(engine, partial(Stack, 4, 8), ADAMW, **VECTORS, **options)
    trained, pieces = pair.trained, pieces_of(pair.trained)
    perhaps_quiet = trained.no_sync if no_sync else contextlib.nullcontext

    def backward(step, micro):
        pair.backward(step * k + micro, scale=1 / k)
        if stage != "zero1" and no_sync and micro < k - 1:
            given = sum(p.grad is not None for p in pieces)
            same("pieces that have a gradient under no_sync", given, 0)
        elif stage != "zero1":
            whole = storage_bytes([p.grad for p in trained.model.parameters() if p.grad is not None])
            same("bytes of whole gradients after backward", whole, 0)

    for step in range(3):
        with TrafficLedger() as traffic:
            with perhaps_quiet():
                with contextlib.suppress(ZeroDivisionError), perhaps_quiet():
                    backward(step, 0)
                    raise ZeroDivisionError
                backward(step, 1)
            backward(step, 2)
            pair.step()
    times = {"zero1": 3, "zero2": 2 if no_sync else k + 1, "zero3": 2 * k + 1 if no_sync else 3 * k}[stage]
    psi = 8 * sizes_of_layout(trained)[0]
    same(f"bytes sent, {times}Ψ (N-1)/N", traffic.sent_bytes, round(times * psi * (pair.size - 1) / pair.size))
    pair.same_weights()


class TwoHeads(OddModel):
    """Two heads, which belong to the root, or each a unit of its `own`."""

    def __init__(self, own: bool = False):
        super().__init__()
        self.second = nn.Linear(5, 3)
        if own:
            self.heads = nn.ModuleList([self.head, self.second])

    def forward(self, tokens):
        x = self.features(tokens)
        return self.head(x), self.second(x)


def two_losses(model, batch, scale, shift=0):
    return [scale * F.cross_entropy(out, batch[1]) for out in model((batch[0] + shift) % 11)]


def both(*arguments):
    return sum(two_losses(*arguments))


def twice_through_one_graph(model, batch, scale):
    loss = both(model, batch, scale)
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def once_through_two_graphs(model, batch, scale):
    (both(model, batch, scale) + both(model, batch, scale, 1)).backward()


def a_backward_for_each_loss(model, batch, scale):
    """Each reaches a part of the model."""
    first, second = two_losses(model, batch, scale)
    first.backward(retain_graph=True)
    second.backward()


def an_evaluation_before_backward(model, batch, scale):
    loss = both(model, batch, scale)
    with torch.no_grad():
        model(batch[0])
    loss.backward()


def a_gradient_of_an_activation_first(model, batch, scale):
    """`autograd.grad` down to the middle: what it returns is not added to any parameter's gradient."""
    seen = []
    with model_of(model).blocks[1].register_forward_hook(lambda module, args, out: seen.append(out)):
        loss = both(model, batch, scale)
    assert torch.autograd.grad(loss, seen, retain_graph=True)[0].abs().max() > 0
    loss.backward()


def interleaved_with_the_next_forward(model, batch, scale):
    """The next forward runs before the backward of the one before, as in a pipeline's schedule."""
    first = both(model, batch, scale)
    second = both(model, batch, scale, 1)
    first.backward()
    third = both(model, batch, scale, 2)
    second.backward()
    third.backward()


def one_backward_for_a_parameter(model, batch, scale, quiet=contextlib.nullcontext):
    """The last backward reaches the smallest part."""
    with quiet():
        a_backward_for_each_loss(model, batch, scale)
    (scale * model_of(model).second.bias.square().sum()).backward()


def the_others_under_no_sync(model, batch, scale):
    one_backward_for_a_parameter(model, batch, scale, getattr(model, "no_sync", contextlib.nullcontext))


WAYS = (twice_through_one_graph, once_through_two_graphs, a_backward_for_each_loss, an_evaluation_before_backward,
        a_gradient_of_an_activation_first, interleaved_with_the_next_forward)  # fmt: skip
# A freed weight cannot be used outside of the model's forward.
OF_WHOLE_MODELS = (one_backward_for_a_parameter, the_others_under_no_sync)


@holds(
    "values",
    ask(),
    only("zero3", prefetch=0),
    only("zero3", reshard_after_forward=False),
    only("zero2", bucket_mb=0, find_unused=True),
    ask_thorough(find_unused=True),
)
def backward_may_be_called_in_any_way(engine, **options):
    """Twice through one graph, per loss, after an evaluation or `autograd.grad`, interleaved: as in plain PyTorch."""
    if "drops gradients" in engine.more:
        raise NotApplicable(f"{engine.name} documents several backwards through its own `backward` alone")
    pair = Pair(engine, TwoHeads, **options)
    for step, way in enumerate(WAYS + OF_WHOLE_MODELS if engine.like in ("zero1", "zero2") else WAYS):
        pair.backward_by(way, step)
        pair.step()
        pair.same_weights()


@holds(
    "misuse",
    ask("zero1", 3, no_sync=True, find_unused=True),
    ask("zero2", 3, no_sync=True, find_unused=False),
    ask("zero3", 3, no_sync=False, find_unused=True),
    ask("zero1", 3, no_sync=False, find_unused=False),
)
def a_backward_for_each_head_is_right_or_refused(engine, no_sync, find_unused):
    """Two backwards through one body, each by a head of its own: right, or refused with a way that is right."""
    if no_sync and engine.foreign:
        raise NotApplicable(f"{engine.name} wants the forward inside of `no_sync`, too")
    pair = Pair(engine, partial(TwoHeads, own=True), find_unused=find_unused)

    def each(model, batch, scale):
        first, second = two_losses(model, batch, scale)
        with model.no_sync() if no_sync and model is pair.trained else contextlib.nullcontext():
            first.backward(retain_graph=True)
        second.backward()
        if model is pair.trained:
            model.step()

    try:
        pair.backward_by(each, 0)
    except RuntimeError as error:
        if engine.foreign:
            raise  # a refusal in words of its own
        right = engine.like != "zero1" and not find_unused and "find_unused=True" in str(error)
        expect(right and "'head." in str(error), "the error", "none, or one that names find_unused=True", error)
        pair.trained.zero_grad()
        both(pair.trained, pair.own_batch(0), 1).backward()
        pair.trained.step()
    pair.optimizer.step()
    pair.same_weights()


@holds("values")
def gradients_stay_until_they_are_thrown_away(engine):
    """Steps use them again and a backward adds to them, until the engine's `zero_grad`, or its optimizer's."""
    if "drops gradients" in engine.more:
        raise NotApplicable(f"{engine.name}'s step drops the gradients")
    pair = Pair(engine)
    for step in range(4):
        if step % 2:
            pair.alone().backward()  # another batch's gradients, thrown away
            pair.trained.optimizer.zero_grad(set_to_none=bool(step // 2))
        for part in range(2):
            pair.backward(2 * step + part)
            for _ in range(1 + step % 2):
                pair.optimizer.step()
                pair.trained.step()
        pair.optimizer.zero_grad()
        (pair.trained if step < 2 else pair.trained.optimizer).zero_grad()
    pair.same_weights()


# Recomputation. What is right of it: paths.py, `SAVED`.


@holds("misuse")
def reentrant_checkpointing_is_right_or_refused(engine):
    """ZeRO-3 refuses reentrant checkpointing, around a unit and around the model, and trains on; the others take it."""
    pair = Pair(engine, partial(Checkpointed, use_reentrant=engine.like != "zero3"), DECAY)
    tokens, targets = own_tokens(0)
    if engine.like == "zero3":
        other = engine(seeded(partial(Checkpointed, use_reentrant=True)), DECAY)
        for _ in range(2):
            with refused("use_reentrant=False"):
                of_output(other, tokens, targets).backward()
            other.zero_grad()
        embedded = torch.zeros((), dtype=torch.float64, requires_grad=True)
        out = checkpoint(lambda t, e: pair.trained(t) + e, tokens, embedded, use_reentrant=True)
        with refused("use_reentrant=False"):
            F.cross_entropy(out, targets).backward()
        pair.trained.zero_grad()
    pair.alike(3)


# Parameters that a step leaves unused: on some ranks or on all, with find_unused=True and without.


class Adapted(nn.Module):
    """A block with adapters, of which a forward uses one or none. With a single one some ranks use all there is."""

    def __init__(self, adapters: int):
        super().__init__()
        self.base = nn.Linear(5, 5)
        self.adapters = nn.ParameterList([torch.randn(5) for _ in range(adapters)])

    def forward(self, x, choice):
        x = torch.tanh(self.base(x))
        return x if choice is None else x * self.adapters[choice % len(self.adapters)]


class Forked(nn.Module):
    """Parts that a step may leave unused: adapters in units, a whole unit, an early and a late root parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.early = nn.Parameter(torch.randn(5))
        self.blocks = nn.ModuleList(map(Adapted, (4, 1, 4)))
        self.spare = nn.ModuleList([nn.Linear(5, 3)])  # a unit of its own, that only some steps run
        self.heads = nn.ModuleDict({"a": nn.Linear(5, 3), "b": nn.Linear(5, 3)})

    def forward(self, tokens, choice=None, early=False, spare=False):
        x = self.embedding(tokens).mean(1)
        if early:
            x = x + self.early
        for block in self.blocks:
            x = block(x, choice)
        out = {name: head(x) for name, head in self.heads.items()}
        return {**out, "spare": self.spare[0](x) if spare else None}


def loss_of(model, step: int, micro: int, rank: int, alike: bool = False):
    """What forward is told, and the output that the loss uses, differ by step; and by rank, unless `alike`."""
    tokens, targets = token_batch(10 * step + micro, rank)
    turn = step + micro
    who = turn if alike else turn + rank
    out = model(tokens, choice=(None, 0, 1, 2)[who % 4], early=who % 3 == 0, spare=turn % 2 == 0)
    loss = F.cross_entropy(out[("a", "b")[who // 2 % 2]], targets)
    if out["spare"] is not None and step % 4 == 0:  # else the unit ran and nobody asks for its output
        loss = loss + F.cross_entropy(out["spare"], targets)
    return loss


def forked(engine, optimizer=DECAY, alike=False, **options) -> Pair:
    """`Forked` on both sides; the batch of number 10 * step + micro."""
    return Pair(engine, Forked, optimizer, loss=partial(loss_of, alike=alike), find_unused=True,
                batch=lambda number, rank: (*divmod(number, 10), rank), **options)  # fmt: skip


SEVERAL = {"micro_batches": 3, "no_sync": True}
IN_ALL = {"ranks": (1, 2, 3)}


@holds(
    "values",
    ask(more_ranks=(1, 3)),
    ask("zero2", more_ranks=(1, 3), **SEVERAL),
    ask("zero3", more_ranks=(1, 3), alike=True),
    ask_thorough(**IN_ALL, **SEVERAL, alike=True),
    ask_thorough(**IN_ALL, micro_batches=3),
    ask_thorough("zero2", **IN_ALL, **SEVERAL, bucket_mb=0),
    ask_thorough("zero3", **IN_ALL, **SEVERAL, prefetch=0),
    ask_thorough("zero3", **IN_ALL, **SEVERAL, reshard_after_forward=False),
)
def what_nobody_used_is_left_out_of_the_step(engine, alike=False, micro_batches=1, no_sync=False, **options):
    """With `find_unused` what no rank used gets no decay, no momentum and no state; the rest trains as ever."""
    pair = forked(engine, alike=alike, **options)
    pieces = {}
    for bucket in [] if engine.foreign else pair.trained.all_buckets:
        pieces |= {bucket.names[index]: piece for index, piece in bucket.numbered(bucket.pieces)}

    def steps_taken():
        states = {name: pair.trained.optimizer.state.get(piece, {}) for name, piece in pieces.items()}
        return {name: int(state.get("step", 0)) for name, state in states.items()}

    for step in range(8):
        for micro in range(micro_batches):
            pair.backward(10 * step + micro, quiet=no_sync and micro < micro_batches - 1)
        if step % 3 == 1:  # what was used before clipping, or behind it, counts
            pair.clip(0.1)
            pair.backward(10 * step + 9)
        unused = {name for name, param in pair.plain.named_parameters() if param.grad is None}
        assert "blocks.2.adapters.3" in unused and len(unused) < len(list(pair.plain.parameters()))
        expected = {name: count + (name not in unused) for name, count in steps_taken().items()}
        pair.step()
        same("how often the optimizer has updated each parameter", steps_taken(), expected)
    pair.same_weights()


@stages_hold("traffic")
def finding_the_unused_costs_one_small_all_reduce(engine):
    """A step with `find_unused` sends what one without it sends, and one byte for each trained parameter."""
    found = []
    for option in (False, True):
        trained = odd(engine, find_unused=option)
        a_step(trained)
        with TrafficLedger() as traffic:
            of_output(trained, *own_tokens(0)).backward()
            trained.clip_grad_norm_(1e9)
            trained.step()
            trained.zero_grad()
        found.append([(each.kind, each.whole_bytes) for each in traffic.collectives])
    small = ("all-reduce", sum(param.requires_grad for param in trained.model.parameters()))
    same("the collectives of a step with find_unused", sorted(found[1]), sorted([*found[0], small]))


@stages_hold("misuse", ask(more_ranks=(1, 3)))
def unused_parameters_are_named_by_default(engine):
    """Without `find_unused` the step names parameters that this rank's backward did not reach, no others, and it."""
    trained = engine(seeded(Forked), DECAY)
    tokens, targets = own_tokens(0)
    with refused("no backward() was called"):
        trained.step()
    F.cross_entropy(trained(tokens, choice=1, early=True, spare=True)["a"], targets).backward()
    # ZeRO-3 names them unit by unit, the root at the end.
    words = "'blocks.0.adapters.0', 'blocks.0.adapters.2'" if engine.like == "zero3" else "'heads.b.weight'", " more"
    with refused(*words, "find_unused=True", "requires_grad_(False)") as said:
        trained.step()
    others = [name for name in ("adapters.1", "'early'", "heads.a") if name in said[0]]
    same("parameters that are named and were used", others, [])


class Spare(OddModel):
    """With a weight that a forward may leave unused. It is the first, so its bucket is the last."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, tokens, spare: bool = True):
        out = super().forward(tokens)
        return out * self.spare if spare else out


@holds("misuse", ask(chapters=STAGES), only("zero1", chapters="zero1", bucket_mb=0))
def a_gradient_that_is_missing_or_sparse_is_refused(engine, **options):
    """A parameter without a gradient at the step, and a sparse gradient, are errors in words; then training goes on.

    No chapter's step sends anything before it has found that out: who goes on would write into what is in flight.
    """
    trained = engine(seeded(Spare), DECAY, **options)
    tokens, targets = own_tokens(0)
    for _ in range(2):
        F.cross_entropy(trained(tokens, spare=False), targets).backward()
        with TrafficLedger() as traffic, refused("'spare'"):
            trained.step()
        if engine.chapter:
            same("what a step sends that is refused", len(traffic.collectives), 0)
        trained.zero_grad()
        a_step(trained)
    trained.model.embedding.sparse = True
    with refused("'embedding.weight'", "sparse=False"):
        a_step(trained)


@stages_hold("misuse", only(("zero2", "zero3")))
def gradients_that_wait_are_not_left_out(engine):
    """A step after a backward under `no_sync` alone is an error: the gradients that wait are not taken for unused."""
    pair = forked(engine, alike=True)
    with pair.trained.no_sync():
        pair.alone(0).backward()
    with refused("gradient", "no_sync"):
        pair.trained.step()
    pair.trained.zero_grad()
    pair.step_alone()
