"""Writes down the collectives of a run, when they were waited for, and whether their input stayed as it was."""

import contextlib
import inspect
import sys
import weakref
from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist

from zerolab.measure.held import tensor_leaves
from zerolab.properties.overlap import replaced

KINDS = ("all_reduce", "all_gather", "reduce_scatter")  # the others' names begin so
COLLECTIVES = (*KINDS, "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor",
               "broadcast", "reduce", "gather", "scatter", "all_to_all", "all_to_all_single", "send", "recv", "barrier",
               "all_gather_object", "broadcast_object_list")  # fmt: skip
signature = cache(inspect.signature)
IN_PLACE = ("all_reduce", "broadcast", "reduce")


@dataclass(eq=False)
class Issued:
    """A collective that was started, of `nbytes` (of the whole buffer), and what became of it."""

    name: str
    nbytes: int
    line: str  # ", issued in line 7", if that is in the student's file
    group: dist.ProcessGroup
    given: torch.Tensor | None  # a copy of its input
    outputs: set[int]  # the storages that it writes into
    in_flight: bool = False
    spoilt: bool = False  # its input was changed or freed before somebody waited for it

    def __str__(self):
        dtype = "" if self.given is None else f" in {self.given.dtype}"
        return f"{self.kind} of {self.nbytes:,} bytes{dtype}"

    @property
    def kind(self) -> str:
        return next((kind.replace("_", "-") for kind in KINDS if self.name.startswith(kind)), self.name)

    @property
    def what(self) -> str:
        size = f" of {self.nbytes:,} bytes" if self.nbytes else ""
        return f"{self.name}{size}{self.line}"


class Work:
    """A collective's work that knows whether somebody has waited for it. It keeps no tensor alive."""

    def __init__(self, work, recorder: "Recorder", issued: Issued, inputs):
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
    """Stands in front of the functions of torch.distributed. `issued` are the collectives since `forget`.

    What is issued is named by its line in `file`. `count` is how many were issued or waited for in all, `last` the name
    of the last of them, which is also written to `note`: for whoever finds this rank dead.
    """

    def __init__(self, file: str, note: Path):
        self.file, self.count, self.last = file, 0, ""
        self._note = open(note, "w")  # noqa: SIM115  as long as this rank lives
        self.copies = True  # of what is sent
        self.forget()

    def forget(self, expected=None) -> None:
        """From here on another run is written down. `expected(issued)` may raise, before a collective is started."""
        self.issued: list[Issued] = []
        self.most = Counter()  # kind -> how many were in flight at once, since somebody emptied it
        self.expected = expected

    def count_in_flight(self, kind: str) -> None:
        now = sum(issued.in_flight and issued.kind == kind for issued in self.issued)
        self.most[kind] = max(self.most[kind], now)

    @contextlib.contextmanager
    def recording(self):
        functions = {}
        for name in COLLECTIVES:
            if hasattr(dist, name):
                functions[name] = partial(self._call, name, getattr(dist, name))
        with replaced(**functions):
            yield

    def enter(self, what: str) -> None:
        """This rank issues that collective, or waits for it."""
        self.count += 1
        self.last = what
        self._note.seek(0)
        self._note.write(f"{what[:200]:<200}")
        self._note.flush()

    def line(self) -> str:
        """`, issued in line 7`: where in the file the innermost of this function's callers stands that is there."""
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                return f", issued in line {frame.f_lineno}"
            frame = frame.f_back
        return ""

    def _call(self, name, real, *args, **kwargs):
        given = signature(real).bind(*args, **kwargs).arguments
        nbytes, inputs, outputs = 0, [], []
        for key, value in given.items():
            tensors = tensor_leaves([value])
            nbytes = max(nbytes, sum(tensor.nbytes for tensor in tensors))
            if key == "tensor" or key.startswith("input"):
                inputs += tensors
            elif key == "tensor_list" or key.startswith("output"):
                outputs += tensors
        outputs += inputs if name in IN_PLACE else []
        places = {tensor.untyped_storage()._cdata for tensor in outputs}
        copy = None
        if inputs and self.copies:
            copy = torch.cat([tensor.detach().flatten() for tensor in inputs])
        issued = Issued(name, nbytes, self.line(), given.get("group") or dist.group.WORLD, copy, places)
        if name != "barrier":
            if self.expected is not None:
                self.expected(issued)
            self.issued.append(issued)
        self.enter(issued.what)
        result = real(*args, **kwargs)
        if not isinstance(result, dist.Work):
            return result
        # What lies in the output is changed by the collective itself.
        return Work(result, self, issued, [each for each in inputs if each.untyped_storage()._cdata not in places])
