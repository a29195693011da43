"""Where the time of a step goes on each rank: own work, waiting for the slowest rank, exposed communication.

Every moment of a rank's step belongs to exactly one of these, so their sum is the step:

    own         the rank does its own work: it computes, updates, or runs Python and autograd between two operations
    waiting     it waits for a collective that another rank has not issued yet
    exposed     it waits for a collective whose bytes are in flight

A collective begins to move bytes when the last of its ranks has issued it. Bytes that move while this rank does its own
work are **overlapped**: they cost no time.

`watch` measures steps, `divide` takes one step of one rank apart, `summary` makes it JSON, and `table` prints it. All
ranks must be on one machine, because the timelines of several ranks are compared, and only there they share a clock.
"""

import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from zerolab.measure import tables
from zerolab.measure.timeline import Span, Timeline, Wait
from zerolab.run.process_group import World, gathered
from zerolab.run.progress import with_progress

PARTS = ("own", "waiting", "exposed", "overlapped")
WATCHED_STEPS = 5  # of each engine, or as many as are timed


def divide(start: float, end: float, waits: list[Wait], collectives: list[Span]) -> dict:
    """The step from `start` to `end` of one rank, in seconds: {"step", "own", "waiting", "exposed", "overlapped",
    "told_late"}. Own work, waiting and exposed communication add up to "step".

    If `told_late`, the backend reports the end of a collective only when somebody waits for it. Then the overlapped
    time is an upper limit. All times are on one clock.
    """
    spent = Counter()
    reached, going_on = start, []  # what is going on, in the order in which it began
    for moment, begins, what in [*_changes(waits, collectives), (end, True, None)]:
        seconds = min(moment, end) - max(reached, start)
        if seconds > 0:
            awaited = next((each.collective for each in going_on if isinstance(each, Wait)), None)
            if awaited is not None and reached < awaited.moves:
                spent["waiting"] += seconds
            elif awaited in going_on:
                spent["exposed"] += seconds
            else:  # also when the collective has ended, and the host has not noticed yet
                spent["own"] += seconds
                if any(isinstance(each, Span) for each in going_on):
                    spent["overlapped"] += seconds
        reached = moment
        if begins:
            going_on.append(what)
        else:
            going_on.remove(what)
    late = any(not span.end_known and span.start < end and span.end > start for span in collectives)
    return {"step": end - start, **{part: spent[part] for part in PARTS}, "told_late": late}


def _changes(waits: list[Wait], collectives: list[Span]) -> list[tuple]:
    """(when, True if it begins or False if it ends, what) of everything, in order."""
    intervals = [(wait, wait.start, wait.end) for wait in waits]
    intervals += [(span, max(span.moves, span.start), span.end) for span in collectives]
    changes = []
    for what, start, stop in intervals:
        changes += [(start, True, what), (max(start, stop), False, what)]
    return sorted(changes, key=lambda change: change[0])


def last_issues(issued: list[list[tuple[tuple[int, ...], float]]], rank: int) -> list[float]:
    """When the last rank issued each of `rank`'s collectives, in their order.

    `issued[r]` has, for each collective of rank r in order, (its ranks, when r issued it) on one clock. A collective
    carries no name: the k-th one of a group on one rank meets the k-th one of that group on the others.
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


def watch(
    train: Callable[[], None] | None,
    steps: int,
    engine=None,
    device: torch.device | None = None,
    wait_after: Callable[[], None] = lambda: None,
) -> list[list[dict]]:
    """[what `divide` returns for each step] for each rank, of `steps` calls of `train` in a row. A collective.

    `train` is None on a rank that does not run it. There is no barrier between the steps, as in training. `wait_after`
    is called after them, before the ranks exchange what they have seen.
    """
    dist.barrier()
    marks = []
    with Timeline(engine, device) as timeline:
        for _ in range(steps if train is not None else 0):
            marks.append(timeline.now())
            train()
        marks.append(timeline.now())
    wait_after()
    shift = timeline.opened  # from the timeline's seconds to the machine's clock
    issued = gathered([(span.ranks, span.start + shift) for span in timeline.collectives])
    for span, moment in zip(timeline.collectives, last_issues(issued, dist.get_rank())):
        span.moves = moment - shift
    steps = pairwise(map(timeline.seconds, marks))
    return gathered([divide(start, end, timeline.waits, timeline.collectives) for start, end in steps])


def summary(ranks: list[list[dict]]) -> dict:
    """What `watch` returns, as JSON: milliseconds, means over the steps, and which rank was the slowest.

    {"steps": how many, "ranks": [{"rank", "step_ms", "own_ms", "waiting_ms", "exposed_ms", "overlapped_ms",
    "told_late", "steps_own_ms": [each]}], "slowest_rank": the one with the most own work, "slowest_in_steps": the
    steps, from 1 on, in which it was the slowest, "lead_ms": how much more own work it did than the next one}. Medians
    over the steps decide. With one rank the last three are None.
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
    row = {"rank": rank}
    row |= {f"{part}_ms": round(1e3 * statistics.fmean(step[part] for step in steps), 3) for part in ("step", *PARTS)}
    row["told_late"] = any(step["told_late"] for step in steps)
    row["steps_own_ms"] = [round(1e3 * step["own"], 3) for step in steps]
    return row


