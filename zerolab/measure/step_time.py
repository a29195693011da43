"""Where the time of a step goes, per rank: own work, waiting for the slowest rank, moving bytes, and what overlaps.

Every moment of a rank's step belongs to exactly one of these, so their sum is the step:

    compute     an operation of forward, backward or a reduction runs
    optimizer   an operation of step 4 runs
    host        between operations, and nobody is waited for: Python, autograd, the data; on a GPU it idles meanwhile
    waiting     this rank cannot go on, because another one has not issued the collective yet
    exposed     this rank cannot go on, because bytes are on their way: per kind of collective

The first three are a rank's **own work**. A collective begins to move bytes when the last of its ranks has issued it.
Bytes that move while this rank does its own work are **overlapped**: they cost nothing.
"""

import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
import torch.distributed as dist

from zerolab.measure.timeline import STEPS, Span, Timeline, Wait
from zerolab.run.process_group import gathered

Interval = tuple[float, float]
OWN = ("compute", "optimizer", "host")
UPDATE = "4 update the shard"
OPERATION = "operation"


def divide(
    begin: float,
    end: float,
    operations: list[Interval],
    updates: list[Interval],
    waits: list[Wait],
    collectives: list[Span],
) -> dict:
    """The step from `begin` to `end` of one rank, in seconds: {"step", "compute", "optimizer", "host", "waiting",
    "exposed": {kind: s}, "overlapped": {kind: s}, "told_late"}. All but the last two add up to "step". "told_late" are
    the kinds whose end the backend does not tell before they are waited for: their overlapped time is at most that.

    `updates` are the times of step 4. All on one clock.
    """
    spent, exposed, overlapped = Counter(), Counter(), Counter()
    reached, going_on = begin, []  # what goes on, in the order in which it began
    for moment, begins, what in [*_changes(operations, updates, waits, collectives), (end, True, None)]:
        seconds = min(moment, end) - max(reached, begin)
        if seconds > 0:
            awaited = next((each.collective for each in going_on if isinstance(each, Wait)), None)
            moving = next((each for each in going_on if isinstance(each, Span)), None)
            if awaited is not None and reached < awaited.moves:
                spent["waiting"] += seconds
            elif awaited in going_on:
                exposed[awaited.name] += seconds
            else:  # when the collective has ended, the host still has to notice
                working = "optimizer" if UPDATE in going_on else "compute"
                spent[working if OPERATION in going_on else "host"] += seconds
                if moving is not None:  # two at a time count once, for the one that began first
                    overlapped[moving.name] += seconds
        reached = moment
        (going_on.append if begins else going_on.remove)(what)
    late = {span.name for span in collectives if not span.told and span.start < end and span.end > begin}
    return {"step": end - begin, **{part: spent[part] for part in (*OWN, "waiting")}, "exposed": dict(exposed),
            "overlapped": dict(overlapped), "told_late": sorted(late)}  # fmt: skip


def _changes(operations, updates, waits, collectives) -> list[tuple]:
    """(when, whether it begins or ends, what) of all that goes on, in order."""
    intervals = [(OPERATION, *times) for times in operations]
    intervals += [(UPDATE, *times) for times in updates]
    intervals += [(wait, wait.start, wait.end) for wait in waits]
    intervals += [(span, max(span.moves, span.start), span.end) for span in collectives]
    changes = []
    for what, start, stop in intervals:
        changes += [(start, True, what), (max(start, stop), False, what)]
    return sorted(changes, key=lambda change: change[0])


def last_issues(issued: list[list[tuple[tuple[int, ...], float]]], rank: int) -> list[float]:
    """When the last rank issued each of `rank`'s collectives, in their order.

    `issued[r]` has, for each collective of rank r in order, (ranks that take part, when r issued it) on one clock. A
    collective carries no name: the k-th one of a group on one rank meets the k-th of that group on the others.
    """
    latest, of_rank = {}, []
    for other, own in enumerate(issued):
        seen = Counter()
        for ranks, start in own:
            key = ranks, seen[ranks]
            seen[ranks] += 1
            latest[key] = max(start, latest.get(key, start))
            if other == rank:
                of_rank.append(key)
    return [latest[key] for key in of_rank]


