"""The life of a unit under ZeRO-3, in forward and in backward: in a model as most are, and in an unusual one."""

import contextlib
import sys
import warnings
import weakref

import torch
from torch import nn
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function
from torch.utils._pytree import tree_map

import zero3
from zerolab.engine import state
from zerolab.engine.base import SendingEngine
from zerolab.engine.bucket import EngineUnit
from zerolab.engine.hooks import WeakHook, in_backward, not_compiled, tensors_in
from zerolab.engine.options import meta, precision
from zerolab.engine.safety import guard
from zerolab.engine.safety.unchanged import Look, address_of, moved_message
from zerolab.engine.safety.waiting import Sequence
from zerolab.engine.units import default_units, parameters_by_unit


class Visit:
    """One forward of one unit. Backward comes back to it, and then the units in `before` are next."""

    def __init__(self, unit, before: list, place: int):
        self.unit, self.before, self.place = unit, before, place  # the `place`-th unit in its forward
        self.saved = False  # whether autograd saved one of the unit's weights in it
        self.inputs = []  # weak references to the nodes of autograd that made its inputs
        self.pending = 0  # how many of its inputs' gradients this backward has still to finish


class UnitLife(SendingEngine, zero3.ZeRO3):
    """When a unit is gathered, freed and sent.

    In backward a unit is gathered at whichever comes first: a gradient arrives at one of its outputs, or autograd asks
    for a weight that forward has saved. Either alone misses something. Hooks on outputs miss losses that leave by
    another way, and are dropped when an output that is a view is changed in place. What autograd saves misses weights
    that somebody keeps as plain tensors (a function of one's own, a part that is recomputed).

    The backward of a unit is over when all its gradients and those of its inputs are there, or when backward has come
    to another unit. Then it is freed and sent, in `over`, and nowhere else.
    """

    def __init__(self, model, optimizer_cls, *, units=None, prefetch=1, param_groups=None, reshard_after_forward=True,
                 init_fn=None, state_dict=None, **options):  # fmt: skip
        own = {"units": units, "prefetch": prefetch, "reshard_after_forward": reshard_after_forward}
        # What cannot work raises here, on every rank, before anything is changed.
        self.prepare(model, optimizer_cls, param_groups, own, (init_fn, state_dict), **options)
        self.reshard_after_forward = reshard_after_forward
        self.order = Sequence(self.placement.everyone)  # where a step differs from the last, ranks compare theirs
        self.source = meta.Source(model, self.placement.everyone, init_fn, state_dict)  # of values, if on `meta`
        self.depth = 0  # of forwards under way: a model may call itself in its forward
        self.running = None  # the frame of Python in which the outermost of them runs
        self.found_gathered = set()  # the units that it found gathered, for a backward that is still to come
        self.known_order = []  # the units, in the order of the last forward
        self.visits: list[Visit] = []  # of this forward, so far
        self.latest: dict = {}  # unit -> its latest `Visit`
        self.asked = set()  # the visits that this backward has come to
        self.at_work = None  # the unit whose backward has begun last; never the root, which is at work all along
        self.waiting: list = []  # units that this backward has not sent yet
        self.saving_hooks = None  # the context in which autograd shows what it saves
        self.outer = None  # (pack, unpack) of such a context around the model that is the caller's own
        self.storages = []  # of all buckets
        self.last_hook: dict = {}  # module -> number of the hook that is called after its forward
        ahead = prefetch if self.world_size > 1 else 0  # a rank that is alone waits for nothing
        optimizer_cls = self.over_pieces(optimizer_cls, param_groups)
        super().__init__(model, optimizer_cls, units=own["units"], prefetch=ahead, group=self.group)

    def partition(self, units):
        """Step 0, unit by unit: whole weights exist of one unit at a time."""
        with record_function("step 0 partition"), torch.no_grad():
            units, root = self.make_units(default_units(self.model) if units is None else units)
            for unit in (*units, root):
                self.all_buckets += unit.buckets
            for bucket in self.all_buckets:
                guard.adopt(bucket, self)  # from here on a wrong use of the parameters is an error
                guard.close(bucket.params)
            self.source.finish()
            state.broadcast_buffers(self.model, self.placement.everyone)
        self.buckets = [bucket for bucket in self.all_buckets if bucket.trained]
        unit_of = {}
        for unit in (*units, root):
            for bucket in unit.buckets:
                unit_of[storage_number(bucket.flat)] = unit
        return units, root, unit_of

    def make_units(self, modules) -> tuple[list, EngineUnit]:
        """(units, root): every parameter is in exactly one of them. One that several units use belongs to the root."""
        held, rest = parameters_by_unit(self.model, modules)
        names = {module: name for name, module in self.model.named_modules()}
        units = [EngineUnit(names[each], each, held[each], self, self.source) for each in modules if held[each]]
        return units, EngineUnit("root", self.model, rest, self, self.source)

    # What triggers the moments: hooks that hold nobody alive.

    def watch_forward(self) -> None:
        self.known_order = list(self.units)  # as declared, until a forward was seen
        # As long as these live, no other storage gets the number of one.
        self.storages = [bucket.flat.untyped_storage() for bucket in self.all_buckets]
        self.look = Look(self)
        self.handles = [self.look.handle, *precision.cast_inputs(self)]
        for unit in self.units:
            self.hook(unit.module, WeakHook(self.before_forward, unit), WeakHook(self.after_forward, unit))
        # always_call: an exception in forward must not leave gathered units behind.
        self.hook(self.model, WeakHook(self.before_model), WeakHook(self.after_model), always_call=True)
        # In front of all: a refusal comes before anything is gathered.
        self.model._forward_pre_hooks.move_to_end(self.handles[0].id, last=False)

    def hook(self, module: nn.Module, before: WeakHook, after: WeakHook, **options) -> None:
        """Call `before` first and `after` last of all hooks of `module`: the others may look at its weights."""
        self.handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self.handles.append(module.register_forward_hook(after, **options))
        self.last_hook[module] = self.handles[-1].id

    def stay_last(self, module: nn.Module) -> None:
        module._forward_hooks.move_to_end(self.last_hook[module])  # others may have been registered since

    # Forward.

    def __call__(self, *args, **kwargs):
        try:
            # Its hooks do what the chapter does here: `engine.model(...)` works, too.
            return self.model(*args, **kwargs)
        except BaseException:  # Ctrl-C is no Exception, and torch calls no hook after it
            if not is_running(self.running):
                self.forget_forward()
            raise

    @property
    def in_forward(self) -> bool:
        return self.depth > 0

    def forget_forward(self) -> None:
        """No forward is under way any more, however it ended."""
        self.stop_watching_saving()
        self.depth, self.running = 0, None

    def before_model(self, module, args, kwargs) -> None:
        if in_backward():  # activation checkpointing around the model runs it again inside backward
            refuse_reentrant(self.backward_number is None)  # its forward left no trace in autograd's graph
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                "ZeRO-3 does not run inside torch.func's transforms (vmap, jvp, grad, jacrev): they do not tell which "
                "weights are saved. ZeRO1Engine and ZeRO2Engine run there"
            )
        compiler = sys.modules.get("torch._dynamo.compiled_autograd")  # where nobody has imported it, it is off
        if getattr(compiler, "compiled_autograd_enabled", False):
            raise RuntimeError(
                "ZeRO-3 does not run under compiled autograd, which traces backward and finds freed weights there. "
                "Turn it off (torch._dynamo.config.compiled_autograd = False): torch.compile of the model and of the "
                "step works"
            )
        if self.in_forward and not is_running(self.running):
            self.forget_forward()  # it was interrupted, and `engine.model` was called without its engine
        if self.backward_number is not None:
            raise RuntimeError("the backward before this forward did not finish: call engine.zero_grad() first")
        self.depth += 1
        if self.depth > 1:  # a forward inside a forward: its units run as others do, and the outer one ends it all
            return
        self.stay_last(module)
        self.running, self.visits, self.latest = frame_of_module(), [], {}
        self.found_gathered = {unit for unit in self.all_units if unit.gathered}
        self.order.begin((torch.is_grad_enabled(), self.sync))
        self.watch_saving()
        self.gather(self.root, self.known_order[: self.prefetch])

    def before_forward(self, unit, module, args, kwargs) -> None:
        if in_backward():
            # Activation checkpointing runs the unit again inside backward. No telling which one is next.
            self.notice_backward()
            self.gather(unit)
            return
        if not self.in_forward:
            raise RuntimeError(
                f"unit {unit.name!r} was called by itself, outside the model's forward, while its parameters "
                "are freed (sharded over the ranks): call engine(inputs), or read weights with engine.full_state_dict()"
            )
        self.stay_last(module)
        place = len(self.visits)
        known = self.known_order[place : place + 1] == [unit]  # as the last forward went, so we know what is next
        visit = self.latest[unit] = Visit(unit, self.next_in_backward(), place)
        self.visits.append(visit)
        if torch.is_grad_enabled():
            self.watch_inputs(visit, (args, kwargs))
        self.gather(unit, self.known_order[place + 1 : place + 1 + self.prefetch] if known else [])

    def after_forward(self, unit, module, args, output):
        refuse_moved(unit)
        if in_backward():
            return  # run again for backward, which needs its weights
        visit = self.latest.get(unit)
        output = self.without_weights(output)
        may_come = visit is None or self.watch_outputs(visit, output)
        if self.reshard_after_forward or not may_come:
            refuse_hidden(output, self.unit_of)
            self.free_after_forward(unit)
        return output

    def free_after_forward(self, unit) -> None:
        unit.free()

    def after_model(self, module, args, output):
        if in_backward():
            return
        self.depth -= 1
        if self.in_forward:
            return
        self.forget_forward()
        if output is None:  # an exception in forward, perhaps, which a second one must not hide
            with contextlib.suppress(RuntimeError):
                self.free_all()
            return
        for unit in self.all_units:
            refuse_moved(unit)
        visit = self.visit_of_root()
        if self.visits:
            self.known_order = [visit.unit for visit in self.visits]
        self.visits, self.latest = [], {}  # from here on autograd's graph alone holds them
        may_come = visit.saved or self.watch_outputs(visit, output)
        if not may_come or not any(tensor.requires_grad for tensor in tensors_in(output)):  # an evaluation
            output = self.without_weights(output)
            refuse_hidden(output, self.unit_of)
            for unit in self.all_units:
                if unit not in self.found_gathered:  # else an earlier forward still waits for its backward
                    unit.free()
        return output

    def without_weights(self, output):
        """`output`, with a copy of every tensor in it that is a view of weights which are about to be freed."""

        def copy(value):
            inside = isinstance(value, torch.Tensor) and storage_number(value) in self.unit_of
            return value.clone() if inside else value

        if isinstance(output, torch.Tensor):
            return copy(output)
        return tree_map(copy, output)

    def gather(self, unit, upcoming=()) -> None:
        for each in (unit, *upcoming):
            each.start_gather()
        unit.wait()

    def next_in_backward(self) -> list:
        """The units that have run last, `prefetch` of them, in the order in which backward comes back to them."""
        return [visit.unit for visit in self.visits[: -self.prefetch - 1 : -1]]

    def visit_of_root(self) -> Visit:
        """The root is used before, between and after the units: each place among these is a visit of its own."""
        place = len(self.visits)
        if self.root not in self.latest or self.latest[self.root].place != place:
            self.latest[self.root] = Visit(self.root, self.next_in_backward(), place)
        return self.latest[self.root]

    # What tells that backward has come to a unit, and that it is over.

    def watch_inputs(self, visit: Visit, inputs) -> None:
        """Have autograd call `on_input` when the gradient of an input is finished."""
        for tensor in tensors_in(inputs):
            if tensor.grad_fn is not None:  # a leaf's gradient tells nothing of the unit, and would keep the hook
                tensor.register_hook(WeakHook(self.on_input, visit))
                visit.inputs.append(tensor.grad_fn)

    def watch_outputs(self, visit: Visit, output) -> bool:
        """Have autograd call `come` when a gradient reaches the outputs. Whether backward may come back at all."""
        if not torch.is_grad_enabled():
            return False
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        this = weakref.ref(self)
        for tensor in outputs:
            if tensor.grad_fn is not None and tensor.grad_fn not in visit.inputs:  # what passes through tells nothing
                tensor.register_hook(lambda gradient: this() and this().come(visit))
        return visit.saved or bool(outputs)

    def watch_saving(self) -> None:
        if not torch.is_grad_enabled():
            return
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: None)
        self.outer = top(True)
        if self.outer is not None and self.outer[0].__module__ == "torch.utils.checkpoint":
            return  # checkpointing around the model: nothing is saved, and the model runs again
        self.saving_hooks = saved_tensors_hooks(self.pack, self.unpack)
        self.saving_hooks.__enter__()

    def stop_watching_saving(self) -> None:
        if self.saving_hooks is not None:
            self.saving_hooks.__exit__(None, None, None)
            self.saving_hooks = None

    @not_compiled
    def pack(self, tensor: torch.Tensor):
        unit = self.unit_of.get(storage_number(tensor))
        visit = None
        if unit is not None:
            visit = self.visit_of_root() if unit is self.root else self.latest.get(unit) or Visit(unit, [], 0)
            visit.saved = True
        elif self.outer is not None:
            return self.outer[0](tensor), None, self.outer[1]
        elif tensor.grad_fn is not None:
            # An operation's own result, handed back as it is, would be a cycle through C++ that nobody opens.
            tensor = tensor.detach()
        return tensor, tensor._version, visit

    @not_compiled
    def unpack(self, saved) -> torch.Tensor:
        tensor, version, visit = saved
        if version is None:
            return visit(tensor)  # by the caller's own context
        if visit is not None:
            self.weight_is_wanted(visit)
        # Autograd leaves this to us, as it does not know whether an unpacked tensor is the one that was packed.
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"{tensor.dtype} tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected "
                f"version {version} instead. If it is a weight, it was changed between forward and backward"
            )
        return tensor

    def weight_is_wanted(self, visit: Visit) -> None:
        if visit not in self.asked or not visit.unit.gathered or visit.unit.works:
            self.come(visit)

    # Backward.

    def notice_backward(self) -> None:
        if self.backward_number is None:
            super().notice_backward()
        else:
            refuse_reentrant(self.backward_number != torch._C._current_graph_task_id())

    def begin_backward(self) -> None:
        """All gradients are still to come; none, where the whole model is frozen for a while."""
        self.asked, self.at_work, self.waiting = set(), None, list(self.all_units)
        for bucket in self.buckets:
            bucket.missing = set() if self.look.frozen else set(range(len(bucket.params)))
        for unit in self.all_units:
            unit.pending, unit.told = 0, False

    @not_compiled
    def come(self, visit: Visit) -> None:
        """Backward has come to `visit`, or needs its weights once more."""
        unit = visit.unit
        if not in_backward():  # somebody looks at what autograd saved
            if not unit.gathered:
                raise RuntimeError(guard.message(unit.params[0], "what autograd saved of its unit"))
            return
        self.notice_backward()
        if visit in self.asked:
            if not unit.gathered or unit.works:  # freed before its time, or gathered anew for another visit
                self.gather(unit)
            return
        self.asked.add(visit)
        if unit is not self.root:
            self.finish_work(unit)
            self.at_work = unit
            visit.pending = sum(map(torch._C._will_engine_execute_node, visit.inputs))
            unit.pending += visit.pending
            unit.told = unit.told or visit.pending > 0
        self.gather(unit, visit.before)

    def finish_work(self, following) -> None:
        """The backward of `following` begins. Backward goes the way of forward in reverse: the unit before is done."""
        unit = self.at_work
        if unit is not None and unit is not following and not unit.missing:
            self.over(unit)

    def on_input(self, visit: Visit, gradient) -> None:
        """The gradient of one of the inputs of `visit` is finished."""
        if visit is not None and visit in self.asked and visit.pending:
            visit.pending -= 1
            visit.unit.pending -= 1
            self.may_be_over(visit.unit)

    def on_gradient(self, bucket, index: int, param) -> None:
        self.notice_backward()
        bucket.came(index)
        bucket.missing.remove(index)
        self.backward_brought = True
        if self.sync:
            self.gradients_are_reduced = False
        else:
            bucket.keep(index)
        if not bucket.missing:
            self.may_be_over(self.unit_of[storage_number(bucket.flat)])

    def may_be_over(self, unit) -> None:
        # A frozen weight has no gradient: where no input tells either, the next unit does, or the end.
        told = unit.told or len(unit.trained_buckets) == len(unit.buckets)
        if told and not unit.missing and not unit.pending:
            self.over(unit)

    def over(self, unit) -> None:
        """The backward of `unit` is over: nobody will ask for its weights any more, and its gradients are final."""
        self.free_after_backward(unit)
        if unit in self.waiting:
            self.waiting.remove(unit)
            if self.sync and unit.trained_buckets and not self.look.frozen:
                self.gradients_are_reduced = False
                self.order.next("reduce-scatter", unit)  # an error if the ranks' orders differ
                for bucket in unit.trained_buckets:
                    self.send(bucket)

    def free_after_backward(self, unit) -> None:
        unit.free()

    def end_backward(self) -> None:
        if self.in_forward:  # the model takes a gradient in its own forward, which goes on
            self.backward_number = None
            return
        for unit in self.all_units:
            self.free_after_backward(unit)  # what no gradient has freed
        for unit in self.left_at_the_end():
            for bucket in unit.trained_buckets:
                bucket.missing = set()
            self.over(unit)
        self.receive()
        self.asked, self.at_work, self.backward_number = set(), None, None

    def left_at_the_end(self) -> list:
        """The units that are final now: with zeros where an earlier backward of this step has brought the gradients."""
        found = []
        for unit in self.all_units:
            earlier = self.backward_brought and all(bucket.missing <= bucket.used for bucket in unit.trained_buckets)
            if unit in self.waiting and (earlier or not unit.missing):
                found.append(unit)
        return found

    # The steps.

    def shards_changed(self) -> None:
        self.free_all()  # what is gathered has the old values
        super().shards_changed()

    @not_compiled
    def zero_grad(self) -> None:
        if self.in_forward and not is_running(self.running):
            self.forget_forward()
        if self.backward_number is not None:
            self.free_all()
        super().zero_grad()


