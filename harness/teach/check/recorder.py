"""Writes down the collectives of a run, when they were waited for, and whether their input stayed as it was."""

import contextlib
import weakref
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from harness.measure.held import tensor_leaves
from harness.properties.overlap import replaced

KINDS = {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
COLLECTIVES = (*KINDS, "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor",
               "broadcast", "reduce", "gather", "scatter", "all_to_all", "all_to_all_single", "send", "recv", "barrier",
               "all_gather_object", "broadcast_object_list")  # fmt: skip


@dataclass(eq=False)
class Issued:
    """A collective that was started, of `nbytes` (of the whole buffer), and what became of it."""

    what: str
    kind: str
    nbytes: int
    group: dist.ProcessGroup
    given: torch.Tensor | None  # a copy of its input
    outputs: set[int]  # the storages that it writes into
    in_flight: bool = False
    spoilt: bool = False  # its input was changed or freed before somebody waited for it

    def __str__(self):
        dtype = "" if self.given is None else f" in {self.given.dtype}"
        return f"{self.kind} of {self.nbytes:,} bytes{dtype}"


class Work:
    """A collective's work that knows whether somebody has waited for it. It keeps no tensor alive."""

    def __init__(self, work, recorder: "Recorder", issued: Issued, inputs):
        self._work, self._recorder, self.issued = work, recorder, issued
        self._inputs = [(weakref.ref(tensor), tensor._version) for tensor in inputs]
        issued.in_flight = True
        recorder.count_in_flight()

    def wait(self, *args, **kwargs):
        if self.issued.in_flight:
            self.issued.in_flight = False
            for reference, version in self._inputs:
                tensor = reference()
                if tensor is not None and (tensor._version != version or not tensor.untyped_storage().nbytes()):
                    self.issued.spoilt = True
        with self._recorder.inside(self.issued.what):
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._work, name)


class Recorder:
    """Stands in front of the functions of torch.distributed. `issued` are the collectives since `forget`."""

    copies = True  # of what is sent

    def __init__(self):
        self.forget()

    def forget(self) -> None:
        self.issued: list[Issued] = []
        self.most = 0  # in flight at once, since somebody set it to 0

    def count_in_flight(self) -> None:
        self.most = max(self.most, sum(issued.in_flight for issued in self.issued))

    def __enter__(self):
        here = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
        self._replaced = replaced(**{name: partial(self._call, name, real) for name, real in here.items()})
        self._replaced.__enter__()
        return self

    def __exit__(self, *exception):
        self._replaced.__exit__(*exception)

    def begins(self, what: str) -> str:
        """A collective is about to be issued. Returns what it is called."""
        return what

    def inside(self, what: str):
        """A context: this rank is in that collective, to issue it or to wait for it."""
        return contextlib.nullcontext()

    def _call(self, name, real, *args, **kwargs):
        given = [*args, *kwargs.values()]
        nbytes = 0
        for argument in given:
            nbytes = max(nbytes, sum(tensor.nbytes for tensor in tensor_leaves([argument])))
        what = self.begins(f"{name} of {nbytes:,} bytes" if nbytes else name)
        named = [value for key, value in kwargs.items() if key.startswith("input") or key == "tensor"]
        inputs = tensor_leaves([*(args[:2] if name == "all_reduce" else args[1:2]), *named])
        outputs = tensor_leaves([*args[:1], kwargs.get("output"), kwargs.get("output_tensor"), kwargs.get("tensor")])
        kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), name)
        group = next((each for each in given if isinstance(each, dist.ProcessGroup)), dist.group.WORLD)
        with torch.no_grad():
            copy = torch.cat([tensor.detach().flatten() for tensor in inputs]) if inputs and self.copies else None
        places = {tensor.untyped_storage()._cdata for tensor in outputs}
        issued = Issued(what, kind, nbytes, group, copy, places)
        if name != "barrier":
            self.issued.append(issued)
        with self.inside(what):
            result = real(*args, **kwargs)
        if not isinstance(result, dist.Work):
            return result
        # What lies in the output is changed by the collective itself.
        return Work(result, self, issued, [t for t in inputs if t.untyped_storage()._cdata not in places])
