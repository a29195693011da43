"""Which version of the weights is in which cell: the weights before the update, after it, or neither.

It is found by sampling the weights: up to `SAMPLES` elements of each cell are copied at certain moments of a step. They
are compared afterwards with the values that the owner of the cell had before and after its update.
"""

import zlib

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from extra.watch.cell_ledger import HELD, WHOLE
from extra.watch.rows_of_cells import Row, Stretch

SAMPLES = 64
BEFORE, AFTER, NEITHER = 0, 1, -1


class WeightVersions:
    """`look(row, moment)` copies samples of a row's weights on this rank; `seen()` has their checksums."""

    def __init__(self, rank: int):
        self.rank = rank
        self._looks: list[tuple] = []  # (moment, row, layer, cells, samples of each of these cells)

    def look(self, row: Row, moment) -> None:
        with _disable_current_modes(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for layer in (HELD, WHOLE):
                found = [_cells(stretch, layer, self.rank) for stretch in row.stretches]
                cells = sorted(set.intersection(*(set(each) for each in found)))
                if cells:
                    samples = [_samples(found, cell) for cell in cells]
                    self._looks.append((moment, row.stretches[0].row, layer, cells, samples))

    def seen(self) -> list[tuple]:
        """[(moment, row, layer, {cell: checksum})], in the order of the looks."""
        found = []
        with _disable_current_modes():
            for moment, row, layer, cells, samples in self._looks:
                found.append((moment, row, layer, dict(zip(cells, map(_checksum, samples)))))
        return found


def _cells(stretch: Stretch, layer: int, rank: int) -> dict[int, list[torch.Tensor]]:
    """{cell: its weights on this rank, flat tensors} of a layer, for the cells that are there."""
    if stretch.bucket is not None:
        flat, shard = stretch.bucket.flat, stretch.bucket.shard
        shared = flat.untyped_storage()._cdata == shard.untyped_storage()._cdata
        if layer == HELD and not shared:
            return {rank: [shard.detach()]}
        if (layer == HELD) != shared or flat.untyped_storage().nbytes() == 0:
            return {}
        size = -(-stretch.numel // stretch.ranks)
        return {cell: [part] for cell, part in enumerate(flat.detach().split(size))}
    if not stretch.by_parameter:  # all ranks have whole parameters
        parts = [param.detach().view(-1).split(stretch.of(index)) for index, param in enumerate(stretch.params)]
        cells = range(stretch.ranks if layer == HELD else 0)
        return {cell: [each[cell] for each in parts if each[cell].numel()] for cell in cells}
    if layer == HELD:
        return {rank: [param._local_tensor.detach().flatten() for param in stretch.params]}
    now = [module._parameters[key] for module, key in stretch.homes]
    if any(isinstance(param, DTensor) for param in now):
        return {}
    return {cell: [param.detach().tensor_split(stretch.ranks)[cell].flatten() for param in now]
            for cell in range(stretch.ranks)}  # fmt: skip


def _samples(stretches: list[dict[int, list[torch.Tensor]]], cell: int) -> list[torch.Tensor]:
    found = []
    for cells in stretches:
        for part in cells[cell]:
            found.append(part[:: max(1, part.numel() // SAMPLES)].clone())  # on a GPU a copy that nobody waits for
    return found


def _checksum(parts: list[torch.Tensor]) -> int:
    return zlib.crc32(b"".join(part.cpu().view(torch.uint8).numpy().tobytes() for part in parts))


def versions_by_cell(ranks: list[list[tuple]], updates: list) -> list[list[tuple]]:
    """For each rank [(moment, row, layer, [version of each of the N cells])], from the `seen()` of all ranks.

    Rank j owns cell j. The owner's first look is BEFORE, and its first look after its update is AFTER. `updates` has
    the moments of the ranks' updates, or None for a rank without one. A cell without memory counts as NEITHER.
    """
    before, after = {}, {}
    for rank, looks in enumerate(ranks):
        for moment, row, layer, cells in looks:
            if layer == HELD and rank in cells:
                before.setdefault((row, rank), cells[rank])
                if updates[rank] is not None and moment >= updates[rank]:
                    after.setdefault((row, rank), cells[rank])

    def version(row: int, cell: int, checksum: int | None) -> int:
        known = {after.get((row, cell)): AFTER, before.get((row, cell)): BEFORE, None: NEITHER}
        return known.get(checksum, NEITHER)

    found = []
    for looks in ranks:
        found.append([])
        for moment, row, layer, cells in looks:
            versions = [version(row, cell, cells.get(cell)) for cell in range(len(ranks))]
            found[-1].append((moment, row, layer, versions))
    return found
