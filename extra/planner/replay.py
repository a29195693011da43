"""The replay: the events of a step, run through the queues of one GPU, with a cluster's times.

Every rank does the same at the same time, so one rank's queues determine the step. The host issues one event after the
other. An operation begins when the host has launched it, its stream has reached it, and everything that the stream
waits for is over. A collective begins when its stream has reached it and the earlier ones of its group are over.
Computation during a collective takes a little longer, because both use the GPU.
"""

from collections import deque
from dataclasses import dataclass, field

from extra.planner.events import COMPUTE, Await, Collective, Event, Mark, Operation, Wait
from extra.planner.hardware import Cluster

EPSILON = 1e-12


@dataclass
class Times:
    """Seconds of one step, in which kernels ran, of collectives by kind, and in which nothing was computed."""

    step: float = 0.0
    compute: float = 0.0
    collectives: dict[str, float] = field(default_factory=dict)
    exposed: float = 0.0

    @property
    def communication(self) -> float:
        return sum(self.collectives.values())


@dataclass
class _Item:
    """Work in a queue: it takes `seconds`, begins after other items, and not before the host has issued it.

    `until`: it does not end before this time. This is for merged kernels, if the host was late for one of them.
    """

    name: str
    seconds: float
    ready: float = 0.0
    until: float = 0.0
    after: list["_Item"] = field(default_factory=list)
    collective: bool = False
    start: float | None = None
    over: bool = False


def queues(events: tuple[Event, ...], cluster: Cluster) -> dict[str, deque[_Item]]:
    """The queues of the streams and groups, with their dependencies."""
    found: dict[str, deque[_Item]] = {COMPUTE: deque()}
    last: dict[str, list[_Item]] = {}  # stream -> what its next item comes after
    open_item: dict[str, _Item | None] = {}  # stream -> the item that takes more operations
    waiting: dict[tuple, deque[_Item]] = {}
    marks: list[list[_Item]] = []
    host = 0.0
    for event in events:
        kind = type(event)
        if kind is Operation:
            host += cluster.launch
            seconds = cluster.seconds(event)
            item = open_item.get(event.stream)
            if item is None or item.name != event.step:
                item = open_item[event.stream] = _Item(event.step, 0.0, host, after=last.get(event.stream, []))
                found.setdefault(event.stream, deque()).append(item)
                last[event.stream] = [item]
            item.until = max(item.until, host) + seconds
            item.seconds += seconds
        elif kind is Collective:
            host += cluster.issue
            queue = f"{event.ranks} ranks, stride {event.stride}"
            item = _Item(event.kind, cluster.collective_seconds(event), host, after=last.get(event.stream, []))
            item.collective = True
            found.setdefault(queue, deque()).append(item)
            waiting.setdefault((event.kind, event.ranks, event.stride), deque()).append(item)
            open_item[event.stream] = None
        elif kind is Wait:
            item = waiting[event.kind, event.ranks, event.stride].popleft()
            last[event.stream] = [*last.get(event.stream, []), item]
            open_item[event.stream] = None
        elif kind is Mark:
            marks.append(last.get(event.stream, []))
            open_item[event.stream] = None
        elif kind is Await:
            last[event.stream] = [*last.get(event.stream, []), *marks[-event.back]]
            open_item[event.stream] = None
    return found


def replay(events: tuple[Event, ...], cluster: Cluster) -> Times:
    """The times of these events on `cluster`."""
    waiting, running, times, now = queues(events, cluster), {}, Times(), 0.0
    left: dict[str, float] = {}
    while True:
        for name, queue in waiting.items():
            if name not in running and queue:
                item = queue[0]
                if item.ready <= now + EPSILON and all(other.over for other in item.after):
                    running[name] = queue.popleft()
                    running[name].start, left[name] = now, item.seconds
        communicates = any(item.collective for item in running.values())
        slower = 1 + cluster.slowdown if communicates else 1.0
        ends = {}
        for name, item in running.items():
            ends[name] = now + left[name] * (1.0 if item.collective else slower)
            if left[name] <= EPSILON:
                ends[name] = max(now, item.until)
        later = [queue[0].ready for name, queue in waiting.items() if queue and queue[0].ready > now + EPSILON]
        if not ends and not later:
            break
        following = min([*ends.values(), *later])
        passed = following - now
        computes = any(not item.collective and left[name] > EPSILON for name, item in running.items())
        times.compute += passed if computes else 0.0
        if communicates and not computes:
            times.exposed += passed
        for name, item in list(running.items()):
            left[name] -= passed if item.collective else passed / slower
            if ends[name] <= following + EPSILON and (left[name] <= EPSILON) and item.until <= following + EPSILON:
                item.over = True
                del running[name]
                if item.collective:
                    times.collectives[item.name] = times.collectives.get(item.name, 0.0) + following - item.start
        now = following
    if any(waiting.values()):
        raise RuntimeError("some work waits forever: record the events of a whole step")
    times.step = now
    return times
