"""A model of the caching allocator of torch: the memory that it reserves while the tensors of a step come and go.

It requests **segments** from the driver, cuts **blocks** out of them, and keeps freed blocks for the next request. So
it has more memory than is alive. The rest is gaps that nothing fits into. Each stream has its own blocks.
"""

from bisect import bisect_left, insort
from collections import defaultdict

from extra.planner.events import Memory, Recording

MIB = 2**20
UNIT = 512  # bytes: sizes are rounded up to multiples of it
SMALL = MIB  # up to here a block comes out of a segment of 2 MiB, ...
SMALL_SEGMENT = 2 * MIB
MIDDLE, MIDDLE_SEGMENT = 10 * MIB, 20 * MIB  # ... below this out of one of 20 MiB, and above it gets its own segment


class Allocator:
    """The host calls `allocate` and `free`. `reserved` is the number of bytes from the driver."""

    def __init__(self):
        self.reserved = 0
        self._top = 0  # addresses of segments, which never touch: a block never grows beyond its segment
        self._free = defaultdict(list)  # by stream and size: bytes and address of the free blocks, in order
        self._starts: dict[int, int] = {}  # address of a free block -> its bytes, ...
        self._ends: dict[int, int] = {}  # ... and where it ends -> its address
        self._in_use = defaultdict(list)  # by stream and requested bytes: bytes and address, the youngest last

    def allocate(self, stream: str, nbytes: int) -> None:
        """Use the smallest free block that is large enough. The part that is not needed stays free."""
        size = _up(nbytes, UNIT)
        pool = stream, size <= SMALL
        place = bisect_left(self._free[pool], (size, 0))
        if place == len(self._free[pool]):
            self._reserve(pool, size)
            place = bisect_left(self._free[pool], (size, 0))
        length, address = self._take(pool, *self._free[pool][place])
        if length - size >= (UNIT if size <= SMALL else SMALL + 1):  # a large block is not split for little
            self._give(pool, length - size, address + size)
            length = size
        self._in_use[stream, nbytes].append((length, address))

    def free(self, stream: str, nbytes: int) -> None:
        """Free the youngest of equal blocks, as activations are freed. Merge it with free neighbours."""
        pool = stream, _up(nbytes, UNIT) <= SMALL
        if not self._in_use[stream, nbytes]:  # it was there before the events began
            self._give(pool, _up(nbytes, UNIT), self._top)
            self._top += _up(nbytes, UNIT) + 1
            return
        length, address = self._in_use[stream, nbytes].pop()
        if address + length in self._starts:
            length += self._take(pool, self._starts[address + length], address + length)[0]
        if address in self._ends:
            before, address = self._take(pool, address - self._ends[address], self._ends[address])
            length += before
        self._give(pool, length, address)

    def _reserve(self, pool: tuple, size: int) -> None:
        segment = SMALL_SEGMENT if pool[1] else MIDDLE_SEGMENT if size < MIDDLE else _up(size, SMALL_SEGMENT)
        self.reserved += segment
        self._give(pool, segment, self._top)
        self._top += segment + 1

    def _give(self, pool: tuple, length: int, address: int) -> None:
        insort(self._free[pool], (length, address))
        self._starts[address], self._ends[address + length] = length, address

    def _take(self, pool: tuple, length: int, address: int) -> tuple[int, int]:
        self._free[pool].remove((length, address))
        del self._starts[address], self._ends[address + length]
        return length, address


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def reserved_bytes(recording: Recording) -> int:
    """The bytes reserved after two runs of the recorded step. The second run uses gaps that the first left."""
    allocator = Allocator()
    for event in recording.events * 2:
        if type(event) is Memory:
            if event.nbytes > 0:
                allocator.allocate(event.stream, event.nbytes)
            else:
                allocator.free(event.stream, -event.nbytes)
    return recording.live_bytes + allocator.reserved
