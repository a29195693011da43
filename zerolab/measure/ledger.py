"""The memory ledger: how many bytes are alive, now and at the peak, and what they are for.

Memory means live storages: whole storages, each counted once, whether a variable, the model or autograd keeps it alive.
On CUDA use the allocator's own peak, which includes the temporaries of kernels.

    MemoryLedger   counts live bytes
    PartsLedger    also sorts them into parameters, gradients, optimizer state, activations and others
"""

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zerolab.measure import intercept
from zerolab.measure.held import (
    engine_tensors,
    held_shards,
    optimizer_of,
    storage_under,
    tensor_leaves,
)
from zerolab.measure.position_in_step import PositionInStep

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
GATHERED, IN_FLIGHT = "gathered units", "gradients in flight"
ACTIVATIONS, TEMPORARIES, BATCH = "activations", "temporaries", "batch and buffers"
HELD = (PARAMETERS, GRADIENTS, OPTIMIZER)
STATE = (*HELD, GATHERED, IN_FLIGHT)  # what differs between the stages; the rest depends on the batch
PARTS = (*STATE, ACTIVATIONS, TEMPORARIES, BATCH)


class MemoryLedger(TorchDispatchMode):
    """`with MemoryLedger() as memory:` around building an engine and its steps; read `live` and `peak` (bytes).

    It sees the results of every operation, so it must be open when storages are made. Or open it later:
    `with MemoryLedger(engine) as memory: engine.training_step(...)` starts with all tensors that can be reached from an
    engine (anything with `model` and `optimizer`), and `track` adds others. Resizing a storage is not an operation, so
    the ledger also listens to `resize_` (intercept.py).
    """

    reserved = 0  # only an allocator has some

    def __init__(self, engine=None):
        super().__init__()
        self.live = self.peak = 0
        self._bytes: dict[int, int] = {}  # a storage's address -> its bytes
        self._references: dict[int, weakref.ref] = {}
        for tensor in [] if engine is None else engine_tensors(engine):
            self.track(tensor)

    def start_step(self, engine=None) -> None:
        """A step of `engine` begins."""
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget earlier peaks: from now on `peak` is the most since this call."""
        self.peak = self.live

    def track(self, tensor: torch.Tensor) -> None:
        """Count the storage under `tensor`, if it is not counted yet."""
        with torch._C.DisableTorchFunctionSubclass():
            tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own part
            if tensor.is_meta and type(tensor) is torch.Tensor or tensor.layout != torch.strided:
                return
            storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._bytes:
            self._bytes[key] = 0
            self._born(key)
            # torch keeps one Python object per storage for as long as C++ keeps the storage, so this reference dies
            # with the memory and not with the variable.
            self._references[key] = weakref.ref(storage, lambda _, key=key: self._gone(key))
        self._set(key, storage.nbytes())

    def key(self, tensor: torch.Tensor) -> int:
        """The ledger's key of the storage under `tensor`."""
        return storage_under(tensor)._cdata

    def _born(self, key: int) -> None:
        """A new storage. For subclasses."""

    def _set(self, key: int, nbytes: int) -> None:
        self.live += nbytes - self._bytes[key]
        self._bytes[key] = nbytes
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        self._references.pop(key, None)
        self.live -= self._bytes.pop(key, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tensor_leaves(result):
            self.track(tensor)
        return result

    @contextlib.contextmanager
    def _around_resize(self, storage: torch.UntypedStorage, size: int):
        yield
        if storage._cdata in self._bytes:
            self._set(storage._cdata, storage.nbytes())

    def __enter__(self):
        intercept.RESIZE.listen(self._around_resize)
        return super().__enter__()

    def __exit__(self, *exception):
        intercept.RESIZE.stop(self._around_resize)
        return super().__exit__(*exception)


@dataclass
class Moment:
    """What is alive after one event: bytes in total and by part, when, in which step and module.

    `step` is "3 reduce gradients", for example, which may run inside `phase` "2 backward". `module` is a name inside
    the model, or "" outside all modules. `when` is the value of the ledger's `clock()`.
    """

    live: int
    phase: str
    step: str
    module: str
    when: object
    parts: Counter

    @property
    def state(self) -> int:
        """Bytes of held state, gathered units and gradients in flight: all but activations, temporaries, batch."""
        return sum(self.parts[part] for part in STATE)


NOTHING = Moment(0, "", "", "", 0.0, Counter())


class PartsLedger(MemoryLedger):
    """`with PartsLedger(engine) as memory: engine.training_step(...)`; then `memory.peak_moment()`, `memory.moments()`.

    The engine is anything with `model` and `optimizer`. The purpose of a storage shows only later: when it is saved for
    backward, sent by a collective, or put into a gradient. So the ledger records every birth, change of
    size and death with an index for the storage, learns what each index is for, and adds up at the end:

        parameters, gradients, optimizer   held: what `held_bytes` finds before the step and at the update
        gathered units                     whole parameters, which are gathered and freed
        gradients in flight                whole gradients that become shards
        activations                        made in a forward (or a recomputation) and alive when its backward starts
        batch and buffers                  alive before the step began, and none of the above
        temporaries                        the rest

    `clock()` gives the time of each event. With `memory.clock = timeline.now` of an open timeline,
    `timeline.seconds(moment.when)` is the GPU's time, as in the timeline's spans: the host may be far ahead.
    """

    def __init__(self, engine=None):
        self._count, self._index = 0, {}  # storage -> its index
        self.clock: Callable[[], object] = time.perf_counter
        self._events: list[tuple] = []  # (index, bytes from now on, phase, step, module, when)
        self._part: dict[int, str] = {}  # index -> part
        self._growing: set[int] = set()  # storages made since the forward began
        self._handles, self._engine, self._where = [], engine, PositionInStep()
        super().__init__(engine)

    def start_step(self, engine=None) -> None:
        """A step begins: forget the one before. Called on entering, and again for every further step."""
        self._engine = engine or self._engine
        for handle in self._handles:
            handle.remove()
        self._handles, self._events, self._part, self._growing = [], [], {}, set()
        self._where.forget(self._engine and self._engine.model)
        if self._engine is not None:
            model = self._engine.model
            self._sort_held()
            self._handles.append(optimizer_of(self._engine).register_step_pre_hook(lambda *_: self._sort_held()))
            for param in model.parameters():
                if param.requires_grad:
                    # Before autograd adds a gradient to `param.grad`, as in ZeRO-1, and after it has put it there.
                    self._handles.append(param.register_hook(partial(self._before_accumulation, param)))
                    self._handles.append(self._watch_gradient(param))
        for key, index in self._index.copy().items():  # gloo's thread may release a buffer meanwhile
            nbytes = self._bytes.get(key, 0)
            # A storage that is empty now has whole parameters, freed.
            self._part.setdefault(index, BATCH if nbytes else GATHERED)
            if nbytes:
                self._note(index, nbytes)
        self.reset_peak()

    def moments(self) -> Iterator[Moment]:
        """The live bytes after each event since `start_step`, in order."""
        sizes, parts, live = {}, Counter(), 0
        for index, nbytes, phase, step, module, when in self._events:
            part, more = self._part.get(index, TEMPORARIES), nbytes - sizes.get(index, 0)
            sizes[index] = nbytes
            live += more
            parts[part] += more
            yield Moment(live, phase, step, module, when, parts.copy())

    def peak_moment(self, of=lambda moment: moment.live) -> Moment:
        """The first moment with the most of something: by default, of live bytes."""
        return max(self.moments(), key=of, default=NOTHING)

    def _sort_held(self) -> None:
        for part, tensors in held_shards(self._engine).items():
            self._put(tensors, part, again=True)

    def _watch_gradient(self, param: nn.Parameter):
        hook = param.register_post_accumulate_grad_hook(self._on_gradient)
        with torch._C.DisableTorchFunctionSubclass():  # ZeRO-3 raises an error when a freed parameter is read
            hooks = param._post_accumulate_grad_hooks
        for earlier in [key for key in hooks if key != hook.id]:
            hooks[earlier] = hooks.pop(earlier)  # this one first: the engine's may take the gradient away
        return hook

    def _before_accumulation(self, param: nn.Parameter, gradient: torch.Tensor) -> None:
        self._put([gradient], IN_FLIGHT)

    def _on_gradient(self, param: nn.Parameter) -> None:
        if param.grad is not None:
            self._put([param.grad], IN_FLIGHT)

    def _put(self, tensors, part: str, again: bool = False) -> None:
        """The storages under `tensors` belong to `part`, unless they have a part; with `again` even then."""
        for tensor in tensors:
            index = self._index.get(self.key(tensor))
            if index is not None and (again or index not in self._part):
                self._part[index] = part

    def _born(self, key: int) -> None:
        self._index[key] = self._count
        self._count += 1
        if torch.is_grad_enabled():
            self._growing.add(key)

    def _set(self, key: int, nbytes: int) -> None:
        if nbytes != self._bytes[key]:
            self._note(self._index[key], nbytes)
        super()._set(key, nbytes)

    def _gone(self, key: int) -> None:
        index = self._index.pop(key, None)
        if self._bytes.get(key):
            self._note(index, 0)
        self._growing.discard(key)
        super()._gone(key)

    def _forward_ends(self) -> None:
        """Storages that a forward has made and that are still alive are activations."""
        for key in self._growing:
            self._part.setdefault(self._index[key], ACTIVATIONS)
        self._growing.clear()

    def _note(self, index: int, nbytes: int) -> None:
        where = self._where.phase, self._where.step, self._where.module()
        self._events.append((index, nbytes, *where, self.clock()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.replace("::", ".")
        self._where.see(func, args)
        if self._growing and torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled():
            # Backward continues after a forward, or after a part of one that it has recomputed.
            self._forward_ends()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if name == "c10d._allgather_base_":
            self._put([args[0]], GATHERED)
        elif name == "c10d._reduce_scatter_base_":
            self._put(args[:2], IN_FLIGHT)  # the shard too: with offload it is alive only until it is copied
        elif name == "fsdp.split_with_sizes_copy":
            self._put(kwargs["out"], GATHERED)
        elif name == "fsdp.all_gather_copy_in":
            self._put(tensor_leaves(result), GATHERED)
        elif name == "fsdp.chunk_cat":
            self._put([*args[0], kwargs["out"]], IN_FLIGHT)
        return result

    def __enter__(self):
        self._where.open()
        result = super().__enter__()
        self.start_step()
        return result

    def __exit__(self, *exception):
        result = super().__exit__(*exception)
        self._where.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return result


def release_sent(device: torch.device) -> None:
    """Make torch release what earlier engines have sent, before the allocator is asked for its bytes. A collective.

    Over NCCL the tensors of a collective that only C++ has waited for (DDP's buckets) stay alive until a thread that
    looks ten times a second has seen it end, and the group's next collective begins.
    """
    if device.type != "cpu" and dist.get_backend() != "gloo":
        torch.accelerator.synchronize(device)
        time.sleep(0.2)
        dist.barrier()


def warm_up(device: torch.device) -> None:
    """Make CUDA's libraries allocate what they keep forever, before anything is counted; synchronises.

    cuBLAS allocates a workspace of about 32 MB in its first product, and another one in the thread in which backward
    runs. They would be counted as the first engine's.
    """
    weight = torch.ones(16, 16, device=device, requires_grad=True)
    bias = torch.ones(16, device=device, requires_grad=True)
    torch.nn.functional.linear(torch.ones(16, 16, device=device), weight, bias).sum().backward()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
