"""When collectives are issued, when they are waited for, and that all is right however late they run."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.measure.timeline import Timeline
from harness.properties import parts
from harness.properties.models import PartlyFrozen, Skipping
from harness.properties.property import holds, same
from harness.properties.training import Pair


class Rooted(parts.Stack):
    """A root that computes before the first unit and after the last: units to gather meanwhile."""

    def __init__(self, layers: int, width: int, reverse: bool):
        super().__init__(layers, width, reverse)
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.last(super().forward(self.first(x)))


@contextlib.contextmanager
def replaced(**functions):
    """`torch.distributed` with some functions replaced."""
    real = {name: getattr(dist, name) for name in functions}
    for name, function in functions.items():
        setattr(dist, name, function)
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


@holds("order", engines=("zero2", "zero3"), cases=(
    {"root": False, "reverse": False}, {"root": True, "reverse": False, "on": ("zero3",)},
    {"root": True, "reverse": True, "on": ("zero3",)}))  # fmt: skip
def collectives_travel_while_the_rank_computes(engine, root, reverse):
    """Between issuing a reduction or a prefetched gather and waiting for it the rank computes."""
    engine.needs("zero2", "zero3")
    rank, layers = dist.get_rank(), 6
    options = {} if engine.like == "zero3" else {"bucket_mb": 4 * (16 * 16 + 16) / 2**20}
    kind = Rooted if root else parts.Stack
    model = parts.seeded(lambda: kind(layers, 16, reverse), dtype=torch.float32)
    trained = engine(model, parts.ADAMW, **options)
    for _ in range(2):  # in the first forward ZeRO-3 learns the order, and the second is the first of its kind
        trained.training_step(*parts.vector_batch(0, rank, 16), F.mse_loss)

    with Timeline() as seen:
        trained.training_step(*parts.vector_batch(1, rank, 16), F.mse_loss)
    # The last reduction has no backward left to hide behind.
    expected = [True] * (layers + root - 1) + [False]
    hidden = seen.computed_meanwhile("all-reduce", "reduce-scatter")
    same("reductions behind which the rank computes", hidden, expected, step=3)
    if engine.like == "zero3":
        # In forward the first gather has nothing in front of it, nor has the last unit's in backward. With a root the
        # first gather is the root's; in backward the root is gathered still, and its head hides the first.
        expected = [False] + [True] * (layers - 1) + [False] + [True] * (layers - 1)
        expected = [False] + [True] * layers + [True] * layers if root else expected
        same("gathers behind which the rank computes", seen.computed_meanwhile("all-gather"), expected, step=2)


class _Late:
    """A collective that runs at the last moment that is allowed: inside `wait()`."""

    def __init__(self, name: str, run, pending: list):
        self.name, self.run, self.pending = name, run, pending
        pending.append(self)

    def wait(self):
        self.pending.remove(self)
        self.run()


@contextlib.contextmanager
def late_collectives():
    """A slow network: until a collective is waited for its output is NaN and its input still needed.

    Yields the list of those that nobody has waited for yet.
    """
    pending: list[_Late] = []

    def late(name, real):
        def issue(output, *inputs, async_op=False, **options):
            if not async_op:
                return real(output, *inputs, **options)
            if inputs:
                kept = inputs[0].clone()
                output.fill_(torch.nan)
                inputs[0].copy_(kept)  # it may be a part of the output
            return _Late(name, lambda: real(output, *inputs, **options), pending)

        return issue

    names = ("all_gather_single", "reduce_scatter_single", "all_reduce")
    with replaced(**{name: late(name, getattr(dist, name)) for name in names}):
        yield pending


@holds("order", sizes=(3,), further_sizes=(2,), cases=({"skips": False}, {"skips": True}))
def a_collective_may_run_as_late_as_its_wait(engine, skips):
    """All is right on a slow network, and none is forgotten, not even of a unit that was gathered ahead for nothing."""
    if skips:
        pair = Pair(engine, lambda: Skipping((8, 9, 8, 9)), parts.ADAMW, find_unused=True,
                    loss=lambda model, x, y: F.mse_loss(model(x), y),
                    batch=lambda step, who: parts.vector_batch(step, who, 8, torch.float64))  # fmt: skip
    else:
        pair = Pair(engine, PartlyFrozen, parts.ADAMW)
    with late_collectives() as pending:
        for step in range(4):
            pair.plain.skip = pair.trained.model.skip = (None, 1, 3, None)[step]
            pair.backward(step)
            pair.step()
            pair.trained.model.skip = 2  # which is then gathered ahead for nothing
            with torch.no_grad():
                pair.trained(pair.batch(step, pair.rank)[0])
            pair.nothing_gathered("an evaluation", 1)
            same("collectives that nobody has waited for", [work.name for work in pending], [])
    pair.same_weights()
