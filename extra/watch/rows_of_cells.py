"""An engine's state in rows of N cells: a row per unit of ZeRO-3 and FSDP2, or per bucket of ZeRO-1, ZeRO-2 and DDP.

Cell j of a row is the part that rank j owns, or would own. An engine that does not shard has all cells on every rank.
"""

from dataclasses import dataclass

import torch
from torch import nn

from zero3 import default_units, parameters_by_unit
from zerolab.measure.held import buckets_of, units_of


@dataclass
class Stretch:
    """Parameters that are laid end to end and cut into N: one of our buckets, or its equivalent in another engine.

    `offsets` and `numel` are in elements. With `by_parameter` each parameter is cut separately, as in FSDP2.
    """

    row: int
    names: list[str]
    params: list[nn.Parameter]
    offsets: list[int]
    numel: int
    ranks: int
    bucket: object = None
    by_parameter: bool = False

    def cells(self, first: int, end: int) -> list[int]:
        """How many of the elements `first` to `end` are in each of the N cells."""
        cuts = [self.numel * cell // self.ranks for cell in range(self.ranks + 1)]
        return [max(0, min(end, stop) - max(first, start)) for start, stop in zip(cuts, cuts[1:])]

    def whole(self) -> list[int]:
        return self.cells(0, self.numel)

    def of(self, index: int) -> list[int]:
        """The cells of a whole tensor of parameter `index`, in elements."""
        size = self.params[index].shape.numel()
        if self.by_parameter:
            return [size // self.ranks + (cell < size % self.ranks) for cell in range(self.ranks)]
        return self.cells(self.offsets[index], self.offsets[index] + size)

    def own(self, rank: int) -> list[int]:
        return [int(cell == rank) for cell in range(self.ranks)]


@dataclass
class Row:
    name: str
    stretches: list[Stretch]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameters, padding included."""
        return sum(stretch.numel * stretch.params[0].element_size() for stretch in self.stretches)

    @property
    def parameters(self) -> list[str]:
        """The names of the row's parameters, in the model's order."""
        return [name for stretch in self.stretches for name in stretch.names]

    def described(self) -> str:
        """ "blocks.0.norm1.weight to blocks.0.down.bias" """
        names = self.parameters
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"

    def is_sharded(self) -> bool:
        return any(stretch.bucket is not None or stretch.by_parameter for stretch in self.stretches)


def rows_of(engine, ranks: int, together: list[list[nn.Parameter]] | None = None) -> list[Row]:
    """The rows of an engine, from the model's input to its output.

    `together` are DDP's buckets, which Python can see only through their gradients. Without it, and for any unknown
    engine, a row is a unit.
    """
    if buckets_of(engine):
        numbered = [(f"bucket {number}", [bucket]) for number, bucket in enumerate(buckets_of(engine))]
        named = [*reversed(numbered)]  # ours begin with the last parameters
        if units_of(engine):  # in the order in which they run: the root's embedding comes first
            by_name = {"root": []}
            for unit in buckets_of(engine):
                by_name.setdefault(unit.name, []).append(unit)
            named = [(name, units) for name, units in by_name.items() if units]
        return [_of_buckets(row, name, buckets, ranks) for row, (name, buckets) in enumerate(named)]
    names = {id(param): name for name, param in engine.model.named_parameters()}
    if together:
        return [_of_parameters(row, f"bucket {len(together) - 1 - row}", params, names, ranks)
                for row, params in enumerate(together)]  # fmt: skip
    modules = default_units(engine.model)
    held = parameters_by_unit(engine.model, modules)
    labels = {module: name for name, module in engine.model.named_modules()}
    groups = [("root", held.pop(engine.model)), *((labels[module], named) for module, named in held.items())]
    groups = [(name, [param for _, param in named]) for name, named in groups if named]
    return [_of_parameters(row, name, params, names, ranks) for row, (name, params) in enumerate(groups)]


def _of_buckets(row: int, name: str, buckets, ranks: int) -> Row:
    stretches = []
    for bucket in buckets:
        names, params, offsets = list(bucket.names), list(bucket.params), list(bucket.offsets)
        stretches.append(Stretch(row, names, params, offsets, bucket.numel, ranks, bucket))
    return Row(name, stretches)


def _of_parameters(row: int, name: str, params, names, ranks: int) -> Row:
    offsets, end = [], 0
    for param in params:
        offsets.append(end)
        end += param.shape.numel()
    sharded = any(isinstance(param, torch.distributed.tensor.DTensor) for param in params)
    found = [names.get(id(param), "") for param in params]
    return Row(name, [Stretch(row, found, list(params), offsets, end, ranks, None, sharded)])
