"""A ledger that also records where bytes belong: to which unit or bucket, and to which ranks' cells of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from extra.watch.rows_of_cells import Row, Stretch, rows_of
from zerolab.measure.held import optimizer_of, tensor_leaves
from zerolab.measure.ledger import GATHERED, GRADIENTS, IN_FLIGHT, OPTIMIZER, PARAMETERS, PartsLedger
from zerolab.measure.timeline import Listener, Span

HELD, WHOLE = 0, 1  # two layers of a cell: what is kept, and whole buffers that come and go
LAYERS = {PARAMETERS: (0, HELD), GATHERED: (0, WHOLE), GRADIENTS: (1, HELD), IN_FLIGHT: (1, WHOLE),
          OPTIMIZER: (2, HELD)}  # fmt: skip


@dataclass
class Change:
    """From `moment` on a layer of a row has a different number of bytes.

    `cells` are the bytes in each of the N cells. `freed`: the last part of a whole buffer of `nbytes` was just freed.
    """

    moment: float
    row: int
    column: int
    layer: int
    cells: list[int]
    freed: bool
    nbytes: int
    event: int  # its index among the ledger's events


class CellLedger(PartsLedger, Listener):
    """A `PartsLedger` that follows the bytes from one storage to the next, without help from the engine.

    A bucket's buffers, a parameter and its optimizer state have a place from the start. A gradient has its parameter's
    place. A buffer that a collective or a copy fills has the place of its source. Call `start_step(engine)` twice
    before the recorded step, because DDP's buckets and the optimizer state exist only after a step. In the recorded
    step it is the listener of a `Timeline`, which reports the collectives.

    `rows`: see `rows_of`. `collective_rows`: for each collective since `start_step`, in the order of issue, its row, or
    -1 if it is not known.
    """

    def __init__(self, rank: int, ranks: int):
        self.rank, self.ranks = rank, ranks
        self.rows: list[Row] = []
        self.collective_rows: list[int] = []
        self._together: dict[int, list] = {}  # DDP: storage of the gradients -> the parameters whose they are
        self._home: dict[int, tuple[Stretch, int]] = {}  # id of a parameter -> its stretch, and its index
        self._owner: dict[int, Stretch] = {}  # storage of a bucket's shard -> its stretch
        self._place: dict[int, tuple[Stretch, list[int]]] = {}  # number of a storage -> its stretch, weights of cells
        self._sent: set[int] = set()  # numbers of the storages that a reduction reads
        super().__init__()

    def start_step(self, engine=None) -> None:
        self._place, self._home, self._owner, self._sent, self.collective_rows = {}, {}, {}, set(), []
        if engine is not None:
            self.rows = rows_of(engine, self.ranks, self._buckets_of(engine))
            self._find_homes()
        super().start_step(engine)

    def changes(self) -> Iterator[Change]:
        """The changes of the cells at each of the ledger's events, in order, without events of other parts."""
        sizes, totals = {}, {}
        for event, (number, nbytes, *_, moment) in enumerate(self._events):
            part = self._part.get(number)
            before, sizes[number] = sizes.get(number, 0), nbytes
            if part not in LAYERS or number not in self._place:
                continue
            column, layer = LAYERS[part]
            stretch, weights = self._place[number]
            row = stretch.row
            total = totals.setdefault((row, column, layer), [0] * len(weights))
            for cell, (new, old) in enumerate(zip(_share(nbytes, weights), _share(before, weights))):
                total[cell] += new - old
            freed = layer == WHOLE and not nbytes and (number in self._sent if column else not any(total))
            yield Change(moment, row, column, layer, [*total], freed, before, event)

    # Where storages belong.

    def put_in(self, tensor: torch.Tensor, stretch: Stretch, weights: list[int]) -> None:
        """The storage under `tensor` belongs to these cells, unless it has a place."""
        number = self._index.get(self.key(tensor))
        if number is not None:
            self._place.setdefault(number, (stretch, weights))

    def place_of(self, tensors) -> tuple[Stretch, list[int]] | None:
        """The place of the first of `tensors` that has one."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                place = self._place.get(self._index.get(self.key(tensor)))
                if place is not None:
                    return place
        return None

    def _buckets_of(self, engine) -> list[list] | None:
        ddp = isinstance(engine.model, torch.nn.parallel.DistributedDataParallel)
        return list(self._together.values()) if ddp and self._together else None

    def _find_homes(self) -> None:
        for key, params in self._together.items():  # DDP's buckets, which live on; after its first step it makes others
            row = next((row for row in self.rows if row.stretches[0].params[0] is params[0]), None)
            if row is not None and key in self._index:
                self._place[self._index[key]] = (row.stretches[0], row.stretches[0].whole())
        self._together = {}
        for row in self.rows:
            for stretch in row.stretches:
                for index, param in enumerate(stretch.params):
                    self._home[id(param)] = (stretch, index)
                if stretch.bucket is not None:
                    self._owner[self.key(stretch.bucket.shard)] = stretch

    def _sort_held(self) -> None:
        super()._sort_held()
        for row in self.rows:
            for stretch in row.stretches:
                self._put_stretch(stretch)
        optimizer = optimizer_of(self._engine)
        for group in optimizer.param_groups:
            for param in group["params"]:
                state = optimizer.state.get(param, {})
                if self.key(param) in self._owner:  # a shard, or an engine's view of one
                    self._put_updated(param, state, self._owner[self.key(param)])
                elif id(param) in self._home:
                    self._put_updated(param, state, *self._home[id(param)])

    def _put_updated(self, param: torch.Tensor, state: dict, stretch: Stretch, index: int = 0) -> None:
        """Assign the optimizer's `state` of a parameter or a shard, and the gradient."""
        sharded = stretch.bucket is not None or stretch.by_parameter
        weights = stretch.own(self.rank) if sharded else stretch.of(index)
        for value in state.values():
            if torch.is_tensor(value):
                self.put_in(value, stretch, weights)
        if param.grad is None:
            return
        if not sharded:
            together = self._together.setdefault(self.key(param.grad), [])
            if all(param is not other for other in together):
                together.append(param)
        self.put_in(param.grad, stretch, weights if sharded else stretch.whole())

    def _put_stretch(self, stretch: Stretch) -> None:
        bucket = stretch.bucket
        if bucket is None:
            for index, param in enumerate(stretch.params):
                self.put_in(param, stretch, stretch.own(self.rank) if stretch.by_parameter else stretch.of(index))
            return
        self.put_in(bucket.flat, stretch, stretch.whole())
        self.put_in(bucket.shard, stretch, stretch.own(self.rank))  # without an effect where it is a view of `flat`
        if bucket.gradient is not None:  # ZeRO-1's: all gradients
            self.put_in(bucket.gradient, stretch, stretch.whole())

    def _before_accumulation(self, param, gradient) -> None:
        super()._before_accumulation(param, gradient)
        if id(param) in self._home:
            stretch, index = self._home[id(param)]
            self.put_in(gradient, stretch, stretch.of(index))

    def _on_gradient(self, param) -> None:
        super()._on_gradient(param)
        if param.grad is not None and id(param) in self._home:
            stretch, index = self._home[id(param)]
            alone = param.grad.untyped_storage().nbytes() <= param.grad.nbytes
            self.put_in(param.grad, stretch, stretch.of(index) if alone else stretch.whole())

    # Operations that torch dispatches, and the collectives among them, which a timeline reports.

    def issues(self, collective: Span, tensors: list[torch.Tensor]) -> None:
        *outputs, sent = tensors
        place = self.place_of(tensors)
        self.collective_rows.append(-1 if place is None else place[0].row)
        if collective.name == "reduce-scatter":
            self._sent.add(self._index.get(self.key(sent)))
        if place is None:
            return
        stretch = place[0]
        whole, part = tensors, []
        if collective.name == "all-gather":
            whole, part = outputs, [sent]
        elif collective.name == "reduce-scatter":
            whole, part = [sent], outputs
        for tensor in whole:
            self.put_in(tensor, stretch, stretch.whole())
        for tensor in part:
            self.put_in(tensor, stretch, stretch.own(self.rank))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.split("::")[1]
        if name in ("copy_", "_foreach_copy_"):
            self._follow(tensor_leaves(args[0]), tensor_leaves(args[1]))
        elif func.namespace == "fsdp":
            self._follow_fsdp(name, args, kwargs or {}, result)
        return result

    def _follow(self, to, sources) -> None:
        """Whole buffers `to` are filled from `sources`."""
        place = self.place_of(sources)
        if place is not None:
            for tensor in to:
                self.put_in(tensor, place[0], place[0].whole())

    def _follow_fsdp(self, name: str, args, kwargs, result) -> None:
        """FSDP2's copies into and out of the buffers that its collectives send."""
        if name == "all_gather_copy_in":
            self._follow(tensor_leaves(result), args[0])
        elif name == "split_with_sizes_copy":
            self._follow(kwargs["out"], args[:1])
        elif name == "chunk_cat":
            row = next((row for row in self.rows if row.name == self._labelled()), None)
            for tensor in (*args[0], kwargs["out"]) if row is not None else ():
                self.put_in(tensor, row.stretches[0], row.stretches[0].whole())

    def _labelled(self) -> str:
        """The module in the innermost label like "FSDP::post_backward_reduce (blocks.0)"; the root's has none."""
        label = next((label for label in reversed(self._where.labels) if label.startswith("FSDP::post_backward")), "")
        return label.partition("(")[2].partition(")")[0] or "root"


def _share(nbytes: int, weights: list[int]) -> list[int]:
    """`nbytes` divided by `weights`, in whole bytes that add up to it."""
    cuts = [nbytes * upto // (sum(weights) or 1) for upto in accumulate(weights, initial=0)]
    return [end - start for start, end in pairwise(cuts)]
