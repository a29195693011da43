"""Results are correct even if collectives run as late as possible, and every collective is waited for."""

import contextlib
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import Blocks, Frozen, Recomputed, Recorder, Tied, seeded

import zero1
import zero2
import zerolab.engine.bucket
from conformance.pair import Pair


@dataclass(eq=False)
class Late:
    """A collective that runs at the last possible moment: inside `wait()`."""

    run: object
    pending: list

    def wait(self):
        self.pending.remove(self)
        self.run()


@contextlib.contextmanager
def collectives_started_by(start, *wrong_chapters):
    """Inside, an asynchronous collective is started by `start(collective)`, which returns what one waits for.

    `start` may run the collective later. The output is NaN until it runs, and it reads its input only then. This holds
    for the chapters, for our engines, and for modules of wrong chapters.
    """

    def late(real):
        def issue(output, *inputs, async_op=False, **options):
            if not async_op:
                return real(output, *inputs, **options)
            if inputs:
                kept = inputs[0].clone()
                output.fill_(torch.nan if output.is_floating_point() else 255)  # bytes of 255 are NaN, too
                inputs[0].copy_(kept)  # it may be a part of the output
            return start(partial(real, output, *inputs, **options))

        return issue

    gather, scatter = late(zero1.all_gather), late(zero2.reduce_scatter)
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(dist, "all_reduce", late(dist.all_reduce)))
        for module in (zero1, zero2, zerolab.engine.bucket, *wrong_chapters):
            for name, collective in (("all_gather", gather), ("reduce_scatter", scatter)):
                if hasattr(module, name):
                    patches.enter_context(mock.patch.object(module, name, collective))
        yield


@contextlib.contextmanager
def late_collectives(*wrong_chapters):
    """A slow network: collectives run in `wait()`. Yields the list of those that were not waited for yet."""
    pending = []

    def run_in_wait(collective):
        pending.append(Late(collective, pending))
        return pending[-1]

    with collectives_started_by(run_in_wait, *wrong_chapters):
        yield pending


zero2_reduce_scatter = zero2.reduce_scatter  # the real one, which `late_collectives` replaces

MODELS = {make.__name__: make for make in (Blocks, Frozen, Recomputed, Tied)}


@pytest.mark.ranks(2, thorough=(3,))
@pytest.mark.stages("zero1", "zero2", "zero3")
@pytest.mark.chapters
@pytest.mark.parametrize("model", MODELS)
def test_a_collective_may_run_as_late_as_its_wait(engine, model):
    """No result is used before its collective was waited for, and no collective is forgotten."""
    pair = Pair(engine, seeded(MODELS[model]))
    with late_collectives() as pending:
        for step in range(3):
            pair.backward(step)
            pair.step()
            with torch.no_grad():
                pair.trained(pair.batch(9)[0])
            assert not pending, "collectives that nobody has waited for"
    pair.check_weights()


class Skipping(Blocks):
    """A block that all ranks skip, so it was gathered ahead for nothing."""

    skip = None

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        for index, block in enumerate(self.blocks):
            x = x if index == self.skip else block(x)
        return self.head(x)


@pytest.mark.stages("zero2", "zero3")
def test_a_unit_that_was_gathered_for_nothing_is_waited_for(engine):
    """With `find_unused` a skipped unit is not an error, even if its gather is still in flight."""
    pair = Pair(engine, seeded(Skipping), find_unused=True)
    with late_collectives() as pending:
        for step in range(4):
            pair.plain.skip = pair.model.skip = (None, 1, 2, 0)[step]
            pair.backward(step)
            pair.step()
            assert not pending
    pair.check_weights()


@pytest.mark.stages("zero2", "zero3")
@pytest.mark.chapters
def test_backward_computes_while_a_reduction_is_in_flight(engine):
    """A reduction that is waited for right after it was started hides behind nothing."""
    options = {"bucket_mb": 0} if engine.like == "zero2" else {}
    pair = Pair(engine, seeded(Blocks), **options)
    with late_collectives() as pending:

        def in_flight():
            return [each for each in pending if each.run.func is zero2_reduce_scatter]

        with Recorder(probe=in_flight) as recorder:
            pair.backward(0)
        assert any(probed for name, probed in zip(recorder.operations, recorder.probed) if name == "mm")
        pair.step()
    pair.check_weights()
