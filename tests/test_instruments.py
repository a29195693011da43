"""The ledgers, on cases whose answer is known by hand."""

import contextlib
import importlib
import io
import json
import re
import runpy
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import on_every_rank, seeded
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zero1 import all_gather
from zero2 import reduce_scatter
from zero3 import ZeRO3
from zerolab import measure
from zerolab.measure import intercept
from zerolab.measure import timeline as timelines
from zerolab.measure.held import engine_tensors, storage_bytes
from zerolab.measure.ledger import MemoryLedger, PartsLedger
from zerolab.measure.timeline import Span, Timeline, chrome_trace
from zerolab.measure.traffic import TrafficLedger
from zerolab.run.counterparts import PlainStep
from zerolab.run.engines import CHAPTERS

# On real ranks.


two_ranks = pytest.mark.parametrize("ranks", [2])
ADAMW = partial(torch.optim.AdamW, lr=1e-3, foreach=False)


class Stack(nn.Module):
    """Six layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def vector_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), both (1, 32), different on every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(1, 32, generator=generator), torch.randn(1, 32, generator=generator)


def silent_group():
    """A process group whose collectives move nothing and use no memory.

    Gloo reduces a copy of a reduce-scatter's input, and releases buffers from its own thread, a moment after `wait()`.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    return dist.new_group(backend="fake", group_desc="silent")


def built(stage: type, **options):
    """That chapter, around a stack of six layers."""
    model = seeded(Stack, dtype=torch.float32)
    return stage(model, ADAMW(model.parameters()), **options)


def plain(model: nn.Module) -> PlainStep:
    return PlainStep(model, ADAMW(model.parameters()))


@two_ranks
@on_every_rank
def test_ledgers_agree_on_an_open_engine(ranks):
    """A ledger that was there from the start, and one that is opened on the finished engine, count the same bytes."""
    batch = vector_batch()
    for stage in CHAPTERS.values():
        with MemoryLedger() as early:
            engine = built(stage, group=silent_group())
            # A copy: of a batch from outside the ledger would also count the batch that forward makes a view of.
            engine.training_step(*[part.clone() for part in batch], F.mse_loss)
        with MemoryLedger(engine) as late:
            assert late.live == storage_bytes(engine_tensors(engine)) == early.live
            engine.training_step(*[part.clone() for part in batch], F.mse_loss)
            assert late.live == early.live


@two_ranks
@on_every_rank
def test_the_timeline_of_a_step(ranks):
    """It has all six steps and every unit, and the collectives that the traffic ledger has."""
    batch = vector_batch()
    names_of_steps = []
    for stage in CHAPTERS.values():
        with Timeline() as construction:
            engine = built(stage)
        with TrafficLedger() as traffic, Timeline(engine) as timeline:
            engine.training_step(*batch, F.mse_loss)
        names_of_steps.append({span.name for span in construction.spans + timeline.spans if span.lane == "steps"})
        expected = [(c.kind, c.whole_bytes, c.step) for c in traffic.collectives]
        found = timeline.collectives
        assert [(span.name, span.nbytes, span.step) for span in found] == expected and expected
        assert all(0 <= span.start < span.end for span in found)
        units = {span.name for span in timeline.spans if span.lane == "compute"}
        assert {f"layers.{index}" for index in range(6)} <= units and "optimizer" in units, units
    first, *others = names_of_steps
    assert sorted(name[0] for name in first) == [*"012345"] and others == [first] * 2, names_of_steps


@two_ranks
@on_every_rank
def test_a_collectives_span(ranks):
    """From its issue to its completion, if nobody waits; to the end of the wait, if the backend reports no end."""
    whole, shard = torch.zeros(64), torch.ones(32)
    with Timeline() as timeline:
        issued = time.perf_counter()
        work = all_gather(whole, shard, async_op=True)
        span, patience = timeline._under_way[id(work)][1], time.perf_counter() + 30
        while span.end is None and time.perf_counter() < patience:
            time.sleep(0.001)
        ended = time.perf_counter()
        work.wait()
        work = reduce_scatter(shard, whole, async_op=True)
        time.sleep(0.01)
        waited = time.perf_counter()
        work.wait()
        done = time.perf_counter()
        time.sleep(0.01)
    gather, reduce = (span for span in timeline.spans if span.lane == "collectives")
    assert (gather.name, gather.nbytes) == ("all-gather", 256)
    assert (reduce.name, reduce.nbytes) == ("reduce-scatter", 256)
    assert issued <= gather.start + timeline.opened <= gather.end + timeline.opened <= ended < patience
    assert waited <= reduce.end + timeline.opened <= done  # gloo's ends inside the wait


