"""The instruments on real ranks."""

import contextlib
import json
import threading
import time
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest import mock

import parts
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from harness.measure import timeline as timelines
from harness.measure import walkthrough
from harness.measure.memory import MemoryLedger, engine_tensors, storage_bytes
from harness.measure.parts import PartsLedger
from harness.measure.timeline import Timeline
from harness.measure.traffic import TrafficLedger
from harness.run.data import Batches
from harness.run.model import GPT, PRESETS
from harness.run.process_group import Rank

ADAMW = partial(torch.optim.AdamW, lr=1e-3, foreach=False)


def stack() -> parts.Stack:
    return parts.seeded(lambda: parts.Stack(6, 32), dtype=torch.float32)


def ledgers_agree_on_an_open_engine() -> None:
    """A ledger that was there from the start, and one that is opened on the finished engine, count the same bytes."""
    batch = parts.vector_batch(0, dist.get_rank(), 32)
    for stage in parts.STAGES.values():
        with MemoryLedger() as early:
            engine = stage(stack(), ADAMW, group=parts.silent_group())
            engine.training_step(*batch, F.mse_loss)
        with MemoryLedger(engine) as late:
            assert late.live == storage_bytes(engine_tensors(engine)) == early.live
            engine.training_step(*batch, F.mse_loss)
            assert late.live == early.live


def timeline_of_a_step(stage: str) -> list[str]:
    """Returns the names of the steps seen in construction and one step; checks the spans against the traffic ledger."""
    with Timeline() as construction:
        engine = parts.STAGES[stage](stack(), ADAMW)
    batch = parts.vector_batch(0, dist.get_rank(), 32)
    with TrafficLedger() as traffic, Timeline(engine) as timeline:
        engine.training_step(*batch, F.mse_loss)
    collectives = [span for span in timeline.spans if span.lane == "collectives"]
    expected = [(c.kind, c.whole_bytes, c.step.removeprefix("step ")) for c in traffic.collectives]
    assert [(span.name, span.nbytes, span.step) for span in collectives] == expected and expected
    units = {span.name for span in timeline.spans if span.lane == "compute"}
    assert {f"layers.{index}" for index in range(6)} <= units and "optimizer" in units, units
    last = max(span.end for span in timeline.spans)
    assert all(0 <= span.start <= span.end <= last for span in timeline.spans)
    assert all(span.end > span.start for span in collectives)
    steps = [span.name for span in construction.spans + timeline.spans if span.lane == "steps"]
    return sorted(set(steps))


def a_unit_that_stays_gathered() -> None:
    """An engine that frees nothing holds, right after its forward, all that it has gathered."""
    alive = {}
    for leaks in (False, True):
        engine = parts.ZeRO3(stack(), ADAMW, group=parts.silent_group())
        x, y = parts.vector_batch(0, dist.get_rank(), 32)
        engine.training_step(x, y, F.mse_loss)
        if leaks:
            engine._free = lambda unit: None
        with PartsLedger(engine) as memory:
            outputs = engine(x)
        alive[leaks] = list(memory.moments())[-1].parts["gathered units"]
        del outputs
        gathered = sum(bucket.numel * 4 for bucket in engine.buckets)
    assert alive == {False: 0, True: gathered}, (alive, gathered)


def a_collectives_span() -> None:
    """From its issue to its completion, if nobody waits; to the end of the wait, where the backend tells nothing."""
    whole, shard = torch.zeros(64), torch.ones(32)
    with Timeline() as timeline:
        issued = time.perf_counter()
        work = dist.all_gather_single(whole, shard, async_op=True)
        (_, entry), patience = timeline._under_way[id(work)], time.perf_counter() + 30
        while entry[3] is None and time.perf_counter() < patience:
            time.sleep(0.001)
        told = time.perf_counter()
        work.wait()
        work = dist.reduce_scatter_single(shard, whole, async_op=True)
        time.sleep(0.01)
        waited = time.perf_counter()
        work.wait()
        done = time.perf_counter()
        time.sleep(0.01)
    gather, reduce = (span for span in timeline.spans if span.lane == "collectives")
    assert (gather.name, gather.nbytes) == ("all-gather", 256)
    assert (reduce.name, reduce.nbytes) == ("reduce-scatter", 256)
    assert issued <= gather.start + timeline.opened <= gather.end + timeline.opened <= told < patience
    if dist.get_backend() == "gloo":  # its reduce-scatter ends inside the wait
        assert waited <= reduce.end + timeline.opened <= done


# The timeline of a GPU, without one: events that are as strict as CUDA's.


@dataclass(frozen=True)
class Stream:
    device: int


class Current(threading.local):
    """The current device: each thread has its own, and the threads that a backend starts have the first."""

    device = 0


