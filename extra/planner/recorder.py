"""The recorder of the events of a real engine's step, on fake tensors and a group that moves nothing."""

import gc
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from extra.planner.events import Await, Collective, Mark, Memory, Operation, Recording, Wait
from extra.planner.one_rank import Setup, build, mesh_for, parameters_of, train
from extra.planner.streams import Streams
from zerolab.measure.fake_ranks import fake_ranks
from zerolab.measure.held import tensor_leaves
from zerolab.measure.ledger import MemoryLedger
from zerolab.measure.position_in_step import PositionInStep
from zerolab.measure.traffic import group_of, kind_of, whole_bytes, works_in

# The CPU's flash attention replaces the GPU's: it has the same products and saves the same tensors. Its backward
# computes the scores again. Operation: (the index of the queries in its arguments, number of matrix products).
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": (0, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 5),
}
WRITES_ONLY = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_", "zeros_like", "ones_like", "new_zeros",
               "full_like", "normal_"}  # fmt: skip
# These read only rows or single elements of their first tensor.
LOOKS_UP = {"embedding", "nll_loss_forward", "nll_loss_backward"}
NO_KERNEL = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "promote_types", "device"}


class Recorder(MemoryLedger):
    """Record a step: inside `with Recorder() as recorder`, build an engine, run a step, call `recorder.start_step()`,
    run another step, and read `recorder.events`.

    Operations, collectives and storages are seen when torch dispatches them, waits and streams where they are called.
    Raises RuntimeError if an engine does not wait for the collectives of one kind in the order in which it issued them.
    """

    def __init__(self):
        super().__init__()
        self._on = False
        self._where = PositionInStep()
        self._waiting: dict[tuple, list] = {}  # (kind, ranks, stride) -> works that nobody has waited for
        self._marks = 0
        self._streams = Streams(self._mark, self._await)
        self._owners: dict[int, str] = {}  # a storage's address -> the stream in which it was allocated

    def start_step(self) -> None:
        """Start to record events. Until now only live memory was recorded."""
        self.events, self._on, self.live_bytes = [], True, self.live
        self._waiting, self._first_mark = {}, self._marks

    def end(self) -> None:
        self._on = False

    # Operations and collectives.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name.split("::")[1]
        if self._where.see(func, args) or func.namespace == "prim":
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if self._on:
            if (kind := kind_of(func)) is not None:
                self._collective(kind, args, result)
            elif func.namespace not in ("c10d", "_c10d_functional"):
                self._operation(func, name, args, kwargs, result)
        for tensor in tensor_leaves(result):
            self.track(tensor)
        return result

    def _operation(self, func, name: str, args, kwargs, result) -> None:
        if name in NO_KERNEL:
            return
        made, given = tensor_leaves(result), tensor_leaves((args, kwargs))
        if not made and not func._schema.is_mutable:
            return
        mine = {self.key(tensor) for tensor in given}
        if made and not func._schema.is_mutable and all(self.key(tensor) in mine for tensor in made):
            return  # a view
        nbytes = sum(_nbytes(tensor) for tensor in made)
        if func._schema.is_mutable:
            nbytes = sum(_nbytes(tensor) for tensor in _arguments(func, args, kwargs, _is_written))
        if name == "embedding_dense_backward":
            nbytes += _nbytes(args[0])
        elif name in LOOKS_UP:
            nbytes *= 2 if name == "embedding" else 1
        elif name in WRITES_ONLY:
            source = args[1:2] if "copy_" in name else ()
            nbytes += sum(map(_nbytes, tensor_leaves(source)))
        else:
            out = sum(_nbytes(tensor) for tensor in _arguments(func, args, kwargs, lambda argument: argument.is_out))
            nbytes += sum(_nbytes(tensor) for tensor in given) - out  # it is written and not read
        dtype = next((tensor.dtype for tensor in (*made, *given) if tensor.is_floating_point()), torch.float32)
        short = "fp32" if dtype in (torch.float32, torch.float64) else "bf16"
        flops, attends = _flops(func, name, args, kwargs, result), None
        if name in ATTENTION:
            keys = args[ATTENTION[name][0] + 1].shape
            attends = keys[3], keys[2]
        self.events.append(Operation(self._streams.current, name, flops, nbytes, short, self._where.step, attends))

    def _collective(self, kind: str, args, result) -> None:
        ranks = dist.get_process_group_ranks(group_of(args))
        group = len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
        self.events.append(Collective(self._streams.current, kind, whole_bytes(kind, args), *group, self._where.step))
        works = works_in(result)
        self._waiting.setdefault((kind, *group), []).extend(works[:1])

    def _waited(self, work) -> None:
        for key, works in self._waiting.items():
            if any(work is other for other in works):
                if works[0] is not work:
                    raise RuntimeError(f"waited for a later {key[0]} first: the replay supports only waits in order")
                works.pop(0)
                self.events.append(Wait(self._streams.current, *key))
                return

    def _mark(self, stream: str) -> int:
        self._marks += 1
        if self._on:
            self.events.append(Mark(stream))
        return self._marks

    def _await(self, stream: str, number: int) -> None:
        if self._on and number > self._first_mark:  # what was marked earlier is over
            self.events.append(Await(stream, self._marks + 1 - number))

    def _set(self, key: int, nbytes: int) -> None:
        if nbytes != self._bytes[key]:
            self._freed(key)
            self._owners[key] = self._streams.current
            self._note(key, nbytes)
        super()._set(key, nbytes)

    def _gone(self, key: int) -> None:
        self._freed(key)
        super()._gone(key)

    def _freed(self, key: int) -> None:
        """A storage returns to the stream where it was allocated."""
        self._note(key, -self._bytes.get(key, 0))
        self._owners.pop(key, None)

    def _note(self, key: int, more: int) -> None:
        if self._on and more:
            self.events.append(Memory(self._owners[key], more))

    # Waits. The fake group's works have a different `wait`.

    def __enter__(self):
        with ExitStack() as stack:
            for kind in {dist.Work, getattr(torch._C._distributed_c10d, "FakeWork", dist.Work)}:
                if "wait" in vars(kind):
                    stack.enter_context(mock.patch.object(kind, "wait", self._noting(kind.wait)))
            stack.enter_context(self._streams.replaced)
            self._replaced = stack.pop_all()
        return super().__enter__()

    def _noting(self, plain):
        def wait(work, *timeout):
            if self._on:
                self._waited(work)
            return plain(work, *timeout)

        return wait

    def __exit__(self, *exception):
        result = super().__exit__(*exception)
        self._replaced.close()
        return result


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements. An expanded tensor counts its memory once, a DTensor only this rank's part."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    with torch._C.DisableTorchFunctionSubclass():
        return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _is_written(argument) -> bool:
    written = argument.alias_info is not None and argument.alias_info.is_write
    return written and argument.name != "grads"  # AdamW may scale them, and does not here


