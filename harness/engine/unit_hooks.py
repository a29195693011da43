"""When ZeRO-3 acts: every moment in the life of a unit, in forward and in backward."""

import contextlib
import dataclasses
import warnings
import weakref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from harness.engine import guard
from harness.engine.gradient_hooks import BucketHooks
from harness.engine.hooks import WeakHook, backward_now, not_compiled
from harness.engine.tensor_parallel import local


class Visit:
    """One forward of one unit. Backward comes back to it, and then the units in `before` are next."""

    def __init__(self, unit, before: list, place: int):
        self.unit, self.before, self.place = unit, before, place  # the `place`-th unit in its forward
        self.saved = False  # whether autograd saved one of the unit's weights in it


class UnitHooks(BucketHooks):
    """ZeRO-3: every moment in the life of a unit.

    Forward is known by module hooks. Backward is known by what it reads. Forward saves weights for it, and autograd
    shows us every tensor when it is saved (`_pack`) and again when it is about to be read (`_unpack`). That a weight is
    read *is* the moment before its unit's backward. Other hooks know less: those on modules miss outputs that are
    dictionaries. Those on output tensors miss what does not pass through an output (a loss that a module keeps as an
    attribute), and are dropped when an output that is a view is changed in place.
    """

    def __init__(self, engine):
        self._order = list(engine.units)  # in which forward runs the units: as declared, until one was seen
        self._visits: list[Visit] = []  # of this forward, so far
        self._latest: dict = {}  # unit -> its latest `Visit`
        self._in_forward = False
        self._saving = None  # the context in which autograd shows what it saves
        self._outer = None  # (pack, unpack) of such a context around the model that is the caller's own
        engine.asked = set()  # the visits that this backward has come back to
        self._waiting: list = []  # units that this backward has not reduced, as `find_unused` needs to know
        self._at_work = None  # the unit whose backward has begun last; never the root, which is at work all along
        self._kept: set = set()  # units that a backward with a graph of its own has read: gathered until `step()`
        self._lent: set = set()  # units whose weights this forward has used outside of their own forward
        self._warned: set = set()  # names of those that a warning was given for
        self._last_hook: dict = {}  # module -> number of the hook that is called after its forward
        super().__init__(engine, {unit: unit.trained_buckets for unit in (*engine.units, engine.root)})
        for unit in (*engine.units, engine.root):
            guard.watch(unit.params, WeakHook(self._touched, unit))
        for unit in engine.units:
            self._hook(unit.module, WeakHook(self._before_unit, unit), WeakHook(self._after_unit, unit))
        # always_call: an exception in forward must not leave gathered units behind.
        self._hook(engine.model, WeakHook(self._before_root), WeakHook(self._after_root), always_call=True)
        self._warn_of_a_large_root()
        # In front of all: a refusal comes before anything is gathered.
        engine.model._forward_pre_hooks.move_to_end(self._handles[0].id, last=False)

    def _warn_of_a_large_root(self) -> None:
        engine = self._engine
        total, root = (sum(b.numel for b in buckets) for buckets in (engine.buckets, engine.root.buckets))
        if 2 * root > total and engine.placement.rank == 0:
            warnings.warn(
                f"no unit holds {root / total:.0%} of the model ({len(engine.units)} units in all). That part stays "
                "gathered from the start of forward to the end of backward, and saves little. Pass units=[...], "
                "the modules to gather and free one after the other, such as the model's layers",
                stacklevel=4,
            )

    def _hook(self, module: nn.Module, before: WeakHook, after: WeakHook, **options) -> None:
        """Call `before` first and `after` last of all hooks of `module`: the others may look at its weights."""
        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after, **options))
        self._last_hook[module] = self._handles[-1].id

    def _stay_last(self, module: nn.Module) -> None:
        module._forward_hooks.move_to_end(self._last_hook[module])  # others may have been registered since

    # Forward.

    def _before_root(self, module, args) -> None:
        if backward_now() is not None:  # activation checkpointing around the model runs it again inside backward
            refuse_reentrant(self._backward is None)  # its forward left no trace in autograd's graph
            return
        if self._backward is not None:
            raise RuntimeError("the backward before this forward did not finish: call engine.zero_grad() first")
        self._stay_last(module)
        self._in_forward, self._visits, self._latest, self._lent = True, [], {}, set()
        self._engine.order.begin((torch.is_grad_enabled(), self._sync))
        self._watch_saving()
        self._engine.before_forward(self._engine.root, self._order[: self._engine.prefetch])
        self._require_gathered(self._engine.root, "before_forward")

    def _before_unit(self, unit, module, args) -> None:
        if backward_now() is not None:
            # Activation checkpointing runs the unit again inside backward. No telling which one is next.
            self._begin_backward()
            self._gather_now(unit)
            return
        if not self._in_forward:
            raise RuntimeError(
                f"unit {unit.name!r} was called by itself, outside the model's forward, while its parameters "
                "are freed (sharded over the ranks): call engine(inputs), or read weights with engine.full_state_dict()"
            )
        self._stay_last(module)
        place, ahead = len(self._visits), self._engine.prefetch
        known = self._order[place : place + 1] == [unit]  # as the last forward went, so we know what is next
        self._latest[unit] = Visit(unit, self._next_in_backward(), place)
        self._visits.append(self._latest[unit])
        self._engine.before_forward(unit, self._order[place + 1 : place + 1 + ahead] if known else [])
        self._require_gathered(unit, "before_forward")

    def _after_unit(self, unit, module, args, output):
        if backward_now() is not None:
            return  # run again for backward, which needs its weights: its last gradient or `_end_backward` frees it
        visit = self._latest.get(unit)
        output = self._without_weights(output)
        may_come = visit is None or self._backward_may_come(visit, output)
        if unit in self._lent:
            pass  # until the end of forward
        elif may_come:
            self._engine.after_forward(unit)
        else:
            self._engine._free(unit)  # whatever `reshard_after_forward` says
        return output

    def _after_root(self, module, args, output):
        if backward_now() is not None:
            return
        if self._saving is not None:
            self._saving.__exit__(None, None, None)
            self._saving = None
        self._in_forward = False
        if self._visits:
            self._order = [visit.unit for visit in self._visits]
        visit = self._visit_of_root()
        if not self._backward_may_come(visit, output) or not any(t.requires_grad for t in tensors_in(output)):
            # An evaluation; or an exception in forward, which a second one must not hide.
            with contextlib.suppress(RuntimeError) if output is None else contextlib.nullcontext():
                output = self._without_weights(output)
                self._engine._free_all()
        else:
            for unit in self._lent:
                self._engine.after_forward(unit)
        return output

    def _without_weights(self, output):
        """`output`, with a copy of every tensor in it that is a view of weights which are about to be freed."""

        def copy(value):
            inside = isinstance(value, torch.Tensor) and storage_number(value) in self._engine.unit_of
            return value.clone() if inside else value

        if isinstance(output, torch.Tensor):
            return copy(output)
        return tree_map(copy, output)

    def _backward_may_come(self, visit: Visit, output) -> bool:
        """Whether backward may come back to `visit`. If it will not ask for weights, have its outputs tell.

        Nothing is saved under activation checkpointing: backward runs the unit again and needs its weights for that.
        """
        if visit.saved or not torch.is_grad_enabled():
            return visit.saved
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        this = weakref.ref(self)
        for tensor in outputs:
            if tensor.grad_fn is None:
                continue  # a leaf that passes through: its gradient tells nothing, and it would keep the hook for ever
            tensor.register_hook(lambda gradient: this() and this()._ask(visit))
        return bool(outputs)

    # What autograd saves in forward, and reads in backward.

    def _watch_saving(self) -> None:
        if not torch.is_grad_enabled():
            return
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: None)
        self._outer = top(True)
        if self._outer is not None and self._outer[0].__module__ == "torch.utils.checkpoint":
            return  # checkpointing around the model: nothing is saved, and the model runs again
        self._saving = saved_tensors_hooks(self._pack, self._unpack)
        self._saving.__enter__()

    @not_compiled
    def _pack(self, tensor: torch.Tensor):
        tensor, visit = self._engine.pack(tensor)
        if visit is not None:
            visit.saved = True
        elif self._outer is not None:
            return self._outer[0](tensor), None, self._outer[1]
        elif tensor.grad_fn is not None:
            # An operation's own result, handed back as it is, would be a cycle through C++ that nobody opens.
            tensor = tensor.detach()
        return tensor, tensor._version, visit

    @not_compiled
    def _unpack(self, saved) -> torch.Tensor:
        tensor, version, visit = saved
        if version is None:
            return visit(tensor)  # by the caller's own context
        if visit is not None:
            unit = visit.unit
            if visit not in self._engine.asked or not unit.gathered or unit.works or self._engine.find_unused:
                self._ask(visit)
            if torch.is_grad_enabled():  # a graph of this backward may be gone through later, and read the weights
                self._kept.add(unit)
        # Autograd leaves this to us, as it does not know whether an unpacked tensor is the one that was packed.
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{tensor.dtype} tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected "
                f"version {version} instead. If it is a weight, it was changed between forward and backward"
            )
        return tensor

    def _next_in_backward(self) -> list:
        """The units that have run last, `prefetch` of them, in the order in which backward comes back to them."""
        return [visit.unit for visit in self._visits[: -self._engine.prefetch - 1 : -1]]

    def visit(self, unit) -> Visit:
        """The forward of `unit` in which autograd saves a weight of it."""
        return self._visit_of_root() if unit is self._engine.root else self._latest.get(unit) or Visit(unit, [], 0)

    def _visit_of_root(self) -> Visit:
        """The root is used before, between and after the units: each place among these is a visit of its own."""
        root, place = self._engine.root, len(self._visits)
        if root not in self._latest or self._latest[root].place != place:
            self._latest[root] = Visit(root, self._next_in_backward(), place)
        return self._latest[root]

    # Backward.

    def _begin_backward(self) -> None:
        if self._backward is None:
            self._engine.asked, self._at_work = set(), None
            self._waiting = [*self._engine.units, self._engine.root]
        refuse_reentrant(self._backward not in (None, backward_now()))
        super()._begin_backward()

    @not_compiled
    def _ask(self, visit: Visit) -> None:
        """Backward needs the weights of `visit.unit`: the first time the chapter gathers them, in `unpack`."""
        unit = visit.unit
        if backward_now() is None:  # somebody looks at what autograd saved
            if not unit.gathered:
                raise RuntimeError(guard.message(unit.params[0], "what autograd saved of its unit"))
            return
        self._begin_backward()
        known = visit in self._engine.asked
        if unit is not self._engine.root and (not known or self._engine.find_unused):  # there: it was not over, then
            self._finish_work(unit)
            self._at_work = unit
            if unit not in self._waiting:  # with `find_unused`: delivered already, and backward comes to it once more
                self._waiting.append(unit)
        self._engine.unpack((None, visit))
        if known and (not unit.gathered or unit.works):  # freed before its time, or gathered anew for another visit
            self._gather_now(unit)
        self._require_gathered(unit, "before_backward")

    def _finish_work(self, following) -> None:
        """The backward of `following` begins. Backward goes the way of forward in reverse, so the unit before is done.

        Where a gradient does not tell, this does. A frozen weight has none. With `find_unused` a gradient may never
        come on another rank; collectives match by their turn alone, so no rank may reduce earlier than another.
        """
        unit = self._at_work
        if unit is None or unit is following:
            return
        if self._engine.find_unused or len(unit.trained_buckets) < len(unit.buckets):
            self._free(unit)
        if self._engine.find_unused:
            self._deliver(unit)
            for bucket in unit.trained_buckets:  # a unit that has run twice brings gradients when backward is back
                bucket.missing = set(range(len(bucket.params)))

    def came(self, unit, bucket, index: int) -> bool:
        tells = super().came(unit, bucket, index) and not self._engine.find_unused and unit not in self._kept
        if not tells:
            bucket.missing.discard(index)
            if not any(bucket.missing for bucket in unit.trained_buckets):
                if len(unit.trained_buckets) == len(unit.buckets):
                    self._free(unit)
                if not self._engine.find_unused:
                    self._deliver(unit)
        return tells

    def _deliver(self, unit) -> None:
        if unit in self._waiting:
            self._waiting.remove(unit)
            super()._deliver(unit)

    def _free(self, unit) -> None:
        if unit not in self._kept:
            self._engine.after_backward(unit)

    def _end_backward(self) -> None:
        if self._in_forward:  # the model takes a gradient in its own forward, which goes on
            self._backward = None
            return
        for unit in (*self._engine.units, self._engine.root):
            if unit not in self._kept:
                self._engine._free(unit)  # what no gradient has freed
        if self._engine.find_unused:  # the units whose outputs got no gradient, and the root
            for unit in filter(None, (self._at_work, *self._waiting)):
                self._deliver(unit)
        super()._end_backward()
        self._engine._receive()
        self._engine.asked, self._at_work = set(), None

    def _touched(self, unit, param) -> bool:
        """A weight is used while its unit is freed. True if the model does it: then the unit is gathered now."""
        if backward_now() is not None and self._backward is not None:  # a part of a unit runs again
            self._begin_backward()
            self._gather_now(unit)
            return True
        if not self._in_forward:
            return False
        # A part of the model uses the weight without calling the unit, so nothing tells when it is done.
        if unit.name not in self._warned and self._engine.placement.rank == 0:
            self._warned.add(unit.name)
            warnings.warn(
                f"the model uses {param.zero_name!r} outside of the forward of its unit {unit.name!r}. The unit is "
                "gathered for it, and stays so until the model's forward ends, in every step. For less memory pass "
                "units= that hold whole modules whose weights only their own forward uses",
                stacklevel=8,  # past `not_compiled`, which is on the way twice
            )
        self._lent.add(unit)
        self._engine.before_forward(unit, [])
        self._require_gathered(unit, "before_forward")
        return True

    def _gather_now(self, unit) -> None:
        self._engine.before_backward(unit, [])
        self._require_gathered(unit, "before_backward")

    def _require_gathered(self, unit, moment: str) -> None:
        if not unit.gathered or unit.works:
            raise RuntimeError(
                f"unit {unit.name!r} is to compute, but it is {'not gathered' if not unit.gathered else 'on its way'}: "
                f"{moment}() must gather it, and wait for it"
            )

    def reset(self) -> None:
        if self._backward is not None or self._kept:  # given up, or its graph is not needed any more
            self._engine._free_all()
        self._kept = set()
        super().reset()

    def stepped(self) -> None:
        self._kept = set()  # `step()` frees them
        super().stepped()


