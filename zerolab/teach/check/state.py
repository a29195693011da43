"""The state of an engine, a bucket, a unit or a reduction: all tensors and plain values, by their paths."""

from dataclasses import dataclass, field

import torch

from zerolab.teach.check.recorder import Work

CLASSES = ("ZeRO1", "ZeRO2", "ZeRO3", "Bucket", "Unit", "Reduction")
PLAIN = (int, float, str, slice)
NOT_COMPARED = ("backward_id",)  # autograd counts on from run to run


@dataclass
class Held:
    """A tensor: `value` is None while a collective writes to it, or if its storage is too small to be read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int  # of its storage
    lies_in: str  # the first tensor on the same storage, and where
    value: torch.Tensor | None

    def __str__(self):
        return f"a tensor of shape {self.shape}"


@dataclass
class State:
    """`holds`: {path: tensor or plain value}. What is not there counts as None."""

    writing: set[int] = field(default_factory=set)  # the storages that a collective in flight writes to
    holds: dict[str, object] = field(default_factory=dict)
    _first: dict[int, str] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)

    def add(self, path: str, thing) -> None:
        if isinstance(thing, PLAIN):
            self.holds[path] = thing
        elif isinstance(thing, torch.Tensor):
            self._add_tensor(path, thing)
        elif isinstance(thing, Work):
            if thing.issued.in_flight:  # one that is over may be kept, or dropped
                self.holds[path] = "a collective in flight"
        elif isinstance(thing, dict) and path.startswith("what "):  # returned; an engine's are indexes over its buckets
            self.add(path, list(thing.values()))
        elif isinstance(thing, (list, tuple)):
            self.holds[f"len({path})"] = len(thing)
            for index, each in enumerate(thing):
                self.add(f"{path}[{index}]", each)
        elif id(thing) in self._seen:
            self.holds[path] = getattr(thing, "name", "seen before")  # a unit's neighbours are units
        elif type(thing).__name__ in CLASSES:
            self._seen.add(id(thing))
            for name, value in vars(thing).items():
                if name == "missing":
                    pairs = zip(thing.names, thing.params)
                    self.holds[f"{path}.missing"] = [name for name, param in pairs if param in value]
                elif name not in NOT_COMPARED:
                    self.add(f"{path}.{name}", value)

    def _add_tensor(self, path: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        home = self._first.setdefault(place, path)
        begin = tensor.storage_offset()
        readable = storage.nbytes() >= (begin + tensor.numel()) * tensor.element_size() and place not in self.writing
        value = tensor.detach().clone() if readable else None
        lies_in = f"{home}, element {begin}" if home != path else "a storage of its own"
        self.holds[path] = Held(tuple(tensor.shape), tensor.dtype, storage.nbytes(), lies_in, value)
        if tensor.is_leaf and tensor.grad is not None:
            self.add(f"{path}.grad", tensor.grad)
