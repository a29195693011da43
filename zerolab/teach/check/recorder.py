"""Records the collectives of a run: whether they were waited for, and whether their input was changed meanwhile."""

import contextlib
import inspect
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import zero1
import zero2
from zerolab.measure.held import tensor_leaves

KINDS = ("all_reduce", "all_gather", "reduce_scatter")  # the others' names begin like these
IN_PLACE = ("all_reduce", "broadcast", "reduce")
NAMES = (
    *("all_reduce", "broadcast", "reduce", "gather", "scatter", "barrier"),
    *("all_gather", "all_gather_single", "all_gather_into_tensor", "all_gather_object"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "broadcast_object_list"),
)


@dataclass(eq=False)
class Issued:
    """A collective that was started, of `nbytes` (of the whole buffer), and what became of it."""

    name: str
    nbytes: int
    group: dist.ProcessGroup
    given: torch.Tensor | None  # a copy of its input
    outputs: set[int]  # the storages that it writes to
    in_flight: bool = False
    spoilt: bool = False  # its input was changed or freed before the wait

    def __str__(self):
        dtype = "" if self.given is None else f" in {self.given.dtype}"
        return f"{self.kind} of {self.nbytes:,} bytes{dtype}"

    @property
    def kind(self) -> str:
        for kind in KINDS:
            if self.name.startswith(kind):
                return kind.replace("_", "-")
        return self.name

    @property
    def what(self) -> str:
        return f"{self.name} of {self.nbytes:,} bytes" if self.nbytes else self.name


class Work:
    """The work of a collective. It knows whether somebody has waited for it, and keeps no tensor alive."""

    def __init__(self, work, recorder: "Recorder", issued: Issued, inputs: list[torch.Tensor]):
        self._work, self._recorder, self.issued = work, recorder, issued
        self._inputs = [(weakref.ref(tensor), tensor._version) for tensor in inputs]
        issued.in_flight = True
        recorder.count_in_flight(issued.kind)

    def wait(self, *args, **kwargs):
        if self.issued.in_flight:
            self.issued.in_flight = False
            for reference, version in self._inputs:
                tensor = reference()
                if tensor is not None and (tensor._version != version or not tensor.untyped_storage().nbytes()):
                    self.issued.spoilt = True
        self._recorder.enter(self.issued.what)
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._work, name)


class Recorder:
    """`with recorder.recording():` writes down what the functions of torch.distributed start; `issued` since `begin`.

    `count` is how many collectives were started or waited for in all, and `last` the name of the last of them. It is
    also written to the file `note`, so that the report can name it if this rank dies.
    """

    def __init__(self, file: str, note: Path):
        self.file, self.count, self.last = file, 0, ""
        self._note = open(note, "w")  # noqa: SIM115  as long as this rank lives
        self.begin()

    def begin(self, expected: Callable[[Issued], None] | None = None, copies: bool = True) -> None:
        """Another run begins. `expected(issued)` may raise, before a collective is started.

        With `copies` the input of each collective is kept.
        """
        self.issued: list[Issued] = []
        self.most = Counter()  # kind -> how many were in flight at once
        self.expected, self.copies = expected, copies

    def count_in_flight(self, kind: str) -> None:
        now = sum(issued.in_flight and issued.kind == kind for issued in self.issued)
        self.most[kind] = max(self.most[kind], now)

    @contextlib.contextmanager
    def recording(self):
        functions = {}
        for name in NAMES:
            if hasattr(dist, name):
                functions[name] = partial(
                    self._start, name, getattr(dist, name), inspect.signature(getattr(dist, name))
                )
        with contextlib.ExitStack() as patches:
            patches.enter_context(mock.patch.multiple(dist, **functions))
            # The chapters' names for two torch functions.
            patches.enter_context(mock.patch.object(zero1, "all_gather", functions["all_gather_single"]))
            patches.enter_context(mock.patch.object(zero2, "reduce_scatter", functions["reduce_scatter_single"]))
            yield

    def enter(self, what: str) -> None:
        """This rank starts this collective, or waits for it."""
        self.count += 1
        self.last = what
        self._note.seek(0)
        self._note.write(f"{what[:200]:<200}")
        self._note.flush()

    def _start(self, name, real, signature, *args, **kwargs):
        nbytes, inputs, outputs = 0, [], []
        arguments = signature.bind(*args, **kwargs).arguments
        for key, value in arguments.items():
            tensors = tensor_leaves([value])
            nbytes = max(nbytes, sum(tensor.nbytes for tensor in tensors))
            if key == "tensor" or key.startswith("input"):
                inputs += tensors
            elif key == "tensor_list" or key.startswith("output"):
                outputs += tensors
        outputs += inputs if name in IN_PLACE else []
        places = {tensor.untyped_storage()._cdata for tensor in outputs}
        copy = torch.cat([tensor.detach().flatten() for tensor in inputs]) if inputs and self.copies else None
        issued = Issued(name, nbytes, arguments.get("group") or dist.group.WORLD, copy, places)
        if name != "barrier":
            if self.expected is not None:
                self.expected(issued)
            self.issued.append(issued)
        self.enter(issued.what)
        result = real(*args, **kwargs)
        if not isinstance(result, dist.Work):
            return result
        # The collective itself changes what is in its output.
        return Work(result, self, issued, [each for each in inputs if each.untyped_storage()._cdata not in places])