class ZeRO3Engine(UnitLife):
    """ZeRO-3 for real training. Options beside the chapter's: `Engine.prepare`.

    With `reshard_after_forward=False` a unit stays gathered from forward to backward: 2Ψ are sent and not 3Ψ, and all
    parameters are gathered in between. A model on torch's device `meta` has shapes and no memory. It gets its memory
    unit by unit, and its values by `init_fn(name, tensor)`, which fills a tensor in place, or from `state_dict`.
    """

    def __init__(self, *args, **options):
        self.kept = set()  # units that a backward with a graph of its own has read: gathered until `step()`
        self.lent = set()  # units whose weights this forward has used outside of their own forward
        self.warned = set()  # names of those that a warning was given for
        super().__init__(*args, **options)
        for unit in self.all_units:
            guard.watch(unit.params, WeakHook(self.touched, unit))
        self.warn_of_a_large_root()

    def warn_of_a_large_root(self) -> None:
        total, root = (sum(b.numel for b in buckets) for buckets in (self.all_buckets, self.root.buckets))
        if 2 * root > total and self.placement.rank == 0:
            warnings.warn(
                f"no unit holds {root / total:.0%} of the model ({len(self.units)} units in all). That part stays "
                "gathered from the start of forward to the end of backward, and saves little. Pass units=[...], "
                "the modules to gather and free one after the other, such as the model's layers",
                stacklevel=3,
            )

    # Weights that are used outside of the forward of their unit.

    def touched(self, unit, param) -> bool:
        """A weight is used while its unit is freed. True if the model does it: then the unit is gathered now."""
        if in_backward() and self.backward_number is not None:  # a part of a unit runs again
            self.notice_backward()
            self.gather_meanwhile(unit)
            return True
        if not self.in_forward:
            return False
        # A part of the model uses the weight without calling the unit, so nothing tells when it is done.
        if unit.name not in self.warned and self.placement.rank == 0:
            self.warned.add(unit.name)
            warnings.warn(
                f"the model uses {param.zero_name!r} outside of the forward of its unit {unit.name!r}. The unit is "
                "gathered for it, and stays so until the model's forward ends, in every step. For less memory pass "
                "units= that hold whole modules whose weights only their own forward uses",
                stacklevel=4,
            )
        self.lent.add(unit)
        self.gather_meanwhile(unit)
        return True

    def gather_meanwhile(self, unit) -> None:
        """Gather `unit` in the middle of whatever uses it: torch.compile, perhaps, which asks for weights as it traces.

        While it traces, torch keeps Python's lock through each operation, collectives too. gloo's thread has a lock of
        its own, which a collective wants, and may wait for Python's to drop the collective before: both for ever.
        """
        with no_python_dispatcher():  # which is what keeps Python's lock
            self.gather(unit)

    def free_after_forward(self, unit) -> None:
        if unit not in self.lent:
            unit.free()

    def before_model(self, module, args, kwargs) -> None:
        if not in_backward():
            self.lent = set()
        super().before_model(module, args, kwargs)

    def after_model(self, module, args, output):
        output = super().after_model(module, args, output)
        if not in_backward() and self.reshard_after_forward:
            for unit in self.lent:
                unit.free()
        return output

    # Graphs of backward, which may be gone through later, and read the weights.

    def weight_is_wanted(self, visit: Visit) -> None:
        if self.find_unused:
            self.come(visit)
        super().weight_is_wanted(visit)
        self.keep_for_a_graph(visit.unit)

    def keep_for_a_graph(self, unit) -> None:
        """A backward with `create_graph=True` has come to `unit`: what it computes saves weights past any hook."""
        if torch.is_grad_enabled():
            self.kept.add(unit)

    def free_after_backward(self, unit) -> None:
        if unit not in self.kept:
            unit.free()

    @not_compiled
    def zero_grad(self) -> None:
        if self.kept:
            self.free_all()
        self.kept = set()
        super().zero_grad()

    def stepped(self) -> None:
        self.kept = set()  # `step()` frees them
        super().stepped()

    # Parameters without a gradient (`find_unused`). It may never come on another rank, and collectives match by their
    # turn alone: no rank may send a unit earlier than another. So what tells is that backward comes to the next unit.

    def finish_work(self, following) -> None:
        if not self.find_unused:
            return super().finish_work(following)
        unit = self.at_work
        if unit is None or unit is following:
            return
        for bucket in unit.trained_buckets:
            bucket.missing = set()
        self.over(unit)
        for bucket in unit.trained_buckets:  # a unit that has run twice brings gradients when backward is back
            bucket.missing = set(range(len(bucket.params)))

    def come(self, visit: Visit) -> None:
        if in_backward():
            self.keep_for_a_graph(visit.unit)
        if self.find_unused and in_backward() and visit in self.asked and visit.unit is not self.root:
            self.finish_work(visit.unit)
            self.at_work = visit.unit
        super().come(visit)
        if self.find_unused and visit.unit not in self.waiting:  # sent already, and backward comes to it once more
            self.waiting.append(visit.unit)

    def may_be_over(self, unit) -> None:
        if not self.find_unused:
            super().may_be_over(unit)

    def left_at_the_end(self) -> list:
        if not self.find_unused:
            return super().left_at_the_end()
        return list(dict.fromkeys(filter(None, (self.at_work, *self.waiting))))