class Gpus(TorchDispatchMode):
    """`with Gpus(1) as gpus:` this thread has the second of several GPUs, and `torch.cuda` these events and streams.

    The clocks are time itself; for a GPU `speed` times as fast. Or, with `dispatch` and `kernel` (seconds), the host
    takes so long to prepare each operation, and the GPU to run it: then both clocks go on by nothing else.
    """

    def __init__(self, device: int, speed: float = 1.0, dispatch: float | None = None, kernel: float = 0.0):
        super().__init__()
        self.current, self.speed, self.dispatch, self.kernel = Current(), speed, dispatch, kernel
        self.current.device, self.host, self.free, gpus = device, 0.0, 0.0, self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self, stream=None):
                self.device = (stream or gpus.stream()).device
                self.moment = gpus.now()

            def elapsed_time(self, other) -> float:
                assert self.device == other.device, f"events of cuda:{self.device} and cuda:{other.device}"
                return 1e3 * (other.moment - self.moment)

        self.patches = contextlib.ExitStack()
        self.new = {"Event": Event, "current_stream": self.stream, "synchronize": lambda *_: None,
                    "get_device_name": lambda *_: "a GPU"}  # fmt: skip

    def stream(self, device=None) -> Stream:
        return Stream(self.current.device if device is None else torch.device(device).index)

    def now(self) -> float:
        """When an event happens that is recorded now."""
        return self.speed * time.perf_counter() if self.dispatch is None else max(self.host, self.free)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.dispatch is not None:
            self.host += self.dispatch
            self.free = max(self.free, self.host) + self.kernel
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.patches.enter_context(mock.patch.multiple(torch.cuda, **self.new))
        if self.dispatch is not None:
            clock = SimpleNamespace(perf_counter=lambda: self.host)
            self.patches.enter_context(mock.patch.object(timelines, "time", clock))
        return super().__enter__()

    def __exit__(self, *exception):
        self.patches.close()
        return super().__exit__(*exception)


def gloo_on_the_second_gpu() -> None:
    """Gloo tells of an end in a thread of its own. There is nothing to be known of the GPU there."""
    whole, shard, told = torch.zeros(64), torch.ones(32), threading.Event()
    with Gpus(1), Timeline(device=torch.device("cuda", 1)) as timeline:
        work = dist.all_gather_single(whole, shard, async_op=True)
        work.get_future().then(lambda _: told.set())  # after what the timeline may have asked for
        assert told.wait(30)
        before = time.perf_counter()
        work.wait()
        events = [timeline.now()]
        thread = threading.Thread(target=lambda: events.append(timeline.now()))  # memory may be freed in such a thread
        thread.start()
        thread.join()
        after = time.perf_counter()
    (span,) = timeline.collectives
    assert not span.told and before <= timeline.opened + span.end <= after
    assert [wait.collective for wait in timeline.waits] == [0]
    assert timeline.seconds(events[0]) <= timeline.seconds(events[1])


def a_collective_without_a_work() -> None:
    """NCCL returns none if nobody is to wait later: such a collective is a wait of the stream that computes."""
    with (
        Gpus(0),
        Timeline(device=torch.device("cuda", 0)) as timeline,
        mock.patch.object(dist.Work, "unbox", lambda _: None),
    ):
        values = torch.ones(8) * 2
        dist.all_reduce(values)
        values.add_(1)
    (span,), (wait,) = timeline.collectives, timeline.waits
    assert span.told and (wait.collective, wait.start, wait.end) == (0, span.start, span.end)
    computing = [(span.start, span.end) for span in timeline.spans if span.lane == "compute"]
    assert len(computing) == 2 and computing[0][1] <= span.start < span.end <= computing[1][0]


def memory_and_spans_on_one_clock(folder: str) -> None:
    """The trace of a step on a GPU whose clock is not the host's: the memory's curve is as long as the spans."""
    with Gpus(0, speed=1000.0):
        me = Rank(dist.get_rank(), dist.get_world_size(), torch.device("cuda", 0), "gloo", "")
        config, options = PRESETS["toy"], SimpleNamespace(trace=f"{folder}/trace.json", preset="toy", accumulate=1)
        batch = Batches(torch.arange(1000) % config.vocab, 1, config.seq, 0, torch.device("cpu"))(0, me.rank)
        with Timeline(device=me.device) as partition:
            engine = parts.ZeRO3(GPT(config), ADAMW)
        walkthrough._trace(engine, partition.spans, batch, me, options, {})
    if me.rank == 0:
        with open(options.trace) as file:
            trace = json.load(file)
        begins = 1e3 * trace["otherData"]["step_begins_ms"]
        spans = [event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X"]
        curve = [event["ts"] for event in trace["traceEvents"] if event["ph"] == "C"]
        lengths = [max(moments) - begins for moments in (curve, spans)]
        assert 0.5 < lengths[0] / lengths[1] < 2, lengths


def computing_with(dispatch: float, kernel: float) -> tuple[int, float, float]:
    """(operations, seconds in which the GPU computed by `operations`, and by the spans)"""
    with Gpus(0, dispatch=dispatch, kernel=kernel), Timeline(device=torch.device("cuda", 0)) as timeline:
        values = torch.ones(8)
        for _ in range(3):
            values = values * 2
    computing = [span for span in timeline.spans if span.lane == "compute"]
    seconds = sum(end - start for start, end in timeline.operations)
    return len(timeline.operations), seconds, computing[0].start
