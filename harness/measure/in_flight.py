"""What travels while a rank computes: collectives from their issue to the wait for them, and products, in order."""

import contextlib
from types import SimpleNamespace
from unittest.mock import patch

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {"all_reduce": "reduce", "reduce_scatter_single": "reduce", "all_gather_single": "gather"}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")  # the work that a collective can hide behind


class InFlight(TorchDispatchMode):
    """`with InFlight() as seen: engine.training_step(...)`; then `seen.events`, in order.

    ("issue", kind, n) is the n-th collective of its kind that somebody can wait for, ("wait", kind, n) the wait for it,
    ("compute",) a product of matrices.
    """

    def __init__(self):
        super().__init__()
        self.events: list[tuple] = []
        self._patches = contextlib.ExitStack()

    def computed_meanwhile(self, kind: str) -> list[bool]:
        """For each collective of this kind, as issued: has this rank computed before somebody waited for it?"""
        found = []
        for start, event in enumerate(self.events):
            if event[:2] == ("issue", kind):
                waited = ("wait", *event[1:])
                end = self.events.index(waited) if waited in self.events else len(self.events)
                found.append(("compute",) in self.events[start:end])
        return found

    def _watched(self, kind: str, issue):
        def issue_and_note(*args, **options):
            work = issue(*args, **options)
            if work is None:  # it has ended already
                return None
            number = sum(event[:2] == ("issue", kind) for event in self.events)
            self.events.append(("issue", kind, number))

            def wait():
                self.events.append(("wait", kind, number))
                return work.wait()

            return SimpleNamespace(wait=wait)

        return issue_and_note

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in PRODUCTS:
            self.events.append(("compute",))
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        for name, kind in KINDS.items():
            self._patches.enter_context(patch.object(dist, name, self._watched(kind, getattr(dist, name))))
        return super().__enter__()

    def __exit__(self, *raised):
        self._patches.close()
        return super().__exit__(*raised)
