"""The timeline: the recorder of a step's events.

It records when a rank computes and when its collectives are in flight, in which step and module. Users
see these events as the printed trace (step_trace.py), the Chrome trace (`chrome_trace`), the parts of a step's time
(step_time.py) and the page of extra/watch.
"""

import bisect
import contextlib
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from zerolab.measure import intercept
from zerolab.measure.held import (
    bucket_name,
    bucket_with,
    buckets_of,
    storage_under,
    tensor_leaves,
    unit_names,
    unit_of,
)
from zerolab.measure.position_in_step import PositionInStep
from zerolab.measure.traffic import group_of, kind_of, was_async, whole_bytes, works_in

STEPS, COMPUTE, COLLECTIVES = "steps", "compute", "collectives"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")  # the operations that can hide a collective


@dataclass
class Span:
    """Something that lasted from `start` to `end` (seconds since the timeline was opened), on one of three lanes.

    lane "steps"        a labelled step
    lane "compute"      the uninterrupted operations of one unit (or "root", or "optimizer") in one step
    lane "collectives"  a collective, from its issue to its end

    `step` is the innermost labelled step. A collective also has:

    nbytes     of the whole buffer
    ranks      the global ranks that it is for
    end_known  False if the backend did not report its end. Then `end` is when a wait for it returned
    later      it was issued to be waited for later (`async_op`)
    hides      this rank has multiplied matrices before it waited for it
    unit       its unit or bucket in a chapter or one of our engines, and "" elsewhere
    number     its index in `Timeline.collectives`
    moves      when the last of its ranks has issued it, so that bytes can move: filled in by step_time.py

    While the timeline is open, `start` and `end` are moments of its clock, and `end` is None if it has not ended.
    """

    lane: str
    name: str
    start: float
    end: float
    step: str = ""
    nbytes: int = 0
    ranks: tuple[int, ...] = ()
    end_known: bool = True
    later: bool = True
    hides: bool = False
    unit: str = ""
    number: int = -1
    moves: float = 0.0


@dataclass
class Wait:
    """From `start` to `end` this rank waited for the collective."""

    start: float
    end: float
    collective: Span


class Listener:
    """A timeline calls these methods while it is open. Override the ones that you need."""

    def step_begins(self, step: Span, depth: int) -> None:
        """A labelled step begins. The depth of the outermost is 1."""

    def step_ends(self, step: Span, depth: int) -> None:
        """It ends."""

    def computes(self, unit: str, step: str) -> None:
        """The rank begins to compute: for a different unit, in a different step, or again after a collective."""

    def multiplies(self) -> None:
        """The rank begins to multiply two matrices."""

    def resizes(self, bucket, grows: bool) -> None:
        """The whole buffer of this unit or bucket is about to get its memory, or to lose it."""

    def issues(self, collective: Span, tensors: list[torch.Tensor]) -> None:
        """A collective is about to be issued. The last of its tensors is its input."""

    def ended(self, collective: Span) -> None:
        """It has ended. A thread of the backend may call this."""

    def waited(self, collective: Span) -> None:
        """A wait for it has returned."""


