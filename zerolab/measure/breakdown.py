"""What a step's time is spent on, for each engine of the referee: `compare --breakdown`."""

from collections.abc import Callable
from functools import partial

from zerolab.measure import step_time
from zerolab.run import process_group
from zerolab.run.process_group import Rank
from zerolab.run.progress import with_progress

STEPS = 5  # of each engine on the timeline, or as many as are timed


def add(
    runs: dict[str, dict],
    engines: dict[str, object],
    steps: dict[str, Callable[[], None] | None],
    timed_steps: int,
    me: Rank,
    meet: Callable[[str], None],
) -> None:
    """Fill in `step_time` of each run: some steps on a timeline, one after the other as in training. A collective."""
    offset, unsure = step_time.clock_offset()
    [unsure] = process_group.largest([1e3 * unsure], me)
    for name in with_progress(runs, "what a step is spent on", me.rank == 0):
        number = min(STEPS, timed_steps)
        watched = step_time.watch(steps[name], number, engines.get(name), me.device, offset, partial(meet, name))
        runs[name]["step_time"] = {"clocks_unsure_by_ms": round(unsure, 4), **step_time.summary(watched)}
