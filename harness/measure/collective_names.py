"""Which unit or bucket a collective is for: whoever sends it, its buffers show it."""

import torch
from torch import nn

from harness.measure.held import buckets_of, tensors_in
from harness.measure.memory_parts import PartsLedger
from harness.measure.traffic import kind_of

COPIES = ("aten::copy_", "aten::_foreach_copy_")  # of gradients, into the buffer that is sent


class CollectiveNames(PartsLedger):
    """A `PartsLedger` that finds the unit (ZeRO-3) or bucket (ZeRO-1, ZeRO-2) of every collective since `begin`.

    `names` has them in the order of issue, "" where none was found. The weights of a bucket are known from the start,
    and a gradient by its parameter. What gradients are copied to, and what a collective fills, belongs to the same one.
    """

    def begin(self, engine=None) -> None:
        self.names: list[str] = []
        self._owner: dict[int, str] = {}  # number of a storage -> its unit or bucket
        self._name_of: dict[int, str] = {}  # the same of a parameter, by its id
        super().begin(engine)
        for name, bucket in [] if self._engine is None else named_buckets(self._engine):
            self._belongs(name, [bucket.flat, bucket.shard])
            for param in bucket.params:
                self._name_of[id(param)] = name

    def _belongs(self, name: str, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            number = self._number.get(self.key(tensor))
            if name and number is not None:
                self._owner.setdefault(number, name)

    def _name(self, tensors: list[torch.Tensor]) -> str:
        for tensor in tensors:
            name = self._owner.get(self._number.get(self.key(tensor)))
            if name is not None:
                return name
        return ""

    def _on_gradient(self, param: nn.Parameter) -> None:
        super()._on_gradient(param)
        if param.grad is not None:
            self._belongs(self._name_of.get(id(param), ""), [param.grad])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        is_collective = kind_of(func) is not None
        if is_collective or func._schema.name in COPIES:
            tensors = [*tensors_in(args[0]), *tensors_in(args[1])]
            name = self._name(tensors)
            self._belongs(name, tensors)
            if is_collective:
                self.names.append(name)
        return result


def named_buckets(engine) -> list[tuple[str, object]]:
    """(the name of its unit, or its own, bucket) of all buckets of a chapter or of one of our engines."""
    if not hasattr(engine, "all_units"):
        return [(f"bucket {number}", bucket) for number, bucket in enumerate(buckets_of(engine))]
    found = []
    for unit in engine.all_units:
        found += [(unit.name, bucket) for bucket in getattr(unit, "buckets", [unit])]  # a chapter's unit is a bucket
    return found