class Timeline(TorchDispatchMode):
    """`with Timeline(engine) as timeline: engine.training_step(...)`; then `timeline.spans`, in order of their start.

    It watches from outside, like the ledgers, and listens to waits and resized storages (intercept.py). `listener`
    hears of the events while they happen. A collective ends when its backend reports it or when a wait for it returns,
    whichever is first. (Gloo reports no end of a reduce-scatter: it ends inside `wait`.) On CUDA the times are the
    GPU's: an event on the computing stream before and after each operation, and one where the collective ends. There an
    operation begins when the GPU has reached it *and* the host has launched it, because a GPU that waits for a slow
    host does not compute.

    For zerolab/measure/step_time.py it also records `collectives`, in the order of their issue, and `waits`. Their
    times are in the same seconds.
    """

    def __init__(self, engine=None, device: torch.device | None = None, listener: Listener | None = None):
        super().__init__()
        self.spans: list[Span] = []
        self._engine, self._listener = engine, listener or Listener()
        model = None if engine is None else engine.model
        self._units = set() if model is None else unit_names(model)
        self._where, self._model = PositionInStep(self), model
        self._device = device
        self._gpu = None if device is None or device.type == "cpu" else torch.get_device_module(device)
        self._steps: list[Span] = []  # that are open, outermost first
        self._computing: Span | None = None  # goes on until the rank waits or computes for another unit
        self._under_way: dict[int, tuple] = {}  # id of a collective's work -> (the work, its span)
        self.collectives: list[Span] = []
        self._ran: list[tuple] = []  # (when it was dispatched, its end) of each operation on the computing stream
        self.waits: list[Wait] = []
        self._futures: list[tuple] = []  # (future, span) of collectives in flight
        self._stream = None  # on CUDA the computing stream
        self._announced: tuple[str, str] | None = None  # the (unit, step) of the listener's last `computes`

    def now(self):
        """A moment, for other instruments. `seconds` converts it when the timeline is closed."""
        if not self._gpu:
            return time.perf_counter()
        event = self._gpu.Event(enable_timing=True)
        event.record(self._gpu.current_stream(self._device))  # a backend's thread may have a different device
        return event

    @property
    def labels(self) -> list[str]:
        """The open `record_function` labels, outermost first."""
        return [*self._where.labels]

    def under_way(self) -> list[Span]:
        """The collectives that were not waited for yet, in the order in which they were issued."""
        return [span for _, span in self._under_way.values()]

    def _at_work(self) -> tuple[str, str]:
        """(the unit, "root" or "optimizer" that the next operation computes for, the step)"""
        step = self._where.step
        if step.startswith("4"):
            return "optimizer", step
        unit = unit_of(self._where.module(), self._units) or "root"
        if any(label.startswith("FSDP::") for label in self._where.labels):
            return unit, "copies"  # FSDP2's work outside the model
        return unit, step

    def begins(self, step: str, depth: int) -> None:
        self._steps.append(Span(STEPS, step, self.now(), None))
        self.spans.append(self._steps[-1])
        self._listener.step_begins(self._steps[-1], depth)

    def ends(self, step: str, depth: int) -> None:
        span = self._steps.pop()
        span.end = self.now()
        self._listener.step_ends(span, depth)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._where.see(func, args)
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        at_work = self._at_work()
        start = self.now()
        self._look_for_ends(start)
        if func.namespace in ("c10d", "_c10d_functional"):
            kind = kind_of(func)
            span = None if kind is None else self._issue(kind, args, start, was_async(func, args))
            result = func(*args, **(kwargs or {}))
            if span is not None:
                self._follow(span, args, result)
            return result
        # A view computes nothing: autograd makes views of a weight before it asks for the weight itself.
        if (
            at_work != self._announced
            and at_work[1][:1] in ("1", "2")
            and func.namespace == "aten"
            and not func.is_view
        ):
            self._announced = at_work
            self._listener.computes(*at_work)
        if func._schema.name in PRODUCTS:
            self._listener.multiplies()
        result = func(*args, **(kwargs or {}))
        if func._schema.name in PRODUCTS:
            for _, span in self._under_way.values():
                span.hides = True
        # On a GPU, an operation has started when the GPU has reached it and the host has launched it.
        started = (start, time.perf_counter()) if self._gpu else start
        last = self._computing
        if last is None or (last.name, last.step) != at_work:
            self._computing = last = Span(COMPUTE, at_work[0], started, None, at_work[1])
            self.spans.append(last)
        last.end = self.now()
        if self._is_computing():
            self._ran.append((start, last.end))
        return result

    def _is_computing(self) -> bool:
        """Whether the current stream is the computing one. FSDP2 copies and waits on its own streams."""
        return not self._gpu or self._gpu.current_stream() == self._stream

    def computed_meanwhile(self, *kinds: str) -> list[bool]:
        """Of each collective of these kinds with `later`: whether it hides behind matrix products."""
        return [span.hides for span in self.collectives if span.name in kinds and span.later]

    def _issue(self, kind: str, args, start, later: bool) -> Span:
        """The span of a collective that is about to be issued."""
        ranks = tuple(dist.get_process_group_ranks(group_of(args)))
        span = Span(COLLECTIVES, kind, start, None, self._where.step, whole_bytes(kind, args), ranks, later=later)
        span.number = len(self.collectives)
        tensors = tensor_leaves(args[:2])
        bucket = bucket_with(self._engine, tensors)
        span.unit = "" if bucket is None else bucket_name(self._engine, bucket)
        self.spans.append(span)
        self.collectives.append(span)
        self._announced = None
        self._listener.issues(span, tensors)
        return span

    def _follow(self, span: Span, args, result) -> None:
        """The collective was issued: note its end, now or later."""
        start = span.start
        for work in works_in(result):
            if work is None:  # NCCL without async_op: it has run on the current stream, in order
                self._computing = None
                self._ended(span)
                if self._is_computing():
                    self.waits.append(Wait(start, span.end, span))
                return
            self._under_way[id(work)] = (work, span)
            if self._gpu and dist.get_backend(group_of(args)) == "gloo":  # it reports when the *host* has the result
                span.end_known = False
                return
            try:
                future = work.get_future()
            except RuntimeError:  # gloo's reduce-scatter has none
                span.end_known = False
                return
            future.then(lambda _: self._ended(span))
            self._futures.append((future, span))

    def _look_for_ends(self, now) -> None:
        """End the collectives that have ended since the last operation. On a CPU their callbacks are late."""
        if self._futures and not self._gpu:
            for future, span in self._futures:
                if future.done():
                    self._ended(span, now)
            self._futures = [pair for pair in self._futures if pair[1].end is None]

    def _ended(self, span: Span, now=None) -> None:
        if span.end is None:
            span.end = now or self.now()  # on CUDA a callback runs on a stream that waits for the collective
            self._listener.ended(span)

    @contextlib.contextmanager
    def _around_wait(self, work, *timeout):
        self._computing = None
        start = self.now()
        try:
            yield
        finally:
            _, span = self._under_way.pop(id(work), (None, None))
            if span is not None:
                self._ended(span)
                if self._is_computing():
                    self.waits.append(Wait(start, self.now(), span))
                self._listener.waited(span)

    @contextlib.contextmanager
    def _around_resize(self, storage: torch.UntypedStorage, size: int):
        for bucket in buckets_of(self._engine):
            if storage_under(bucket.flat)._cdata == storage._cdata:
                self._listener.resizes(bucket, size > 0)
        yield

    def __enter__(self):
        self._where.open()
        self._where.forget(self._model)
        intercept.WAIT.listen(self._around_wait)
        intercept.RESIZE.listen(self._around_resize)
        if self._gpu:
            self._stream = self._gpu.current_stream()
            self._gpu.synchronize()  # so that the GPU and the host have the same origin
        self._origin = self.now()
        self.opened = time.perf_counter() if self._gpu else self._origin  # for other instruments' times
        return super().__enter__()

    def __exit__(self, *exception):
        result = super().__exit__(*exception)
        intercept.WAIT.stop(self._around_wait)
        intercept.RESIZE.stop(self._around_resize)
        self._where.close()
        end = self.now()
        if self._gpu:
            self._gpu.synchronize()
        for each in (*self.spans, *self.waits):
            stop = end if each.end is None else each.end  # there was no wait for it inside the `with`
            each.start, each.end = self._interval(each.start, stop)
        self._find_waits()
        for several in (self.spans, self.waits):
            several.sort(key=lambda each: each.start)
        self._futures, self._ran, self._under_way = [], [], {}
        return result

    def _find_waits(self) -> None:
        """Add the waits that Python did not call: inside C++, as in DDP's reducer, or between streams, as in FSDP2.

        They leave a gap between two operations in which a collective ended. So the gap, up to that end, was a wait,
        unless Python has waited for the collective.
        """
        known = {wait.collective.number for wait in self.waits}
        slack = 5e-5 if self._gpu else 0.0  # a collective's end is recorded on another stream, a moment later
        ran = [self._interval(dispatched, end) for dispatched, end in self._ran]
        reached = 0.0  # the end of the last wait: several collectives may end in one gap
        for span in sorted(self.collectives, key=lambda span: span.end):
            place = bisect.bisect_left(ran, (span.end - slack,))
            if span.number in known or not 0 < place < len(ran):
                continue
            (_, before), (after, _) = ran[place - 1 : place + 1]
            start, stop = max(before, span.start, reached), min(span.end, after)
            if start < stop:
                self.waits.append(Wait(start, stop, span))
                reached = stop

    def _interval(self, start, stop) -> tuple[float, float]:
        """(start, end) in seconds. `start` may be a pair of moments: the later one counts."""
        start = max(map(self.seconds, start)) if isinstance(start, tuple) else self.seconds(start)
        stop = self.seconds(stop)
        return min(start, stop), stop  # the clocks of host and GPU differ by a few microseconds

    def seconds(self, moment) -> float:
        if isinstance(moment, float):  # of the host's clock
            return moment - self.opened
        return self._origin.elapsed_time(moment) / 1000


