"""The collective ledger: which collectives an engine really issued, in which step, and how many bytes they send."""

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerolab.measure.held import tensor_leaves
from zerolab.measure.position_in_step import PositionInStep

# By the beginning of the name in torch, without underscores; the first that fits. A barrier sends nothing that counts.
KINDS = {
    "allreduce": "all-reduce",
    "reducescatter": "reduce-scatter",
    "allgather": "all-gather",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all-to-all",
    "send": "send",
    "isend": "send",
    "batchp2pops": "send",
    "recv": "receive",
    "irecv": "receive",
}


def kind_of(func) -> str | None:
    """The kind of communication that torch dispatches as `func`, or None for any other operation.

    An all-gather is `_allgather_base_`, `allgather_into_tensor_coalesced_` and others; all_gather_into_tensor where
    DTensor and other functional code calls it.
    """
    if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        name = func._schema.name.split("::")[1].replace("_", "")
        for prefix, kind in KINDS.items():
            if name.startswith(prefix):
                return kind
    return None


@dataclass(frozen=True)
class Collective:
    """One collective, or one send or receive: its kind, the bytes of the whole buffer, the bytes that this rank sends
    for it, the step, and the bytes of an element.

    A collective in bfloat16 sends as many elements as one in float32, and half the bytes.
    """

    kind: str
    whole_bytes: int
    sent_bytes: float
    step: str
    element_bytes: int = 4

    @property
    def sent_elements(self) -> float:
        """Elements this rank sends for it: what the ZeRO paper counts traffic in."""
        return self.sent_bytes / self.element_bytes


def sent_bytes(kind: str, whole_bytes: int, world_size: int, is_root: bool = False) -> float:
    """Logical bytes that a rank sends, for a buffer of `whole_bytes` (the whole one, not the shard).

    All-gather and reduce-scatter: (N-1)/N of it; all-reduce: both, one after the other. All-to-all: (N-1)/N of what
    this rank has for all, as if the parts were equal. A send: all of it; a receive: nothing.

    A broadcast brings the buffer to N-1 ranks. That is (N-1)/N of it per rank when the ranks take turns, which is how
    `ZeroRedundancyOptimizer` uses it, and so it is with its mirror image, reduce. In a gather every rank but the root
    sends its N-th, in a scatter the root sends N-1 of them.

    A backend may send more inside: gloo implements reduce-scatter as an all-reduce and a slice.
    """
    if kind in ("send", "receive"):
        return whole_bytes if kind == "send" else 0
    if kind in ("gather", "scatter"):
        parts = (world_size - 1 if is_root else 0) if kind == "scatter" else int(not is_root)
        return whole_bytes * parts / world_size
    return (2 if kind == "all-reduce" else 1) * whole_bytes * (world_size - 1) / world_size


class TrafficLedger(TorchDispatchMode):
    """`with TrafficLedger() as traffic: engine.training_step(...)`; then `traffic.collectives`, in order.

    It watches from outside: every collective, send and receive passes torch's dispatcher, whoever issues it (Python,
    DDP's reducer in C++, FSDP), and so do `record_function` labels, which name the step. Two things it does not see:
    what another Python thread issues, and what does not go through torch, such as NVSHMEM or MPI.
    """

    def __init__(self):
        super().__init__()
        self.collectives: list[Collective] = []
        self._where = PositionInStep()

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank sent while the ledger was open, rounded to whole bytes."""
        return round(sum(collective.sent_bytes for collective in self.collectives))

    @property
    def sent_elements(self) -> int:
        """Elements this rank sent while the ledger was open, rounded."""
        return round(sum(collective.sent_elements for collective in self.collectives))

    @property
    def count(self) -> Counter:
        """How many collectives of each kind."""
        return Counter(collective.kind for collective in self.collectives)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._where.see(func, args)
        if (kind := kind_of(func)) is not None:
            self._note(kind, args)
        return func(*args, **(kwargs or {}))

    def _note(self, kind: str, args) -> None:
        whole, group = whole_bytes(kind, args), group_of(args)
        element = next((tensor.element_size() for tensor in tensor_leaves(args)), 4)
        is_root = kind in ("gather", "scatter") and args[3] == group.rank()
        sent = sent_bytes(kind, whole, group.size(), is_root)
        self.collectives.append(Collective(kind, whole, sent, self._where.step, element))


def whole_bytes(kind: str, args) -> int:
    """Bytes of the whole buffer of a collective that torch dispatches with `args`."""
    if kind in ("gather", "scatter"):  # only the root has the whole buffer, as a list of parts; all have one part
        part = args[1] if kind == "gather" else args[0]
        return group_of(args).size() * sum(tensor.nbytes for tensor in tensor_leaves(part))
    if kind == "send" and isinstance(args[1], list):  # a functional batch: (["isend", "irecv"], ..., tensors, group)
        return sum(tensor.nbytes for name, tensor in zip(args[0], args[3]) if name == "isend")
    # It is the larger of a collective's tensors: output of an all-gather, input of a reduce-scatter.
    whole = max(sum(tensor.nbytes for tensor in tensor_leaves(argument)) for argument in args[:2])
    if kind == "all-gather" and isinstance(args[-1], str):  # functional: only the shard is passed in
        whole *= group_of(args).size()
    return whole


def group_of(args):
    """The process group of a collective that torch dispatches with `args`."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(argument)
            except (RuntimeError, TypeError):
                continue  # the ReduceOp is a script object as well
    return dist.distributed_c10d._resolve_process_group(args[-1])


def was_async(func, args) -> bool:
    """Whether a collective that torch dispatches was issued to be waited for later."""
    names = [argument.name for argument in func._schema.arguments]
    return "async_op" in names and dict(zip(names, args)).get("async_op", True)


def works_in(result) -> list[dist.Work | None]:
    """The work that a collective returned; None for one that has run already."""
    return [dist.Work.unbox(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.ScriptObject)]