# The timeline of a GPU, without one: events that are as strict as CUDA's.


class Current(threading.local):
    """The current device: each thread has its own, and the threads that a backend starts have the first."""

    device = 0


@contextlib.contextmanager
def gpus(device: int, clock=time.perf_counter):
    """This thread has that one of several GPUs, and `torch.cuda` events by `clock`. A stream is its device's number."""
    current = Current()
    current.device = device

    def stream(device=None) -> int:
        return current.device if device is None else torch.device(device).index

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.device, self.moment = stream, clock()

        def elapsed_time(self, other) -> float:
            assert self.device == other.device, f"events of cuda:{self.device} and cuda:{other.device}"
            return 1e3 * (other.moment - self.moment)

    with mock.patch.multiple(torch.cuda, Event=Event, current_stream=stream, synchronize=mock.Mock()):
        yield


@two_ranks
@on_every_rank
def test_gloo_on_the_second_gpu(ranks):
    """Gloo reports an end in its own thread, which knows nothing about the GPU."""
    whole, shard, reported = torch.zeros(64), torch.ones(32), threading.Event()
    with gpus(1), Timeline(device=torch.device("cuda", 1)) as timeline:
        work = all_gather(whole, shard, async_op=True)
        work.get_future().then(lambda _: reported.set())  # after what the timeline may have asked for
        assert reported.wait(30)
        before = time.perf_counter()
        work.wait()
        events = [timeline.now()]
        with ThreadPoolExecutor(1) as pool:  # memory may be freed in another thread
            events.append(pool.submit(timeline.now).result())
        after = time.perf_counter()
    (span,) = timeline.collectives
    # Counted from the first event, and not from `opened`, before which the host may have rested.
    assert not span.end_known and before <= timeline._origin.moment + span.end <= after
    assert [wait.collective for wait in timeline.waits] == [span]
    assert timeline.seconds(events[0]) <= timeline.seconds(events[1])


@two_ranks
@on_every_rank
def test_a_collective_without_a_work(ranks):
    """NCCL returns none if nobody is to wait later: such a collective is a wait of the stream that computes."""
    with (
        gpus(0),
        Timeline(device=torch.device("cuda", 0)) as timeline,
        mock.patch.object(dist.Work, "unbox", lambda _: None),
    ):
        values = torch.ones(8) * 2
        dist.all_reduce(values)
        values.add_(1)
    (span,), (wait,) = timeline.collectives, timeline.waits
    assert span.end_known and (wait.collective, wait.start, wait.end) == (span, span.start, span.end)
    computing = [(span.start, span.end) for span in timeline.spans if span.lane == "compute"]
    assert len(computing) == 2 and computing[0][1] <= span.start < span.end <= computing[1][0]


class Paced(TorchDispatchMode):
    """The host takes so many seconds to prepare each operation, and the GPU to run it. Nothing else takes time."""

    def __init__(self, dispatch: float, kernel: float):
        super().__init__()
        self.dispatch, self.kernel, self.host, self.free = dispatch, kernel, 0.0, 0.0

    def now(self) -> float:
        """When an event happens on the GPU that is recorded now."""
        return max(self.host, self.free)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.host += self.dispatch
        self.free = self.now() + self.kernel
        return func(*args, **(kwargs or {}))


def first_computation(dispatch: float, kernel: float) -> float:
    """When the GPU began to compute, in seconds."""
    paced = Paced(dispatch, kernel)
    host = mock.patch.object(timelines, "time", SimpleNamespace(perf_counter=lambda: paced.host))
    with host, gpus(0, paced.now), paced, Timeline(device=torch.device("cuda", 0)) as timeline:
        torch.ones(8)
    (computing,) = [span for span in timeline.spans if span.lane == "compute"]
    return computing.start