def chrome_trace(ranks: list[list[Span]], live: list[list[tuple]] | None = None, **about) -> dict:
    """The JSON that chrome://tracing and ui.perfetto.dev open: a process per rank, a thread per lane.

    `ranks` has the spans of each rank, and `live` the (seconds, bytes alive) of each rank, for a counter. `about` goes
    into the file unchanged.
    """
    events = []
    for rank, spans in enumerate(ranks):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        threads: dict[str, float] = {}  # name -> when it becomes free
        for span in spans:
            # Spans of one thread must not overlap, unless they are nested, like steps.
            lane = _free_thread(span, threads) if span.lane == COLLECTIVES else span.lane
            threads[lane] = max(span.end, threads.get(lane, 0.0))
            arguments = {"step": span.step, "unit": span.unit, "bytes": span.nbytes}
            events.append({
                "ph": "X",
                "pid": rank,
                "tid": list(threads).index(lane),
                "name": f"step {span.name}" if span.lane == STEPS else span.name,
                "cat": span.lane,
                "ts": round(span.start * 1e6, 1),
                "dur": round((span.end - span.start) * 1e6, 1),
                "args": {what: value for what, value in arguments.items() if value},
            })  # fmt: skip
        for thread, name in enumerate(threads):
            events.append({"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}})
        for seconds, nbytes in live[rank] if live else ():
            megabytes = {"MB": round(nbytes / 1e6, 3)}
            events.append({"ph": "C", "pid": rank, "ts": round(seconds * 1e6, 1), "name": "live", "args": megabytes})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _free_thread(span: Span, threads: dict[str, float]) -> str:
    """ "all-gather", or "all-gather 2" while another one is in flight, and so on."""
    names = [span.name, *(f"{span.name} {number}" for number in range(2, len(threads) + 3))]
    return next(name for name in names if threads.get(name, 0.0) <= span.start)
