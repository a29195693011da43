"""The recording of one rank: where its bytes are, what it computes, sends and waits for, under which labels."""

import time
from functools import partial

import torch
import torch.distributed as dist

from extra.watch.cell_ledger import CellLedger
from extra.watch.recordable import Recordable
from extra.watch.rows_of_cells import Row
from extra.watch.weight_versions import WeightVersions
from zerolab.measure.held import optimizer_of, unit_names, unit_of
from zerolab.measure.timeline import COMPUTE, STEPS, Span, Timeline
from zerolab.run import process_group
from zerolab.run.process_group import World


class RecordingLedger(CellLedger):
    """A `CellLedger` that also samples the weights: when a unit computes, is gathered or updated, and at the end.

    It also keeps the `record_function` labels that were open at each event of the timeline, at the update, and when a
    storage was freed.
    """

    def __init__(self, *args):
        self.freed_under: dict[int, list[str]] = {}  # index among the ledger's events -> labels
        self._timeline: Timeline | None = None
        super().__init__(*args)

    def labels(self) -> list[str]:
        return [] if self._timeline is None else self._timeline.labels

    def _note(self, number: int, nbytes: int) -> None:
        super()._note(number, nbytes)
        if not nbytes:
            self.freed_under[len(self._events) - 1] = self.labels()

    def start(self, timeline: Timeline) -> None:
        """The recorded step begins now, with `timeline` open."""
        self.clock, self.versions = timeline.now, WeightVersions(self.rank)
        self.updated, self.updated_under = None, []
        self.units = units_of(self.rows, unit_names(self._engine.model))
        self.computations: list[tuple] = []  # (moment, unit, step, labels) of each computation
        self.began_under: dict[int, list[str]] = {}  # id of a step's span -> labels
        self.issued_under: list[list[str]] = []  # of each collective
        self.ended_under: dict[int, list[str]] = {}  # index of a collective -> labels
        self._timeline = timeline
        optimizer = optimizer_of(self._engine)
        self._handles.append(optimizer.register_step_post_hook(lambda *_: self._after_update()))
        self._look(range(len(self.rows)))

    def step_begins(self, step: Span, depth: int) -> None:
        self.began_under[id(step)] = self.labels()

    def issues(self, collective: Span, tensors: list[torch.Tensor]) -> None:
        super().issues(collective, tensors)
        self.issued_under.append(self.labels())

    def ended(self, collective: Span) -> None:
        self.ended_under[collective.number] = self.labels()

    def waited(self, collective: Span) -> None:
        self._look(self._gathered([collective]))

    def computes(self, unit: str, step: str) -> None:
        if self.computations and self.computations[-1][1:3] == (unit, step):
            return  # it continues after a collective
        self.computations.append((self.clock(), unit, step, self.labels()))
        under_way = self._gathered(self._timeline.under_way())  # these weights are not complete yet
        self._look(row for row in self.units.get(unit, ()) if row not in under_way)

    def _gathered(self, collectives: list[Span]) -> set[int]:
        """The rows whose weights are in the output of these all-gathers. (FSDP2 copies them to a different place.)"""
        gathers = [collective.number for collective in collectives if collective.name == "all-gather"]
        rows = {self.collective_rows[number] for number in gathers} - {None}
        return {row for row in rows if not self.rows[row].stretches[0].by_parameter}

    def stop(self) -> None:
        self._look(range(len(self.rows)))
        self.clock = time.perf_counter

    def _look(self, rows, moment=None) -> None:
        for row in rows:
            self.versions.look(self.rows[row], moment or self.clock())

    def _after_update(self) -> None:
        self.updated, self.updated_under = self.clock(), self.labels()
        self._look(range(len(self.rows)), self.updated)


def units_of(rows: list[Row], names: set[str]) -> dict[str, list[int]]:
    """{unit: indexes of the rows with its parameters}. "root" has the parameters outside all units."""
    found: dict[str, dict[int, None]] = {}
    for number, row in enumerate(rows):
        for name in parameters_of(row):
            unit = unit_of(name.removeprefix("module."), names) or unit_of(name, names) or "root"
            found.setdefault(unit, {})[number] = None
    return {unit: [*numbers] for unit, numbers in found.items()}


