"""The recording of one rank: where its bytes are, what it computes, sends and waits for, under which labels."""

import time

import torch.distributed as dist

from extra.watch.cell_ledger import CellLedger
from extra.watch.recordable import Recordable
from extra.watch.rows_of_cells import Row
from zerolab.measure.held import optimizer_of, unit_names, unit_of
from zerolab.measure.timeline import COMPUTE, STEPS, Span, Timeline
from zerolab.run.process_group import World


class RecordingLedger(CellLedger):
    """A `CellLedger` that also notes what the rank computes, and when it updates.

    With each event it keeps the `record_function` labels that were open.
    """

    def __init__(self, rank: int, ranks: int):
        self.freed_under: dict[int, list[str]] = {}  # index among the ledger's events -> labels
        self._timeline: Timeline | None = None
        super().__init__(rank, ranks)

    def start(self, timeline: Timeline) -> None:
        """The recorded step begins now, with `timeline` open."""
        self._timeline = timeline
        self.updated, self.updated_under = None, []
        self.computations: list[tuple] = []  # (moment, unit, step, labels) of each computation
        self.began_under: dict[int, list[str]] = {}  # id of a step's span -> labels
        self.issued_under: list[list[str]] = []  # of each collective
        self.ended_under: dict[int, list[str]] = {}  # index of a collective -> labels
        optimizer = optimizer_of(self._engine)
        self._handles.append(optimizer.register_step_post_hook(lambda *_: self._after_update()))

    def labels(self) -> list[str]:
        return [] if self._timeline is None else self._timeline.labels

    def _note(self, number: int, nbytes: int) -> None:
        super()._note(number, nbytes)
        if not nbytes:
            self.freed_under[len(self._events) - 1] = self.labels()

    def step_begins(self, step: Span, depth: int) -> None:
        self.began_under[id(step)] = self.labels()

    def issues(self, collective: Span, tensors: list) -> None:
        super().issues(collective, tensors)
        self.issued_under.append(self.labels())

    def ended(self, collective: Span) -> None:
        self.ended_under[collective.number] = self.labels()

    def computes(self, unit: str, step: str) -> None:
        if self.computations and self.computations[-1][1:3] == (unit, step):
            return  # it continues after a collective
        self.computations.append((time.perf_counter(), unit, step, self.labels()))

    def _after_update(self) -> None:
        self.updated, self.updated_under = time.perf_counter(), self.labels()


def units_of(rows: list[Row], names: set[str]) -> dict[str, list[int]]:
    """{unit: indexes of the rows with its parameters}. "root" has the parameters outside all units."""
    found: dict[str, dict[int, None]] = {}
    for number, row in enumerate(rows):
        for name in row.parameters:
            unit = unit_of(name.removeprefix("module."), names) or unit_of(name, names) or "root"
            found.setdefault(unit, {})[number] = None
    return {unit: [*numbers] for unit, numbers in found.items()}


def record(run: Recordable, world: World) -> dict:
    """Build `run`'s engine, train it and record one step. All ranks call this together.

    Times are seconds of `time.perf_counter`. An exception inside the step is recorded as "error".
    """
    loop, error = run.loop(world, run.warm_up + 1), None
    with RecordingLedger(world.rank, world.world_size) as memory:
        engine = loop.build()
        for number in range(run.warm_up):
            memory.start_step(engine)
            loop.step(engine, number)
        memory.start_step(engine)
        dist.barrier()
        timeline = Timeline(engine, world.device, memory)
        try:
            with timeline:
                memory.start(timeline)
                try:
                    loop.step(engine, run.warm_up)
                finally:
                    ended = time.perf_counter()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
        units = units_of(memory.rows, unit_names(engine.model))
    return _plain(memory, timeline, ended, world.rank) | {"units": units, "error": error, "chapter": run.chapter}


def _plain(memory: RecordingLedger, timeline: Timeline, ended: float, rank: int) -> dict:
    opened = timeline.opened
    return {
        "rank": rank,
        "started": opened,
        "ends": ended,
        "rows": [{"name": row.name, "nbytes": row.nbytes, "parameters": row.described()} for row in memory.rows],
        "shards": any(row.is_sharded() for row in memory.rows),
        "changes": [[c.moment, c.row, c.column, c.layer, c.cells, c.freed, c.nbytes,
                     memory.freed_under[c.event] if c.freed else []] for c in memory.changes()],
        "live": [(moment.when, dict(moment.parts)) for moment in memory.moments()],
        "steps": [[s.name, opened + s.start, opened + s.end, memory.began_under[id(s)]]
                  for s in timeline.spans if s.lane == STEPS],
        "work": [[s.name, s.step, opened + s.start, opened + s.end] for s in timeline.spans if s.lane == COMPUTE],
        "computations": memory.computations,
        "collectives": [[s.name, row, s.nbytes, s.step, opened + s.start, opened + s.end, s.ranks,
                         memory.issued_under[s.number], memory.ended_under.get(s.number, [])]
                        for s, row in zip(timeline.collectives, memory.collective_rows)],
        "waits": [[opened + w.start, opened + w.end, w.collective.number] for w in timeline.waits],
        "updated": memory.updated,
        "updated_under": memory.updated_under,
    }  # fmt: skip
