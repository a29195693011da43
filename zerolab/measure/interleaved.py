"""Step times that can be compared: all engines are alive and take turns, so what disturbs the machine disturbs all.

Also the ratios of such times over several launches of the referee, for a page and a notebook.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from zerolab.run import process_group
from zerolab.run.engines import PAIRS
from zerolab.run.process_group import World
from zerolab.run.progress import with_progress

WARM_UP = 2  # rounds


def take_turns(
    steps: dict[str, Callable[[], object] | None],
    rounds: int,
    world: World,
    wait_after: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """{name: seconds of each of `rounds` steps on the slowest rank}. A collective.

    A step is None on a rank that does not run this engine. `wait_after(name)` is called after each step, before the
    ranks compare their times.
    """
    names, times = list(steps), {name: [] for name in steps}
    for turn in with_progress(range(WARM_UP + rounds), "rounds of steps", world.rank == 0):
        first = turn % len(names)  # no engine is always the first
        for name in names[first:] + names[:first]:
            dist.barrier()
            started, seconds = time.perf_counter(), 0.0
            if steps[name] is not None:
                steps[name]()
                if world.device.type != "cpu":
                    torch.accelerator.synchronize()
                seconds = time.perf_counter() - started
            wait_after(name)
            (slowest,) = process_group.largest([seconds], world)
            if turn >= WARM_UP:
                times[name].append(slowest)
    return times


def ratios(reports: list[dict]) -> dict[str, list[float]]:
    """{"zero1 / ddp": [a value per report], ...}, from `step_ms` of engines that took turns in the same run."""
    found: dict[str, list[float]] = {}
    for report in reports:
        times = {name: run["step_ms"] for name, run in report["runs"].items() if run["step_ms"]}
        for name, base in [*PAIRS, *((name, "ddp") for name in times if name not in ("ddp", "single"))]:
            if name in times and base in times:
                found.setdefault(f"{name} / {base}", []).append(times[name] / times[base])
    return found
