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
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


def rectangles(shape, first: int, end: int) -> list[tuple[tuple, tuple]]:
    """(offsets, sizes) of the rectangles that elements `first` to `end` - 1 of a row-major tensor consist of, in order.

    At most 2(n-1) + 1 of them for n dimensions.
    """
    if first >= end:
        return []
    if not shape:
        return [((), ())]
    inner = math.prod(shape[1:])  # elements of a row: of all that one index of the first dimension holds
    top, bottom = -(-first // inner), end // inner  # the whole rows are those from `top` up to `bottom`
    if top > bottom:  # within one row
        return _in_row(bottom, rectangles(shape[1:], first - bottom * inner, end - bottom * inner))
    found = _in_row(top - 1, rectangles(shape[1:], first - (top - 1) * inner, inner)) if first < top * inner else []
    if top < bottom:
        found.append(((top, *(0 for _ in shape[1:])), (bottom - top, *shape[1:])))
    return found + _in_row(bottom, rectangles(shape[1:], 0, end - bottom * inner))


def _in_row(row: int, found: list[tuple[tuple, tuple]]) -> list[tuple[tuple, tuple]]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in found]


class Cut(torch.Tensor):
    """A tensor of which this rank has some elements, as torch.distributed.checkpoint wants to see it.

    It has the whole tensor's shape, and memory for one element: all places are the same one. torch asks the three
    methods with underscores for what is really there. (It takes them from tensors alone, so this is a tensor.)
    """

    @staticmethod
    def of(part: torch.Tensor, shape, first: int) -> "Cut":
        """`part` (numel,) are the elements from `first` on of a tensor of `shape`. They are not copied."""
        cut = torch.Tensor._make_subclass(Cut, part.new_empty(()).expand(shape))
        cut.part, cut.boxes, start = (
            part,
            {},
            0,
        )  # boxes: offsets -> the elements there, a view of `part` in the rectangle's shape
        for offsets, sizes in rectangles(tuple(shape), first, first + part.numel()):
            end = start + math.prod(sizes)
            cut.boxes[offsets] = part[start:end].view(sizes)
            start = end
        return cut

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), box.shape) for offsets, box in self.boxes.items()]

    def __create_write_items__(self, name: str, _) -> list[WriteItem]:
        items = []
        for chunk in self.__create_chunk_list__():
            data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape)
            index = MetadataIndex(name, chunk.offsets)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.boxes[tuple(index.offset)]
