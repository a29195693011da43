"""When collectives are issued, when they are waited for, and that all is right however late they run."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import zero1
import zero2
from zerolab.measure.timeline import Timeline
from zerolab.properties.fixtures import (
    ADAMW,
    VECTORS,
    Lanes,
    Pair,
    PartlyFrozen,
    Stack,
    a_step_on_vectors,
    grid,
    stack,
)
from zerolab.properties.property import STAGES, ask, ask_thorough, only, same, stages_hold


class Rooted(Stack):
    """A root that computes before the first unit and after the last: units to gather meanwhile."""

    def __init__(self, layers: int, width: int, reverse: bool):
        super().__init__(layers, width, reverse)
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.last(super().forward(self.first(x)))


# The chapters have names of their own for two of torch's collectives.
OF_CHAPTERS = {"all_gather_single": (zero1, "all_gather"), "reduce_scatter_single": (zero2, "reduce_scatter")}


@contextlib.contextmanager
def replaced(**functions):
    """`with replaced(all_reduce=function):` for `dist`, and for the chapters."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.multiple(dist, **functions))
        for name in OF_CHAPTERS.keys() & functions.keys():
            patches.enter_context(mock.patch.object(*OF_CHAPTERS[name], functions[name]))
        yield


@stages_hold(
    "order",
    only(("zero2", "zero3"), chapters=("zero2", "zero3")),
    only("zero3", root=True, chapters="zero3"),
    only(("zero2", "zero3"), 4, hybrid=True),
    ask_thorough("zero3", root=True, reverse=True),
)
def collectives_travel_while_the_rank_computes(engine, root=False, reverse=False, hybrid=False):
    """Between issuing a reduction or a prefetched gather and waiting for it the rank computes.

    So it does between the replicas' all-reduce of a shard, and the wait for it.
    """
    layers = 6
    options = {} if engine.like == "zero3" else {"bucket_mb": 4 * (16 * 16 + 16) / 2**20}
    model = stack(layers, 16, reverse, Rooted if root else Stack)
    trained = engine(model, ADAMW, group=grid() if hybrid else None, **options)
    for step in range(3):  # in the first forward ZeRO-3 learns the order, and the second is the first of its kind
        with Timeline() as seen:
            a_step_on_vectors(trained, step, 16)
    # The last reduction has no backward left to hide behind. Of replicas, whose all-reduce of a shard is issued when
    # the next bucket is, so have the last two all-reduces.
    expected = [True] * (layers + root - 1) + [False]
    expected = [True] * (2 * layers - 3) + [False] * 3 if hybrid else expected
    hidden = seen.computed_meanwhile("all-reduce", "reduce-scatter")
    same("reductions behind which the rank computes", hidden, expected)
    if engine.like == "zero3":
        # In forward the first gather has nothing in front of it, nor has the last unit's in backward. With a root the
        # first gather is the root's; in backward the root is gathered still, and its head hides the first.
        expected = [False] + [True] * (layers - 1) + [False] + [True] * (layers - 1)
        expected = [False] + [True] * layers + [True] * layers if root else expected
        same("gathers behind which the rank computes", seen.computed_meanwhile("all-gather"), expected)


@contextlib.contextmanager
def spoilt_until_they_run(start: Callable):
    """What collectives write into is NaN until they run, and their input still needed. When, `start` says.

    `start(name, run)` returns the work; `run(**more)` is the collective.
    """

    def spoiling(name, real):
        def issue(output, *inputs, async_op=False, **options):
            if not async_op:
                return real(output, *inputs, **options)
            if inputs:
                kept = inputs[0].clone()
                output.fill_(torch.nan)
                inputs[0].copy_(kept)  # it may be a part of the output
            return start(name, partial(real, output, *inputs, **options))

        return issue

    names = ("all_gather_single", "reduce_scatter_single", "all_reduce")
    with replaced(**{name: spoiling(name, getattr(dist, name)) for name in names}):
        yield


@dataclass(eq=False)
class _Late:
    """A collective that runs at the last moment that is allowed: inside `wait()`."""

    name: str
    run: Callable
    pending: list

    def wait(self):
        self.pending.remove(self)
        self.run()


@contextlib.contextmanager
def late_collectives():
    """A slow network. Yields the list of collectives that nobody has waited for yet."""
    pending: list[_Late] = []

    def start(name, run):
        pending.append(_Late(name, run, pending))
        return pending[-1]

    with spoilt_until_they_run(start):
        yield pending


@stages_hold(
    "order",
    ask("zero1", 3, chapters=STAGES, build=PartlyFrozen),
    ask("zero3", 3, build=Lanes),
    ask("zero2", 4, build=Lanes, hybrid=True),
)
def a_collective_may_run_as_late_as_its_wait(engine, build, hybrid=False):
    """All is right on a slow network, and none is forgotten, not even of a unit that was gathered ahead for nothing.

    A unit that all ranks skip, with `find_unused`, is no mistake.
    """
    options = {"find_unused": True, **VECTORS} if build is Lanes else {}
    pair = Pair(engine, build, ADAMW, group=grid() if hybrid else None, **options)
    with late_collectives() as pending:
        for step in range(4):
            pair.plain.skip = pair.model.skip = (None, 1, 3, 0)[step]
            pair.backward(step)
            pair.step()
            pair.model.skip = 2  # which is then gathered ahead for nothing
            with torch.no_grad():
                pair.trained(pair.own_batch(step)[0])
            pair.nothing_gathered("an evaluation")
            same("collectives that nobody has waited for", [work.name for work in pending], [])
    pair.same_weights()