# In one process.


def test_a_storage_counts_once_and_whole():
    with MemoryLedger() as memory:
        a = torch.zeros(1000)
        views = [a[:10], a.view(10, 100).t(), a.detach()]
        assert memory.live == 4000
        b = a + 1
        assert memory.live == memory.peak == 8000
        del a
        assert memory.live == 8000  # the views keep the whole storage
        del views
        assert memory.live == 4000 and memory.peak == 8000
        memory.reset_peak()
        assert memory.peak == 4000
        del b
        assert memory.live == 0


def test_instruments_that_listen_may_stop_in_any_order():
    """Each sees what happens while it listens, and after the last one torch's own functions are there again."""
    plain, calls = torch.UntypedStorage.resize_, []

    def listener(name: str):
        @contextlib.contextmanager
        def around(storage, size):
            before = storage.nbytes()
            yield
            calls.append((name, before, storage.nbytes()))

        return around

    def resized() -> list:
        calls.clear()
        torch.zeros(1).untyped_storage().resize_(8)
        return [*calls]

    first, second = map(listener, ("first", "second"))
    intercept.RESIZE.listen(first)
    intercept.RESIZE.listen(second)
    assert resized() == [("second", 4, 8), ("first", 4, 8)]
    intercept.RESIZE.stop(first)  # the outer one, which a saved and restored method would not survive
    assert resized() == [("second", 4, 8)]
    intercept.RESIZE.stop(second)
    assert resized() == [] and torch.UntypedStorage.resize_ is plain


def test_a_resized_storage_counts_with_its_new_size():
    with MemoryLedger() as memory:
        a = torch.zeros(1000)
        a.untyped_storage().resize_(0)
        assert memory.live == 0
        a.untyped_storage().resize_(6000)
        assert memory.live == memory.peak == 6000


def test_what_autograd_saved_is_alive():
    weight = torch.zeros(50, 50, requires_grad=True)
    with MemoryLedger() as memory:
        x = torch.ones(20, 50)
        y = (x @ weight).exp()  # saves x for the weight's gradient, and its own result
        del x
        assert memory.live == 4 * (20 * 50 + 20 * 50)
        y.sum().backward()
        del y
        assert memory.live == 4 * 50 * 50  # the gradient
    assert storage_bytes([weight, weight.grad, weight.t(), weight[0]]) == 2 * 4 * 50 * 50


WEIGHT = 4 * 100 * 100  # bytes of one of the two layers below


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(100, 100, bias=False), nn.ReLU(), nn.Linear(100, 100, bias=False))


def squares(outputs, targets):
    return (outputs - targets).pow(2).sum()


def test_the_parts_of_an_unsharded_engine():
    engine = plain(two_layers())
    x, y = torch.ones(10, 100), torch.ones(10, 100)
    engine.training_step(x, y, squares)
    with PartsLedger(engine) as memory:
        engine.training_step(x, y, squares)
    moments = list(memory.moments())
    assert all(sum(moment.parts.values()) == moment.live for moment in moments)
    assert {moment.parts["parameters"] for moment in moments[2:]} == {2 * WEIGHT}
    assert moments[-1].parts["optimizer"] == 4 * WEIGHT + 8  # two moments a weight, and a counter of four bytes
    assert moments[-1].parts["gathered units"] == moments[-1].parts["gradients in flight"] == 0
    # Forward keeps what ReLU and the second layer share, and the difference that `pow` saves: 4,000 bytes each.
    forward = [moment for moment in moments if moment.step == "1 forward"][-1]
    assert 8_000 <= forward.parts["activations"] <= 8_000 + 8 and forward.parts["gradients"] == 0
    update = [moment for moment in moments if moment.step == "4 update the shard"]
    assert {moment.parts["gradients"] for moment in update} == {2 * WEIGHT}
    peak = memory.peak_moment()
    assert peak.live == memory.peak and peak.phase == "4 update the shard", peak
    assert peak.parts["temporaries"] > 0


