"""Which rectangles a rank writes into a checkpoint.

A checkpoint holds tensors under their own names and in their own shapes, so that any other program can read it. A rank
has a run of a tensor's elements: those from `first` up to `end`, which is not among them, in the order of memory.
torch.distributed.checkpoint knows rectangles alone. So the run is cut into some: of a matrix a rest of a row, whole
rows, and a beginning of a row.

    . . . . . .
    . . A A A A      first 8, end 27 in a 6 x 6 matrix
    B B B B B B      A  offsets (1, 2), sizes (1, 4)
    B B B B B B      B  offsets (2, 0), sizes (2, 6)
    C C C . . .      C  offsets (4, 0), sizes (1, 3)
    . . . . . .
"""

import math

import torch
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper


def rectangles(shape, first: int, end: int) -> list[tuple[tuple, tuple]]:
    """(offsets, sizes) of the rectangles that elements `first` to `end` - 1 of a row-major tensor consist of, in order.

    At most 2(n-1) + 1 of them for n dimensions.
    """
    found = []
    while first < end:
        # The outermost dimension of which a whole step begins here, and ends before `end`.
        inner = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        fits = [dim for dim, step in enumerate(inner) if first % step == 0 and first + step <= end]
        place = tuple(first // step % size for step, size in zip(inner, shape))
        if not fits:  # a scalar
            return [((), ())]
        dim = fits[0]
        steps = min(shape[dim] - place[dim], (end - first) // inner[dim])
        found.append((place, (*(1 for _ in shape[:dim]), steps, *shape[dim + 1 :])))
        first += steps * inner[dim]
    return found


class Cut(torch.Tensor):
    """A tensor of which this rank has some elements, as torch.distributed.checkpoint wants to see it.

    It has the whole tensor's shape, and memory for one element: all places are the same one. torch asks the three
    methods with underscores for what is really there. (It takes them from tensors alone, so this is a tensor.) torch's
    own class for several local parts of one tensor, in `boxes`, has the answers.
    """

    @staticmethod
    def of(part: torch.Tensor, shape, first: int) -> "Cut":
        """`part` (numel,) are the elements from `first` on of a tensor of `shape`. They are not copied."""
        cut = torch.Tensor._make_subclass(Cut, part.new_empty(()).expand(shape))
        found = rectangles(tuple(shape), first, first + part.numel())
        boxes = part.split([math.prod(sizes) for _, sizes in found])
        views = [box.view(sizes) for box, (_, sizes) in zip(boxes, found)]
        cut.part, cut.boxes = part, LocalShardsWrapper(views, [offsets for offsets, _ in found])
        return cut

    def __create_chunk_list__(self) -> list:
        return self.boxes.__create_chunk_list__()

    def __create_write_items__(self, name: str, _) -> list:
        return self.boxes.__create_write_items__(name, self)

    def __get_tensor_shard__(self, index) -> torch.Tensor:
        return self.boxes.__get_tensor_shard__(index)
