"""Parameters that a step leaves unused: on some ranks or on all, with find_unused=True and without."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from harness.measure.traffic import TrafficLedger
from harness.properties.fixtures import DECAY, Pair, a_step, odd, own_tokens, seeded, token_batch
from harness.properties.property import STAGES, ask, ask_thorough, holds, only, refused, same, stages_hold


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
    batch, found = own_tokens(0), []
    for option in (False, True):
        trained = odd(engine, find_unused=option)
        a_step(trained)
        with TrafficLedger() as traffic:
            F.cross_entropy(trained(batch[0]), batch[1]).backward()
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
    with refused("no backward() was called", error=RuntimeError):
        trained.step()
    F.cross_entropy(trained(tokens, choice=1, early=True, spare=True)["a"], targets).backward()
    # ZeRO-3 names them unit by unit, the root at the end.
    words = "'blocks.0.adapters.0', 'blocks.0.adapters.2'" if engine.like == "zero3" else "'heads.b.weight'", " more"
    with refused(*words, "find_unused=True", "requires_grad_(False)", error=RuntimeError) as said:
        trained.step()
    others = [name for name in ("adapters.1", "'early'", "heads.a") if name in said[0]]
    same("parameters that are named and were used", others, [])


class Sparse(nn.Module):
    """A table whose gradient is sparse, and a layer with a weight that a forward may leave unused."""

    def __init__(self):
        super().__init__()
        # The first one's bucket is the last.
        self.spare, self.table = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(11, 3))

    def forward(self, tokens, spare: bool, sparse: bool):
        x = F.embedding(tokens, self.table, sparse=sparse).mean(1)
        return x * self.spare if spare else x


@holds("misuse", ask(chapters=STAGES), ask("zero1", chapters="zero1", bucket_mb=0))
def a_gradient_that_is_missing_or_sparse_is_refused(engine, **options):
    """A parameter without a gradient at the step, and a sparse gradient, are errors in words; then training goes on.

    No chapter's step sends anything before it has found that out: who goes on would write into what is in flight.
    """
    trained = engine(seeded(Sparse), DECAY, **options)
    tokens, targets = own_tokens(0)

    def train(spare, sparse):
        F.cross_entropy(trained(tokens, spare, sparse), targets).backward()
        trained.step()

    for _ in range(2):
        F.cross_entropy(trained(tokens, False, False), targets).backward()
        with TrafficLedger() as traffic, refused("'spare'", error=RuntimeError):
            trained.step()
        if engine.chapter:
            same("what a step sends that is refused", len(traffic.collectives), 0)
        trained.zero_grad()
        train(spare=True, sparse=False)
        trained.zero_grad()
    with refused("'table'", "sparse=False", error=RuntimeError):
        train(spare=True, sparse=True)


@stages_hold("misuse", only(("zero2", "zero3")))
def gradients_that_wait_are_not_left_out(engine):
    """A step after a backward under `no_sync` alone is an error: the gradients that wait are not taken for unused."""
    pair = forked(engine, alike=True)
    with pair.trained.no_sync():
        pair.alone(0).backward()
    with refused("gradient", "no_sync", error=RuntimeError):
        pair.trained.step()
    pair.trained.zero_grad()
    pair.step_alone()
