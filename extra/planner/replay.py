"""The replay: how long the events of a step take on a cluster.

A GPU has two queues: one of operations, and one of collectives. The host puts the events into them, one after the
other. Each queue runs in order, and the two run at the same time. Every rank does the same at the same time, so one
rank's queues determine the step.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import NamedTuple

from extra.planner.events import Collective, Event, Operation, Wait
from extra.planner.hardware import Cluster


class Times(NamedTuple):
    """Seconds of one step: in all, of operations, of collectives, and those in which only a collective ran."""

    step: float
    compute: float
    communication: float
    exposed: float


def replay(events: Iterable[Event], cluster: Cluster) -> Times:
    """The times of these events. Raises IndexError for a wait without a collective."""
    host = 0.0  # when the host has issued the event
    now = 0.0  # when the operations so far are over, and the waits between them
    free = 0.0  # when the collectives so far are over
    compute = communication = together = 0.0
    ends = defaultdict(deque)  # by kind: when the collectives end that nobody has waited for yet
    for event in events:
        if isinstance(event, Operation):
            host += cluster.launch
            begins, seconds = max(now, host), cluster.seconds(event)
            # While a collective runs, the operation takes longer, because both use the GPU.
            slow = min(seconds, max(0.0, free - begins) / (1 + cluster.slowdown))
            now = begins + seconds + slow * cluster.slowdown
            compute += now - begins
            together += slow * (1 + cluster.slowdown)
        elif isinstance(event, Collective):
            host += cluster.issue
            seconds = cluster.collective_seconds(event)
            free = max(free, now, host) + seconds
            communication += seconds
            ends[event.kind].append(free)
        elif isinstance(event, Wait):
            now = max(now, ends[event.kind].popleft())
    return Times(max(now, free), compute, communication, communication - together)
