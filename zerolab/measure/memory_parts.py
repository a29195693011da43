"""The memory ledger that says what the bytes are for: at the worst moment of a step, and all along it."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from zerolab.measure.held import held_shards, optimizer_of, tensor_leaves
from zerolab.measure.ledger import MemoryLedger
from zerolab.measure.position_in_step import PositionInStep

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
GATHERED, IN_FLIGHT = "gathered units", "gradients in flight"
ACTIVATIONS, TEMPORARIES, BATCH = "activations", "temporaries", "batch and buffers"
HELD = (PARAMETERS, GRADIENTS, OPTIMIZER)
STATE = (*HELD, GATHERED, IN_FLIGHT)  # what the stages differ in; the rest depends on the batch
PARTS = (*STATE, ACTIVATIONS, TEMPORARIES, BATCH)


@dataclass
class Moment:
    """What is alive after one event: bytes by part and in all, when, in which step and module.

    `step` is "3 reduce gradients", say, which may run inside `phase` "2 backward"; `module` a name inside the model,
    or "" outside all modules; `when` is what the ledger's `clock()` said.
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

    The engine is anything with `model` and `optimizer`. What a storage is for shows only after its birth: it
    is saved for backward, sent by a collective, put into a gradient. So the ledger writes down every birth, change
    of size and death with a number for the storage, sorts the numbers as it learns more, and adds up at the end:

        parameters, gradients, optimizer   held: what `held_bytes` finds before the step, and when it updates
        gathered units                     whole parameters that come and go
        gradients in flight                whole gradients on their way into shards
        activations                        made in a forward (or a recomputation) and alive when its backward starts
        batch and buffers                  there before the step began and nothing of the above
        temporaries                        the rest

    `clock()` says when something happens. With `memory.clock = timeline.now` of an open timeline
    `timeline.seconds(moment.when)` is the GPU's time, as its spans have it: the host may be far ahead.
    """

    def __init__(self, engine=None):
        self._counter, self._number = 0, {}  # storage -> the number it has
        self.clock: Callable[[], object] = time.perf_counter
        self._events: list[tuple] = []  # (number, bytes from now on, phase, step, module, when)
        self._part: dict[int, str] = {}  # number -> part
        self._growing: set[int] = set()  # storages made since the forward began
        self._handles, self._engine, self._where = [], engine, PositionInStep()
        self.failed: Moment | None = None  # what was alive when an operation found no memory
        super().__init__(engine)

    def begin(self, engine=None) -> None:
        """A step begins: forget the one before. Called on entering; again for the next step."""
        self._engine, self.failed = engine or self._engine, None
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
                    self._handles.append(param.register_hook(lambda gradient: self._put([gradient], IN_FLIGHT)))
                    self._handles.append(self._watch_gradient(param))
        for key, number in self._number.copy().items():  # gloo's thread may let go of a buffer meanwhile
            nbytes = self._bytes.get(key, 0)
            # What is empty now are somebody's whole parameters, freed.
            self._part.setdefault(number, BATCH if nbytes else GATHERED)
            if nbytes:
                self._note(number, nbytes)
        self.reset_peak()

    def moments(self) -> Iterator[Moment]:
        """What was alive after each event since `begin`, in order."""
        sizes, parts, live = {}, Counter(), 0
        for number, nbytes, phase, step, module, when in self._events:
            part, more = self._part.get(number, TEMPORARIES), nbytes - sizes.get(number, 0)
            sizes[number] = nbytes
            live += more
            parts[part] += more
            yield Moment(live, phase, step, module, when, parts.copy())

    def peak_moment(self, of=lambda moment: moment.live) -> Moment:
        """The moment with the most of something: bytes in all by default. (The first of several.)"""
        return max(self.moments(), key=of, default=NOTHING)

    def _sort_held(self) -> None:
        for part, tensors in held_shards(self._engine).items():
            self._put(tensors, part, anew=True)

    def _watch_gradient(self, param: nn.Parameter):
        hook = param.register_post_accumulate_grad_hook(self._on_gradient)
        with torch._C.DisableTorchFunctionSubclass():  # ZeRO-3 refuses to show anything of a freed parameter
            hooks = param._post_accumulate_grad_hooks
        for earlier in [key for key in hooks if key != hook.id]:
            hooks[earlier] = hooks.pop(earlier)  # this one first: the engine's may take the gradient away
        return hook

    def _on_gradient(self, param: nn.Parameter) -> None:
        if param.grad is not None:
            self._put([param.grad], IN_FLIGHT)

    def _put(self, tensors, part: str, anew: bool = False) -> None:
        """Sort the storages under `tensors`, unless they are sorted; with `anew` even then."""
        for tensor in tensors:
            number = self._number.get(self.key(tensor))
            if number is not None and (anew or number not in self._part):
                self._part[number] = part

    def _born(self, key: int) -> None:
        self._number[key] = self._counter
        self._counter += 1
        if torch.is_grad_enabled():
            self._growing.add(key)

    def _set(self, key: int, nbytes: int) -> None:
        if nbytes != self._bytes[key]:
            self._note(self._number[key], nbytes)
        super()._set(key, nbytes)

    def _gone(self, key: int) -> None:
        number = self._number.pop(key, None)
        if self._bytes.get(key):
            self._note(number, 0)
        self._growing.discard(key)
        super()._gone(key)

    def _forward_ends(self) -> None:
        """What a forward has made and is alive is for backward."""
        for key in self._growing:
            self._part.setdefault(self._number[key], ACTIVATIONS)
        self._growing.clear()

    def _out_of_memory(self) -> None:
        if self.failed is not None:
            return  # on the error's way out: the first one counts
        # Now, and not where the error is caught: by then the step and the module are left, and memory is freed.
        if torch.is_grad_enabled():
            self._forward_ends()  # it has not come to the end that would show it
        for now in self.moments():  # the last one
            self.failed = now
        place = {"phase": self._where.phase, "step": self._where.step, "module": self._where.module()}
        self.failed = replace(self.failed or NOTHING, **place)

    def _note(self, number: int, nbytes: int) -> None:
        where = self._where.phase, self._where.step, self._where.module()
        self._events.append((number, nbytes, *where, self.clock()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.replace("::", ".")
        self._where.see(func, args)
        if self._growing and torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled():
            # Backward goes on after a forward, or after a piece of one that it ran again.
            self._forward_ends()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if name == "c10d._allgather_base_":
            self._put([args[0]], GATHERED)
        elif name == "c10d._reduce_scatter_base_":
            self._put(args[:2], IN_FLIGHT)  # the shard too: with offload it stays only until it is copied
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
        self.begin()
        return result

    def __exit__(self, *exception):
        result = super().__exit__(*exception)
        self._where.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return result