def _leads(row: dict, rows: list[dict]) -> list[float]:
    """How many milliseconds of own work more than every other rank this rank did in each step (negative: fewer)."""
    others = [other["steps_own_ms"] for other in rows if other is not row]
    return [own - max(theirs) for own, *theirs in zip(row["steps_own_ms"], *others)]


def break_down(
    runs: dict[str, dict],
    engines: dict[str, object],
    steps: dict[str, Callable[[], None] | None],
    timed_steps: int,
    world: World,
    wait_after: Callable[[str], None],
) -> None:
    """Fill in `step_time` of each run of the referee, from a few more steps on a timeline. A collective."""
    for name in with_progress(runs, "what a step is spent on", world.rank == 0):
        number = min(WATCHED_STEPS, timed_steps)
        watched = watch(steps[name], number, engines.get(name), world.device, partial(wait_after, name))
        runs[name]["step_time"] = summary(watched)


# As text.


LOOK_AT_OWN_WORK = """\
Look at own work. In synchronous training the step times of all ranks are equal, because each step takes as long as
the slowest rank. A slow rank has more own work, and the others wait for it.
"""
PARTS_OF_A_STEP = """\
own work: computation, optimizer, and the host between operations. waiting: another rank has not issued the
collective yet. exposed: the rank waits while bytes are in flight. overlapped: bytes are in flight during own
work, which costs no time; in %: of all the time in which bytes are in flight."""


def table(result: dict) -> str:
    """The referee's output with --breakdown, from the result that it writes as JSON."""
    runs = {name: run["step_time"] for name, run in result["runs"].items() if run.get("step_time")}
    steps = next(iter(runs.values()))["steps"]
    rows, clear, unclear = [], [], []
    for name, found in runs.items():
        rows += _rank_rows(name, found)
        if stands_out(found):
            clear.append(f"{name}: {slowest_rank(found)}")
        elif name != "single":
            unclear.append(name)
    title = f"Where the time of a step goes, per rank, in ms: means of {steps} more step(s)."
    lines = [title, LOOK_AT_OWN_WORK, *tables.text(tables.rows_of(rows)), PARTS_OF_A_STEP, *clear]
    if unclear:
        lines.append(f"No rank stands out: {', '.join(unclear)}.")
    if result["slow_rank"]:
        rank, seconds = result["slow_rank"]
        lines.append(f"--slow-rank: rank {rank} was delayed by {seconds * 1e3:g} ms in every timed step.")
        if "single" in runs:
            lines.append("single was not delayed: it is one process.")
    if any(row["overlapped"].startswith("<=") for row in rows):
        lines.append(
            "<=: an upper limit, because the backend reports the end of these collectives only to a rank that waits."
        )
    return "\n".join(lines)


def _rank_rows(name: str, found: dict) -> list[dict[str, str]]:
    rows = []
    for rank in found["ranks"]:
        slowest = stands_out(found) and rank["rank"] == found["slowest_rank"]
        exposed, overlapped = rank["exposed_ms"], rank["overlapped_ms"]
        least = "<=" if rank["told_late"] else ""
        rows.append({
            "engine": name,
            "rank": f"{rank['rank']} SLOWEST" if slowest else f"{rank['rank']}",
            "step": f"{rank['step_ms']:.1f}",
            "own work": f"{rank['own_ms']:.1f}",
            "waiting": f"{rank['waiting_ms']:.1f}",
            "exposed": f"{exposed:.1f}",
            "overlapped": f"{least}{overlapped:.1f}",
            "overlapped %": f"{least}{100 * overlapped / (exposed + overlapped):.0f}" if exposed + overlapped else "-",
        })  # fmt: skip
    return rows


def stands_out(found: dict) -> bool:
    """Whether one rank did more own work than every other in most of the steps, by 5% of a step or more."""
    if found["slowest_rank"] is None:
        return False
    step = max(rank["step_ms"] for rank in found["ranks"])
    return 2 * len(found["slowest_in_steps"]) > found["steps"] and found["lead_ms"] > 0.05 * step


def slowest_rank(found: dict) -> str:
    """A sentence: which rank is the slowest, in how many steps and by how much."""
    times = [rank["step_ms"] for rank in found["ranks"]]
    return (
        f"Rank {found['slowest_rank']} is the slowest, in {len(found['slowest_in_steps'])} of {found['steps']} "
        f"steps, by {found['lead_ms']:.1f} ms of own work. The step times of the ranks, waiting included, are "
        f"{min(times):.1f} to {max(times):.1f}."
    )