def _arguments(func, args, kwargs, wanted) -> list[torch.Tensor]:
    """The tensors in the arguments of an operator's schema for which `wanted(argument)` is true."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if wanted(argument):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += tensor_leaves(value)
    return found


def _flops(func, name: str, args, kwargs, result) -> int:
    """The FLOPs, by torch's own table. For causal attention half of the table's value is computed."""
    if name in ATTENTION:
        first, products = ATTENTION[name]
        (batch, heads, queries, size), keys = args[first].shape, args[first + 1].shape[2]
        return products * batch * heads * queries * keys * size  # times 2 for a product, by 2 as it is causal
    formula = flop_registry.get(func.overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula else 0


def record(setup: Setup) -> Recording:
    """The events of the second step of `setup`. In the first step the optimizer creates its state."""
    enabled = gc.isenabled()
    with fake_ranks(setup.ranks):
        mesh = mesh_for(setup)
        with FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
            engine = build(setup, mesh)
            gc.collect()
            gc.disable()  # what is freed is freed by its last reference, at the same place in every step
            try:
                train(engine, replace(setup, accumulate=1))
                recorder.start_step()
                train(engine, setup)
                recorder.end()
            finally:
                if enabled:
                    gc.enable()
            del engine
    parameters = sum(param.numel() for _, param in parameters_of(setup.config))
    return Recording(tuple(recorder.events), recorder.live_bytes, parameters)