def storage_number(tensor: torch.Tensor) -> int | None:
    """The same for all views of one storage; None for a sparse tensor, which has none."""
    return local(tensor).untyped_storage()._cdata if tensor.layout is torch.strided else None


def refuse_reentrant(found: bool) -> None:
    """Raise RuntimeError if a backward inside a backward was `found`, as reentrant checkpointing makes it."""
    if found:
        raise RuntimeError(
            "the model runs inside a backward that the engine does not know: that is reentrant activation "
            "checkpointing, which hides whole modules from autograd, so that nothing tells when to gather and free. "
            "Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), then engine.zero_grad() and go on"
        )


def tensors_in(value) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists, dictionaries, dataclasses and other plain objects, each once."""
    found: dict[int, torch.Tensor] = {}
    _search(value, found, set())  # no inner function: one that calls itself is a cycle, and would keep tensors alive
    return list(found.values())


def _search(value, found: dict[int, torch.Tensor], seen: set[int]) -> None:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.setdefault(id(leaf), leaf)
        elif id(leaf) not in seen and not isinstance(leaf, (type, nn.Module)):
            seen.add(id(leaf))
            if dataclasses.is_dataclass(leaf):
                _search([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)], found, seen)
            elif hasattr(leaf, "__dict__"):
                _search(list(vars(leaf).values()), found, seen)
