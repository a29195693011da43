"""The work of one rank in a training step, in the order in which its host issues it.

A **stream** is a queue of a GPU's work. The work in one stream runs in order, and different streams run side by side.
Collectives have their own queue. The host puts work into the queues and continues at once.
"""

from dataclasses import dataclass
from typing import NamedTuple

COMPUTE = "compute"  # the stream in which forward, backward and the optimizer run


class Operation(NamedTuple):
    """A kernel: floating-point operations, bytes it reads and writes in the GPU's memory, dtype, step's label.

    `attends`: of attention, how large a head is, and how many keys a query looks at.
    """

    stream: str
    name: str
    flops: int
    nbytes: int
    dtype: str
    step: str
    attends: tuple[int, int] | None = None


class Collective(NamedTuple):
    """Starts when its stream has come here and the collectives before it are over. `nbytes`: of the whole buffer.

    `ranks` take part, every `stride`-th of the cluster's: (8, 1) are eight neighbours.
    """

    stream: str
    kind: str
    nbytes: int
    ranks: int
    stride: int
    step: str


class Wait(NamedTuple):
    """The stream goes on when the oldest collective of this kind and group that nobody has waited for is over."""

    stream: str
    kind: str
    ranks: int
    stride: int


class Mark(NamedTuple):
    """An event (in CUDA's sense) at this place of the stream, for others to wait for."""

    stream: str


class Await(NamedTuple):
    """The stream goes on when the event `back` marks ago (1: the last one) has come."""

    stream: str
    back: int


class Memory(NamedTuple):
    """The host allocates (or, below zero, frees) so many bytes. An allocator keeps the streams' memory apart."""

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
