"""A piece as rectangles, the form in which torch.distributed.checkpoint (DCP) stores parts of a tensor.

A checkpoint lists whole tensors with their names and shapes, so that any other program can read it. But a rank has a
run of a parameter's elements, which ends where the rank's shard ends. So the run is cut into rectangles. In a matrix
these are the rest of a row, whole rows, and the beginning of a row:

    . . . . . .
    . . A A A A      elements 8 to 26 of a 6 x 6 matrix
    B B B B B B      A  offsets (1, 2), sizes (1, 4)
    B B B B B B      B  offsets (2, 0), sizes (2, 6)
    C C C . . .      C  offsets (4, 0), sizes (1, 3)
    . . . . . .

The cost: about 1.5 kB of header per rectangle. FSDP2 shards along a tensor's first dimension, so each rank has one
rectangle per parameter.
"""

import math

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


def cut_into_rectangles(shape, first, end):
    """[(offsets, sizes)] of elements `first` to `end` - 1 of a tensor of `shape`, in order.

    At most 2(n-1) + 1 rectangles for n dimensions.
    """
    if not shape:
        return [((), ())] if first < end else []
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found = []
    while first < end:
        # The outermost dimension in which a whole step begins at `first` and fits.
        dim = next(dim for dim, stride in enumerate(strides) if first % stride == 0 and first + stride <= end)
        offsets = tuple(first // stride % size for stride, size in zip(strides, shape))
        steps = min(shape[dim] - offsets[dim], (end - first) // strides[dim])
        found.append((offsets, (1,) * dim + (steps, *shape[dim + 1 :])))
        first += steps * strides[dim]
    return found


class Piece(torch.Tensor):
    """A run of elements of a tensor, in the form that DCP expects: `elements`, from index `first` on.

    DCP calls the three methods with underscores on any tensor that has them, such as a DTensor. So this class is a
    tensor, with the whole tensor's `shape` and the memory of one element. The elements themselves are not copied.
    """

    @staticmethod
    def of(elements, shape, first):
        piece = torch.Tensor._make_subclass(Piece, elements.new_empty(()).expand(shape))
        piece.elements = elements
        piece.rectangles = {}  # offsets -> a view of its elements
        flat = elements.reshape(-1)
        begin = 0
        for offsets, sizes in cut_into_rectangles(shape, first, first + elements.numel()):
            end = begin + math.prod(sizes)
            piece.rectangles[torch.Size(offsets)] = flat[begin:end].view(sizes)
            begin = end
        return piece

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(offsets, view.size()) for offsets, view in self.rectangles.items()]

    def __create_write_items__(self, name, _):
        properties = TensorProperties.create_from_tensor(self.elements)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index):
        return self.rectangles[index.offset]
