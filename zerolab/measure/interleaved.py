"""Step times that can be compared: all are alive, and each makes one step in turn.

So whatever disturbs the machine disturbs all of them.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from zerolab.run import process_group
from zerolab.run.process_group import Rank
from zerolab.run.progress import with_progress

WARM_UP = 2  # rounds


def take_turns(
    steps: dict[str, Callable[[], object] | None],
    rounds: int,
    me: Rank,
    meet: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """{name: seconds of each of `rounds` steps on the slowest rank}. A collective.

    A step is None on a rank that takes no part in it. `meet(name)` is called after each, before the ranks tell each
    other their times.
    """
    names, times = list(steps), {name: [] for name in steps}
    for turn in with_progress(range(WARM_UP + rounds), "rounds of steps", me.rank == 0):
        first = turn % len(names)  # nobody is always the first
        for name in names[first:] + names[:first]:
            dist.barrier()
            started, seconds = time.perf_counter(), 0.0
            if steps[name] is not None:
                steps[name]()
                if me.device.type != "cpu":
                    torch.accelerator.synchronize()
                seconds = time.perf_counter() - started
            meet(name)
            (slowest,) = process_group.largest([seconds], me)
            if turn >= WARM_UP:
                times[name].append(slowest)
    return times