def storage_number(tensor: torch.Tensor) -> int | None:
    """The same for all views of one storage; None for a sparse tensor, which has none."""
    if tensor.layout is not torch.strided:
        return None
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata


def frame_of_module():
    """The frame in which torch calls the module whose hook this is; None if there is none."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.nn.modules.module":
        frame = frame.f_back
    return frame


def is_running(wanted) -> bool:
    """Whether the frame `wanted` is still on this thread's stack, below us."""
    frame = sys._getframe()
    while frame is not None and frame is not wanted:
        frame = frame.f_back
    return wanted is not None and frame is wanted


def refuse_hidden(output, unit_of) -> None:
    """Raise RuntimeError if `output` of a unit that is about to be freed has views of weights inside an object."""
    if isinstance(output, torch.Tensor):
        return
    for tensor in tensors_in(output):
        unit = unit_of.get(storage_number(tensor))
        if unit is not None:
            raise RuntimeError(
                f"a view of the weights of unit {unit.name!r} is returned inside an object ({type(output).__name__}): "
                "the weights are freed now. Return a clone of it, or a tensor, tuple, list or dictionary"
            )


def refuse_moved(unit) -> None:
    """Raise RuntimeError if forward has given a gathered weight of `unit` another memory, which no gather fills."""
    if not unit.gathered:
        return
    moved = []
    for bucket in unit.buckets:
        if isinstance(bucket.flat, FakeTensor):  # a dry run's has no address
            continue
        first, step = bucket.flat.data_ptr(), bucket.flat.element_size()
        for name, param, offset in zip(bucket.names, bucket.params, bucket.offsets):
            if address_of(param) != first + step * offset and param.numel():
                moved.append(name)
    if moved:
        raise RuntimeError(moved_message(moved))


def refuse_reentrant(found: bool) -> None:
    """Raise RuntimeError if a backward inside a backward was `found`, as reentrant checkpointing makes it."""
    if found:
        raise RuntimeError(
            "the model runs inside a backward that the engine does not know: that is reentrant activation "
            "checkpointing, which hides whole modules from autograd, so that nothing tells when to gather and free. "
            "Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False), then engine.zero_grad() and go on"
        )
