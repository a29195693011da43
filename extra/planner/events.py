"""The work of one rank in a training step, in the order in which its host issues it.

A **stream** is a queue of a GPU's work. The work in one stream runs in order, and different streams run side by side.
Collectives have their own queue. The host puts work into the queues and continues at once.
"""

from dataclasses import dataclass
from typing import NamedTuple

COMPUTE = "compute"  # the stream in which forward, backward and the optimizer run


class Operation(NamedTuple):
    """A kernel: its floating-point operations, bytes read and written in the GPU's memory, dtype, and step label.

    `attends`: for attention, the size of a head, and the number of keys per query.
    """

    stream: str
    name: str
    flops: int
    nbytes: int
    dtype: str
    step: str
    attends: tuple[int, int] | None = None


class Collective(NamedTuple):
    """Starts when its stream has reached it and earlier collectives have ended. `nbytes`: of the whole buffer.

    `ranks` take part, every `stride`-th of the cluster's: (8, 1) are eight neighbours.
    """

    stream: str
    kind: str
    nbytes: int
    ranks: int
    stride: int
    step: str


class Wait(NamedTuple):
    """The stream continues after the oldest collective of this kind and group that was not waited for yet."""

    stream: str
    kind: str
    ranks: int
    stride: int


class Mark(NamedTuple):
    """An event (in CUDA's sense) at this place of the stream, for others to wait for."""

    stream: str


class Await(NamedTuple):
    """The stream continues after the event `back` marks ago (1: the last one)."""

    stream: str
    back: int


class Memory(NamedTuple):
    """The host allocates bytes, or frees them if negative. The allocator keeps the streams' memory separate."""

    stream: str
    nbytes: int


Event = Operation | Collective | Wait | Mark | Await | Memory


@dataclass(frozen=True)
class Recording:
    """The events of a rank's step, the bytes that are alive when it begins, and the model's parameters (elements)."""

    events: tuple[Event, ...]
    live_bytes: int
    parameters: int

    def peak_bytes(self) -> int:
        """The most that was alive at once, in bytes."""
        live = peak = self.live_bytes
        for event in self.events:
            if type(event) is Memory:
                live += event.nbytes
                peak = max(peak, live)
        return peak

    def collectives(self) -> list[Collective]:
        return [event for event in self.events if type(event) is Collective]
