"""The timeline: when a rank computes, when its collectives are under way, in which step and module."""

import json
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from harness.engine.units import default_units
from harness.measure.traffic import KINDS, whole_bytes
from harness.measure.where import Where

STEPS, COMPUTE, COLLECTIVES = "steps", "compute", "collectives"


@dataclass(frozen=True)
class Span:
    """Something that took from `start` to `end` (seconds since the timeline was opened), on one of three lanes.

    On lane "steps" a labelled step; on "compute" the uninterrupted operations of one unit (or "root", or "optimizer")
    in one step; on "collectives" a collective, from its issue to its end. `module` is the unit, `step` the innermost.
    """

    lane: str
    name: str
    start: float
    end: float
    step: str = ""
    nbytes: int = 0


class Timeline(TorchDispatchMode):
    """`with Timeline(engine) as timeline: engine.training_step(...)`; then `timeline.spans`, in order of their start.

    Watches from outside, like the ledgers. A collective ends when its backend says so, or when somebody has waited for
    it, whichever is first (gloo's reduce-scatter says nothing: it ends inside `wait`). On CUDA the times are those of
    the GPU: an event on the stream that computes before and after each operation, and one where the collective ends.
    """

    def __init__(self, engine=None, device: torch.device | None = None):
        super().__init__()
        self.spans: list[Span] = []
        model = None if engine is None else engine.model
        self._units = set() if model is None else _unit_names(model)
        self._where, self._model = Where(), model
        self._cuda = device is not None and device.type == "cuda"
        self._open_steps: list[tuple] = []
        self._raw: list[list] = []  # [lane, name, start, end, step, nbytes], times not yet in seconds
        self._computing: list | None = None  # the entry that goes on, until the rank waits or works for another unit
        self._under_way: dict[int, tuple] = {}  # id of a collective's work -> (it, its entry in `_raw`)

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _unit(self) -> str:
        """The unit at work: the part of the module's name that is one, or the root."""
        if self._where.step.startswith("4"):
            return "optimizer"
        parts = self._where.module().split(".")
        prefixes = (".".join(parts[: end + 1]) for end in range(len(parts)))
        return next((prefix for prefix in prefixes if prefix in self._units), "root")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func.namespace, func._schema.name.split("::")[1]
        self._where.see(f"{namespace}.{name}", args)
        if namespace == "profiler":
            if name == "_record_function_enter_new":
                self._open_steps.append((args[0], self._now()))
            elif name == "_record_function_exit" and self._open_steps:
                label, start = self._open_steps.pop()
                if label.startswith("step "):
                    self._raw.append([STEPS, label.removeprefix("step "), start, self._now(), "", 0])
            return func(*args, **(kwargs or {}))
        start = self._now()
        result = func(*args, **(kwargs or {}))
        if namespace in ("c10d", "_c10d_functional"):
            if name in KINDS:
                self._collective(KINDS[name], args, result, start)
            return result
        unit, step, last = self._unit(), self._where.step, self._computing
        if last is None or (last[1], last[4]) != (unit, step):
            self._computing = last = [COMPUTE, unit, start, None, step, 0]
            self._raw.append(last)
        last[3] = self._now()
        return result

    def _collective(self, kind: str, args, result, start) -> None:
        entry = [COLLECTIVES, kind, start, None, self._where.step, whole_bytes(kind, args)]
        self._raw.append(entry)
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.ScriptObject):
                work = dist.Work.unbox(leaf)
                self._under_way[id(work)] = (work, entry)
                try:
                    future = work.get_future()
                except RuntimeError:
                    return  # gloo's reduce-scatter has none
                future.then(lambda _: self._ended(entry))

    def _ended(self, entry: list) -> None:
        if entry[3] is None:
            entry[3] = self._now()  # on CUDA a callback runs on a stream that has waited for the collective

    def __enter__(self):
        self._where.open()
        self._where.forget(self._model)
        self._plain_wait = dist.Work.wait
        timeline = self

        def wait(work, *timeout):
            timeline._computing = None
            try:
                return timeline._plain_wait(work, *timeout)
            finally:
                _, entry = timeline._under_way.pop(id(work), (None, None))
                if entry is not None:
                    timeline._ended(entry)

        dist.Work.wait = wait
        self.opened = time.perf_counter()  # for other instruments' times
        self._origin = self._now()
        return super().__enter__()

    def __exit__(self, *exception):
        result = super().__exit__(*exception)
        dist.Work.wait = self._plain_wait
        self._where.close()
        end = self._now()
        if self._cuda:
            torch.cuda.synchronize()
        for lane, name, start, stop, step, nbytes in self._raw:
            stop = end if stop is None else stop  # nobody has waited for it inside the `with`
            self.spans.append(Span(lane, name, self._seconds(start), self._seconds(stop), step, nbytes))
        self.spans.sort(key=lambda span: span.start)
        self._raw, self._under_way = [], {}
        return result

    def _seconds(self, moment) -> float:
        return self._origin.elapsed_time(moment) / 1000 if self._cuda else moment - self._origin


def _unit_names(model) -> set[str]:
    units = {id(unit) for unit in default_units(model)}
    return {name for name, module in model.named_modules() if id(module) in units}


def chrome_trace(ranks: list[list[Span]], live: list[list[tuple[float, int]]] | None = None, **about) -> dict:
    """The JSON that chrome://tracing and ui.perfetto.dev open: a process per rank, a thread per lane.

    `ranks` has the spans of each rank; `live`, of each rank, (seconds, bytes alive) for a counter above them; `about`
    is kept as it is.
    """
    events = []
    for rank, spans in enumerate(ranks):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        threads: dict[str, float] = {}  # name -> until when it is busy
        for span in spans:
            name = f"step {span.name}" if span.lane == STEPS else span.name
            # What overlaps cannot stand on one thread, unless it nests, as steps do.
            lane = _free_thread(span, threads) if span.lane == COLLECTIVES else span.lane
            threads[lane] = max(span.end, threads.get(lane, 0.0))
            arguments = {"step": span.step} if span.step else {}
            if span.nbytes:
                arguments["bytes"] = span.nbytes
            event = {"ph": "X", "pid": rank, "tid": list(threads).index(lane), "name": name, "cat": span.lane}
            times = {"ts": round(span.start * 1e6, 1), "dur": round((span.end - span.start) * 1e6, 1)}
            events.append(event | times | {"args": arguments})
        for thread, name in enumerate(threads):
            events.append({"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}})
        for seconds, nbytes in live[rank] if live else ():
            counter = {"MB": round(nbytes / 1e6, 3)}
            events.append({"ph": "C", "pid": rank, "name": "live", "ts": round(seconds * 1e6, 1), "args": counter})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _free_thread(span: Span, threads: dict[str, float]) -> str:
    """ "all-gather", or "all-gather 2" while another one is under way, and so on."""
    names = [span.name, *(f"{span.name} {number}" for number in range(2, len(threads) + 3))]
    return next(name for name in names if threads.get(name, 0.0) <= span.start)


def save_trace(path: str, trace: dict) -> None:
    with open(path, "w") as file:
        json.dump(trace, file)
        file.write("\n")