def machine() -> str:
    """What processes with one clock share: the boot of their machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return platform.node()


def clock_offset(here: str | None = None, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """(how far this rank's clock is ahead of rank 0's, how far off that may be), both in seconds. A collective.

    On one machine all processes read one clock: (0, 0). Else it is bounded by barriers: no rank leaves one before
    every rank has entered it. The error is at most half of the shortest barrier that was seen.
    """
    if len(set(gathered(here or machine()))) == 1:
        return 0.0, 0.0
    moments = []
    for _ in range(20):
        entered = clock()
        dist.barrier()
        if dist.get_backend() != "gloo":
            torch.accelerator.synchronize()
        moments.append((entered, clock()))
    theirs = [moments]
    dist.broadcast_object_list(theirs, src=0)
    least = max(own[0] - other[1] for own, other in zip(moments, theirs[0]))
    most = min(own[1] - other[0] for own, other in zip(moments, theirs[0]))
    return ((least + most) / 2, (most - least) / 2) if dist.get_rank() else (0.0, 0.0)


def watch(train: Callable[[], None] | None, steps: int, engine=None, device: torch.device | None = None,
          offset: float = 0.0, meet: Callable[[], None] = lambda: None) -> list[list[dict]]:  # fmt: skip
    """[what `divide` returns for each step] for each rank, of `steps` calls of `train` in a row. A collective.

    `train` is None on a rank that takes no part. `offset` is this rank's `clock_offset`. There is no barrier between
    the steps, as in training. `meet` is called after them, before the ranks tell each other.
    """
    dist.barrier()
    marks = []
    with Timeline(engine, device) as timeline:
        for _ in range(steps if train is not None else 0):
            marks.append(timeline.now())
            train()
        marks.append(timeline.now())
    meet()
    shift = timeline.opened - offset  # from the timeline's seconds to rank 0's clock
    issued = gathered([(span.ranks, span.start + shift) for span in timeline.collectives])
    for span, moment in zip(timeline.collectives, last_issues(issued, dist.get_rank())):
        span.moves = moment - shift
    updates = [(span.start, span.end) for span in timeline.spans if span.lane == STEPS and span.name == UPDATE]
    of_rank = timeline.operations, updates, timeline.waits, timeline.collectives
    return gathered([divide(*step, *of_rank) for step in pairwise(map(timeline.seconds, marks))])


def own_work(step: dict) -> float:
    """Seconds of a step that this rank worked itself: neither waiting nor for bytes."""
    return sum(step[part] for part in OWN)


def summary(ranks: list[list[dict]]) -> dict:
    """What goes into a report's JSON, from `watch`: milliseconds, means over the steps, and who was the slowest.

    {"steps": how many, "ranks": [{"rank", "step_ms", "own_ms", "compute_ms", "optimizer_ms", "host_ms", "waiting_ms",
    "exposed_ms": {kind: ms}, "overlapped_ms": {kind: ms}, "told_late", "steps_own_ms": [each]}], "slowest_rank": the
    one that did the most own work, "slowest_in_steps": numbers of the steps, from 1, in which it was, "lead_ms": by how
    much more than the next}; the medians of the steps decide. The last three are None where only one rank took part.
    """
    rows = [_of_rank(rank, steps) for rank, steps in enumerate(ranks) if steps]
    found = {"steps": max(map(len, ranks)), "ranks": rows}
    if len(rows) < 2:
        return found | {"slowest_rank": None, "slowest_in_steps": None, "lead_ms": None}
    leads = {row["rank"]: _leads(row, rows) for row in rows}
    slowest = max(leads, key=lambda rank: statistics.median(leads[rank]))
    return found | {
        "slowest_rank": slowest,
        "slowest_in_steps": [number for number, more in enumerate(leads[slowest], 1) if more > 0],
        "lead_ms": round(statistics.median(leads[slowest]), 3),
    }


def _of_rank(rank: int, steps: list[dict]) -> dict:
    row = {"rank": rank, "step_ms": _mean(step["step"] for step in steps), "own_ms": _mean(map(own_work, steps))}
    row |= {f"{part}_ms": _mean(step[part] for step in steps) for part in (*OWN, "waiting")}
    for which in ("exposed", "overlapped"):
        kinds = set().union(*(step["exposed"] | step["overlapped"] for step in steps))
        row[f"{which}_ms"] = {kind: _mean(step[which].get(kind, 0.0) for step in steps) for kind in sorted(kinds)}
    row["told_late"] = sorted(set().union(*(step["told_late"] for step in steps)))
    row["steps_own_ms"] = [round(own_work(step) * 1e3, 3) for step in steps]
    return row


def _leads(row: dict, rows: list[dict]) -> list[float]:
    """By how many milliseconds of own work this rank was ahead of the next, or behind the first, in each step."""
    others = [other["steps_own_ms"] for other in rows if other is not row]
    return [own - max(theirs) for own, *theirs in zip(row["steps_own_ms"], *others)]


def _mean(seconds: Iterable[float]) -> float:
    return round(statistics.fmean(seconds) * 1e3, 3)