class Recomputed(nn.Module):
    """(2x)² of a linear layer's output x, run again in backward: only the 2x that `pow` needs is an activation."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(100, 100, bias=False)

    def forward(self, x):
        return checkpoint(lambda x: (x * 2 + 1).mul(2).pow(2), self.layer(x), use_reentrant=False)


def test_what_is_run_again_is_an_activation_if_backward_needs_it():
    engine, x, y = plain(Recomputed()), torch.ones(10, 100), torch.ones(10, 100)
    with PartsLedger(engine) as memory:
        engine.training_step(x, y, squares)
    before = [moment for moment in memory.moments() if moment.step == "1 forward"][-1].parts["activations"]
    backward = [moment.parts["activations"] for moment in memory.moments() if moment.step == "2 backward"]
    # The layer's output and the loss's difference, and the loss; then, without the difference, what `pow` saves in the
    # second forward. The sum and the first product are gone when its backward goes on.
    assert before == 8_000 + 4 and max(backward) == 8_000 + 4 + 4, (before, backward)
    second = [moment.parts["activations"] for moment in memory.moments() if moment.module == "Recomputed"]
    assert second[-1] <= 4_000 + 8 and 8_000 <= max(second) <= 8_000 + 8, second


LISTING = textwrap.dedent(re.search(r"\n\n(    import .*?)\n\nheld ", measure.__doc__, re.DOTALL).group(1))


@two_ranks
@on_every_rank
def test_the_rooms_listing_runs(ranks):
    """The listing in zerolab/measure/__init__.py runs on an engine of the reader's."""
    inputs, targets = vector_batch()
    engine = built(ZeRO3)
    given = {"engine": engine, "inputs": inputs, "targets": targets, "loss_fn": F.mse_loss}
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        listing = Path(f"listing_{dist.get_rank()}.py")
        listing.write_text(LISTING)
        runpy.run_path(str(listing), init_globals=given)
        if dist.get_rank() == 0:
            trace = json.loads(Path("trace.json").read_text())
            assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C"}
    assert "all-gather" in printed.getvalue()


def test_memory_that_is_freed_while_a_step_starts():
    """A thread of gloo's frees a collective's buffer at any time: here while `start_step` looks at another."""
    with PartsLedger() as memory:
        alive = [torch.ones(number) for number in (3, 5, 7)]
        memory.clock = lambda: float(len(alive) > 2 and bool(alive.pop().numel()))
        memory.start_step()
        assert memory.live == 4 * (3 + 5) == [*memory.moments()][-1].live


@pytest.mark.parametrize("dispatch, kernel", [(1.0, 0.25), (0.125, 1.0)])
def test_a_gpu_that_waits_for_a_slow_host_does_not_compute(dispatch, kernel):
    """An operation begins when the host has launched it."""
    assert first_computation(dispatch, kernel) == dispatch


def test_the_trace_is_what_chrome_reads():
    """Spans that overlap have different threads, and times are microseconds. (The counters: tests/test_launch.py.)"""
    spans = [
        Span("steps", "1 forward", 0.0, 0.5),
        Span("collectives", "all-gather", 0.05, 0.15, step="5 gather parameters", nbytes=4000, unit="blocks.3"),
        Span("collectives", "all-gather", 0.12, 0.2),
        Span("collectives", "reduce-scatter", 0.15, 0.2),
        Span("collectives", "all-gather", 0.2, 0.3),
    ]
    trace = chrome_trace([spans, spans[:1]], title="a title")
    assert trace["otherData"] == {"title": "a title"}
    names = [event for event in trace["traceEvents"] if event["name"] == "thread_name"]
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in names}
    shown = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    found = [[event["pid"], threads[event["pid"], event["tid"]], event["ts"], event["dur"]] for event in shown]
    assert found == [  # rank, thread, microseconds from, and how many
        [0, "steps", 0, 500_000],
        [0, "all-gather", 50_000, 100_000],
        [0, "all-gather 2", 120_000, 80_000],
        [0, "reduce-scatter", 150_000, 50_000],
        [0, "all-gather", 200_000, 100_000],
        [1, "steps", 0, 500_000],
    ]
    assert shown[1]["args"] == {"step": "5 gather parameters", "bytes": 4000, "unit": "blocks.3"}
