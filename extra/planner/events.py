"""What one rank does in a training step, in the order in which its host issues it."""

from dataclasses import dataclass
from typing import NamedTuple


class Operation(NamedTuple):
    """A kernel: torch's name of it, its floating-point operations, and the bytes that it reads and writes in memory.

    `attends`: for attention, the size of a head, and the number of keys per query.
    """

    name: str
    flops: int
    nbytes: int
    attends: tuple[int, int] | None = None


class Collective(NamedTuple):
    """Communication of all ranks. `nbytes` are the bytes of the whole buffer."""

    kind: str
    nbytes: int
    ranks: int


class Wait(NamedTuple):
    """The rank computes on when the oldest collective of this kind that it has not waited for yet has ended."""

    kind: str


Event = Operation | Collective | Wait


@dataclass(frozen=True)
class Recording:
    """The events of a rank's step, and the most bytes that were alive at once."""

    events: tuple[Event, ...]
    peak_bytes: int

    def collectives(self) -> list[Collective]:
        return [event for event in self.events if isinstance(event, Collective)]