def parameters_of(row: Row) -> list[str]:
    """The names of a row's parameters, in the model's order."""
    found = []
    for stretch in row.stretches:
        found += stretch.names
    return found


def is_sharded(row: Row) -> bool:
    return any(stretch.bucket is not None or stretch.by_parameter for stretch in row.stretches)


def record(run: Recordable, world: World, tries: int = 1) -> dict:
    """Build `run`'s engine, train it and record `tries` steps. Returns this rank's recording of the fastest.

    The fastest step is the one in which the slowest rank took the least time. All ranks call this together. Times are
    seconds of the host's `time.perf_counter`. An exception inside the step is recorded as "error".
    """
    tries = 1 if run.once else tries
    loop, seen = run.loop(world, run.warm_up + tries), []
    with RecordingLedger(None, world.rank, world.world_size) as memory:
        engine = loop.build()
        for number in range(run.warm_up):
            memory.start_step(engine)
            loop.step(engine, number)
        for number in range(run.warm_up, run.warm_up + tries):
            seen.append(_one_step(partial(loop.step, engine, number), engine, memory, world))
            seen[-1]["chapter"] = run.chapter
    if tries == 1:
        return seen[0]  # it may have failed, and then the ranks cannot use a collective any more
    taken = process_group.largest([each["ends"] - each["started"] for each in seen], world)
    return seen[taken.index(min(taken))]


def _one_step(step, engine, memory: RecordingLedger, world: World) -> dict:
    error = None
    memory.start_step(engine)
    dist.barrier()
    timeline = Timeline(engine, world.device, memory)
    try:
        with timeline:
            memory.start(timeline)
            try:
                step()
            finally:
                ended = timeline.now()
                memory.stop()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}".splitlines()[0]
    return _plain(memory, timeline, ended, error, world)


def _plain(memory: RecordingLedger, timeline: Timeline, ended, error: str | None, world: World) -> dict:
    def at(moment) -> float:
        return opened + timeline.seconds(moment)

    opened = timeline.opened
    return {
        "rank": world.rank,
        "started": opened,
        "ends": at(ended),
        "error": error,
        "rows": [{"name": row.name, "nbytes": row.nbytes, "parameters": _described(row)} for row in memory.rows],
        "shards": any(map(is_sharded, memory.rows)),
        "units": memory.units,
        "changes": [[at(c.moment), c.row, c.column, c.layer, c.cells, c.freed, c.nbytes,
                     memory.freed_under[c.event] if c.freed else []] for c in memory.changes()],
        "live": [(at(moment.when), dict(moment.parts)) for moment in memory.moments()],
        "steps": [[s.name, opened + s.start, opened + s.end, memory.began_under[id(s)]]
                  for s in timeline.spans if s.lane == STEPS],
        "work": [[s.name, s.step, opened + s.start, opened + s.end] for s in timeline.spans if s.lane == COMPUTE],
        "computations": [[at(moment), unit, step, labels] for moment, unit, step, labels in memory.computations],
        "collectives": [[s.name, row, s.nbytes, s.step, opened + s.start, opened + s.end, s.ranks, s.end_known,
                         memory.issued_under[s.number], memory.ended_under.get(s.number, [])]
                        for s, row in zip(timeline.collectives, memory.collective_rows)],
        "waits": [[opened + w.start, opened + w.end, w.collective.number] for w in timeline.waits],
        "versions": [[at(moment), row, layer, cells] for moment, row, layer, cells in memory.versions.seen()],
        "updated": None if memory.updated is None else at(memory.updated),
        "updated_under": memory.updated_under,
    }  # fmt: skip


def _described(row: Row) -> str:
    """ "blocks.0.norm1.weight to blocks.0.down.bias": what the row's parameters are, in the model's order."""
    names = parameters_of(row)
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
