"""ZeRO-3: every rank keeps 1/N of the parameters too.

At any moment a model computes in one layer, so only that layer's parameters need to be whole. ZeRO-3
cuts the model into units (a transformer block each), gathers a unit's parameters right before its
forward, frees them right after, and does both once more in backward.

    parameters Ψ/N  +  gradients Ψ/N  +  optimizer state 2Ψ/N       (7e9 parameters, N = 8: 14 GB)

and on top of it, inside forward and backward only, whole parameters of the root (what belongs to no
unit: embedding, head), of the unit at work and of `prefetch` more; in backward also, as in ZeRO-2, at
most two units' whole gradients. With R for the root, U for the largest unit and p for `prefetch`

    peak = (4Ψ - R - (p + 1)U)/N + R + (p + 3)U      and activations

near the end of backward: root, unit at work and p more are whole, and so are two units' gradients.

Sent per rank and step, with the factor (N-1)/N: all-gather Ψ in forward, all-gather Ψ in backward,
reduce-scatter Ψ = 3Ψ, half as much again as DDP's 2Ψ, less the root's second all-gather, because the root
stays whole from forward into backward.

Step 5 has moved into steps 1 and 2: that is the whole difference. The updated shard is gathered when
the next forward needs it, a unit at a time. In the order in which things happen, with prefetch = 1:

    forward   gather root, 0 | embedding | gather 1 | compute 0 | free 0 | gather 2 | compute 1 | free 1 | ...
    backward  ... | gather 0 | compute 1 | free 1, reduce 1 | compute 0 | free 0, reduce 0 | reduce, free root

A gather stands left of the computation that it hides behind: it is issued first and waited for later.

Words that are new here (the others are those of zero1.py):

    unit              a module whose parameters share a bucket, and are gathered and freed as one
    root              the unit of everything that no other unit holds; whole from forward to the end of backward
    gathered, freed   whole parameters in memory, or on their way there; or only this rank's shard of them
    prefetch          issuing a unit's all-gather before the unit in front of it computes

Why freeing means resizing the storage. The obvious way to free a weight is `param.data = shard`: nobody holds
the whole tensor any more. But somebody does. `F.linear` has saved `weight.t()` for backward, a view, and a view
keeps the whole storage alive: after the forward of a small GPT that freed every layer this way, 91% of all gathered
bytes were still there (./launch.sh articles --only "has gathered"). And those views are needed: backward multiplies by
them. So the views stay, and the storage under them goes: `storage.resize_(0)` gives the memory back
and leaves every tensor on it in place, shape and all; resizing it back and gathering into it fills all of them
again, the model's weights and autograd's saved views alike. (FSDP does the same.) A tensor whose storage has no
bytes must not be read, or the process dies; harness/engine/guard.py turns that into an error.

Steps: 0 partition, 1 forward, 2 backward, 3 reduce gradients inside 2, 4 update the shard, 5 gather
parameters inside 1 and 2.

Paper: ZeRO (Rajbhandari et al., 2020), section 5.3, "P_os+g+p". Article: "AI in Multiple GPUs: ZeRO & FSDP".
Run it: ./launch.sh zero3 2
"""

import contextlib
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.profiler import record_function

from harness.engine import guard, loop, order
from harness.engine import meta as materialise
from harness.engine import refusals as checks
from zero1 import Bucket
from zero2 import Reduction


class Unit:
    """A module whose parameters are gathered and freed together: (name, module, buckets).

    It has one bucket as a rule. A frozen parameter needs gathering but no reducing, and a buffer has one
    dtype, so a unit that mixes frozen and trainable ones, or dtypes, has a bucket for each kind.
    """

    def __init__(self, name: str, module: nn.Module, named_params, *layout):
        self.name, self.module = name, module
        kinds = {}
        for param_name, param in named_params:
            kinds.setdefault((param.dtype, param.requires_grad), []).append((param_name, param))
        self.buckets = [Bucket(kind, *layout) for kind in kinds.values()]
        for bucket in self.buckets:
            bucket.label = f"unit {name!r}"  # in messages
        self.trained = [bucket for bucket in self.buckets if bucket.params[0].requires_grad]
        self.params = [param for bucket in self.buckets for param in bucket.params]
        self.whole = True  # gathered, or being gathered
        self.works = []  # the all-gathers on their way


def make_units(model: nn.Module, modules, *layout) -> tuple[list[Unit], Unit]:
    """(units, root): every parameter in exactly one of them, in the model's order. `layout` goes to `Bucket`.

    Without `modules`: the entries of every outermost ModuleList or Sequential. A parameter that is used in two
    units, or in one and outside (tied weights), belongs to the root, which is whole whenever either needs it.
    """
    modules = loop.default_units(model) if modules is None else list(modules)
    home = {}  # id of a module -> the unit it lies in; None where two units share it
    for unit in modules:
        for inside in unit.modules():
            home[id(inside)] = None if id(inside) in home else unit
    homes = {}  # id of a parameter -> the units that use it, None for the root: {None, block} for a tied weight
    for module in model.modules():
        for param in module.parameters(recurse=False):
            homes.setdefault(id(param), set()).add(home.get(id(module)))
    held, rest = {unit: [] for unit in modules}, []
    for name, param in model.named_parameters():
        unit = homes[id(param)].pop() if len(homes[id(param)]) == 1 else None
        (rest if unit is None else held[unit]).append((name, param))
    names = {module: name for name, module in model.named_modules()}
    units = [Unit(names[module], module, held[module], *layout) for module in modules if held[module]]
    return units, Unit("root", model, rest, *layout)


class ZeRO3:
    """Data-parallel training of `model` with optimizer state, gradients and parameters cut into N.

    `optimizer_cls` takes the list of this rank's pieces (1-D float tensors) and returns a
    `torch.optim.Optimizer`; `group` is the process group to shard over (default: all ranks); `units` the
    modules that are gathered and freed as one (default: the entries of every outermost ModuleList or
    Sequential; what no unit holds forms the root); `prefetch` how many units ahead to gather;
    `reshard_after_forward=False` keeps what forward has gathered for backward, which sends 2Ψ instead
    of 3Ψ and holds the whole parameters in between. All ranks start from rank 0's parameters and buffers.
    Elementwise optimizers only, see `ZeRO1`.

    Several backwards before a step add up: k of them send 3kΨ, less the root's second gathers, or (2k+1)Ψ with the
    first k-1 under `no_sync()`, which keeps Ψ of whole gradients. `param_groups` are a torch optimizer's, over the
    model's own parameters.

    `param_dtype` is the dtype of gathered weights and computation, `reduce_dtype` (default: the same) of gradients on
    their way; shards keep the model's. bfloat16 with float32 holds (4 + 4 + 8)/N bytes a parameter, the articles' 16/N.
    `find_unused=True` lets a step leave parameters without gradient, on some ranks or on all, for one small all-reduce.
    Every rank must run the same units all the same: a unit that only some run is an error (`engine/order.py`).

    A model on `meta` is materialised a unit at a time: at most the shards and one unit exist. `init_fn(name, tensor)`
    fills every parameter and buffer in place, or `state_dict` has their values (see harness/engine/meta.py).

    Raises RuntimeError without a process group or when a freed weight is used, ValueError or TypeError for a
    model, option or optimizer that cannot work. Source: ZeRO paper section 5.3; article class `ZeRO_3`.
    """

    def __init__(self, model: nn.Module, optimizer_cls, *, group=None, units=None, prefetch: int = 1,
                 reshard_after_forward: bool = True, param_groups=None, param_dtype=None, reduce_dtype=None,
                 find_unused: bool = False, init_fn=None, state_dict=None):  # fmt: skip
        units = list(units) if isinstance(units, Iterable) else units
        self.model, self.group, self.find_unused = model, group, find_unused
        self.reshard_after_forward = reshard_after_forward
        dtypes, source = (param_dtype, reduce_dtype), (init_fn, state_dict)
        self.rank, self.world_size = checks.check(
            model, group, dtypes, find_unused, source,
            units=units, prefetch=prefetch, reshard_after_forward=reshard_after_forward,
        )  # fmt: skip
        self.prefetch = prefetch if self.world_size > 1 else 0  # a rank that is alone waits for nothing
        with record_function("step 0 partition"), torch.no_grad():
            self.units, self.root = make_units(model, units, self.rank, self.world_size, dtypes)
            self.buckets = [bucket for unit in (*self.units, self.root) for bucket in unit.buckets]
            self.trained = [bucket for unit in (*self.units, self.root) for bucket in unit.trained]
            for unit in (*self.units, self.root):
                for bucket in unit.buckets:
                    on_meta = materialise.parameters(bucket, group)  # they get a device here, memory in `flatten`
                    bucket.flatten()
                    materialise.fill(on_meta, *source)  # and their values here
                    dist.broadcast(bucket.flat, group_src=0, group=group)
                    bucket.shard = bucket.shard.clone()  # all that stays, for the whole buffer is freed
                    bucket.flat.untyped_storage().resize_(0)
                    bucket.make_pieces()
                    for name, param in zip(bucket.names, bucket.params):
                        guard.name_parameter(param, name)
                self._reshard_unit(unit)  # marks it as freed, and guards its weights
            materialise.buffers(model, group, *source)
            for buffer in model.buffers():  # they stay whole
                dist.broadcast(buffer, group_src=0, group=group)
        loop.prepare_forward(model, self.buckets, param_dtype, [unit.module for unit in self.units])
        self.optimizer = loop.make_optimizer(optimizer_cls, self.trained, param_groups)
        self._in_flight = None  # the `Reduction` on its way
        self._sync = True  # False under `no_sync`
        self._in_forward = False
        self._order = self.units  # in which forward runs the units: as declared, until one was seen
        self._seen = []  # the units that this forward has run
        self._backward = None  # autograd's number of the backward that is running
        self.zero_grad()
        self._sequence = order.Sequence(group)  # do all ranks gather and reduce the same units in the same order?
        self._register_hooks()

    def _register_hooks(self) -> None:
        self.model.register_forward_pre_hook(self._pre_forward_root)
        for unit in self.units:
            unit.module.register_forward_pre_hook(partial(self._pre_forward, unit), with_kwargs=True)
            unit.module.register_forward_hook(partial(self._post_forward, unit))
        # always_call: an exception in forward must not leave gathered units behind.
        self.model.register_forward_hook(self._post_forward_root, always_call=True)
        for unit in (*self.units, self.root):
            for bucket in unit.trained:
                for param in bucket.params:
                    # Called when `param.grad` is final for this backward, however often the parameter was used.
                    param.register_post_accumulate_grad_hook(partial(self._on_gradient, unit, bucket))

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def training_step(self, inputs, targets, loss_fn) -> torch.Tensor:
        """One whole step on this rank's batch; returns this rank's loss, detached."""
        with record_function("step 1 forward"):
            loss = loss_fn(self(inputs), targets)  # and step 5 inside it, unit by unit
        with record_function("step 2 backward"):
            loss.backward()  # and steps 5 and 3 inside it, unit by unit
        self.step()
        self.zero_grad()
        return loss.detach()

    def step(self) -> None:
        """The end of step 3, and step 4. There is no step 5: the next forward gathers what it needs."""
        with record_function("step 3 reduce gradients"):
            self._sync_gradients()
        with record_function("step 4 update the shard"):
            self.optimizer.step()
        self._sync_params(self.buckets)

    def _sync_params(self, buckets: list[Bucket]) -> None:
        """In ZeRO-1 and -2 step 5. Here it is enough to free what is still gathered, for it holds the old values."""
        for unit in (*self.units, self.root):
            self._reshard_unit(unit)

    # Step 5, gather parameters: start, wait, and free again.

    def _gather_unit(self, unit: Unit) -> None:
        """Start to gather `unit`, if it is not whole already. Nobody may use it before `_wait_for_unit`."""
        if unit.whole:
            return
        self._sequence.next(f"the all-gather of unit {unit.name!r}")  # or an error, if other ranks gather another one
        with record_function("step 5 gather parameters"):
            for bucket in unit.buckets:
                bucket.flat.untyped_storage().resize_(bucket.numel * bucket.flat.element_size())
                # Straight into the weights: the model's parameters are views of `flat`, and so are the views that
                # autograd saved. On CUDA the buffer must come from the stream that computes, which is
                # why it is resized here and not in the collective's own stream: then no event is needed.
                shard = loop.rounded_shard(bucket)  # in float32 the shard itself
                unit.works.append(dist.all_gather_single(bucket.flat, shard, group=self.group, async_op=True))
        unit.whole = True

    def _wait_for_unit(self, unit: Unit) -> None:
        while unit.works:
            loop.wait(unit.works.pop(0), "all-gather", unit.buckets[0])
        guard.open(unit.params)  # until `guard.close`, using one of them is allowed

    def _reshard_unit(self, unit: Unit) -> None:
        """Free the whole parameters. This rank's shard stays."""
        if unit.whole:
            self._wait_for_unit(unit)  # never free a buffer that a collective still writes to
            for bucket in unit.buckets:
                bucket.flat.untyped_storage().resize_(0)
            guard.close(unit.params)
            unit.whole = False

    # Step 1, forward.

    def _pre_forward_root(self, module, args) -> None:
        if loop.backward_now() is not None:  # activation checkpointing runs forward again inside backward
            loop.refuse_reentrant(self._backward is None)  # its forward left no trace in autograd's graph
            return
        if self._backward is not None:
            raise RuntimeError("the backward before this forward did not finish: call engine.zero_grad() first")
        self._in_forward, self._seen = True, []
        self._sequence.begin((torch.is_grad_enabled(), self._sync))
        self._gather_unit(self.root)
        for unit in self._order[: self.prefetch]:
            self._gather_unit(unit)
        self._wait_for_unit(self.root)

    def _pre_forward(self, unit: Unit, module, args, kwargs) -> None:
        if loop.backward_now() is not None:  # recomputed by activation checkpointing: no telling which unit is next
            self._gather_unit(unit)
            self._wait_for_unit(unit)
            return
        if not self._in_forward:
            raise RuntimeError(
                f"unit {unit.name!r} was called by itself, outside the model's forward, while its parameters "
                "are sharded: call engine(inputs), or read weights with engine.full_state_dict()"
            )
        position = len(self._seen)
        self._seen.append(unit)
        self._gather_unit(unit)  # nothing to do if it was prefetched
        if self._order[position : position + 1] == [unit]:  # as the last forward went, so we know what is next
            for following in self._order[position + 1 : position + 1 + self.prefetch]:
                self._gather_unit(following)
        if len(unit.trained) < len(unit.buckets) and torch.is_grad_enabled():  # some are frozen, see `_on_gradient`
            self._reshard_after_inputs(unit, (args, kwargs))
        self._wait_for_unit(unit)

    def _post_forward(self, unit: Unit, module, args, output) -> None:
        if loop.backward_now() is not None:
            return  # recomputed for backward, which needs it whole: `_on_gradient` or `_end_backward` frees it
        before = self._seen[max(0, len(self._seen) - 1 - self.prefetch) : len(self._seen) - 1]  # next in backward
        needs_backward = self._gather_before_backward(unit, output, list(reversed(before)))
        # The last unit as well, which backward needs first: the loss comes in between, and with it the peak.
        if self.reshard_after_forward or not needs_backward:
            self._reshard_unit(unit)

    def _post_forward_root(self, module, args, output) -> None:
        if loop.backward_now() is not None:
            return
        self._in_forward = False
        first = list(reversed(self._seen))[: self.prefetch]
        if self._seen:
            self._order = self._seen
        if not self._gather_before_backward(self.root, output, first):
            # No backward will come: an evaluation, or an exception in forward, which a second one must not hide.
            with contextlib.suppress(RuntimeError) if output is None else contextlib.nullcontext():
                for unit in (*self.units, self.root):
                    self._reshard_unit(unit)

    # Step 2, backward.

    def _gather_before_backward(self, unit: Unit, output, upcoming: list[Unit]) -> bool:
        """Have `unit` gathered when the gradient of its output is there. False if none can come."""
        outputs = [leaf for leaf in loop.tensors_in(output) if leaf.requires_grad]
        begun = set()  # the backwards through this output that have begun: several tensors, one beginning

        def begin(gradient):
            if loop.backward_now() not in begun:
                begun.add(loop.backward_now())
                self._pre_backward(unit, upcoming)

        for tensor in outputs:
            # A hook on the tensor and not on the module: those miss outputs that are dictionaries or dataclasses.
            tensor.register_hook(begin)
        return bool(outputs)

    def _pre_backward(self, unit: Unit, upcoming: list[Unit]) -> None:
        """The gradient of `unit`'s output is known: its backward is next, and after it that of `upcoming`."""
        if self._backward is None:
            self._backward = loop.when_backward_ends(self._end_backward)
            self._begun, self._waiting = None, [*self.units, self.root]  # for `find_unused`: at work, not reduced yet
        if self.find_unused and unit is not self.root:  # the root is at work from the first to the last
            self._reduce_begun()
            self._begun = unit
        self._gather_unit(unit)
        for following in upcoming:
            self._gather_unit(following)
        self._wait_for_unit(unit)

    def _on_gradient(self, unit: Unit, bucket: Bucket, param: nn.Parameter) -> None:
        """Step 3, called inside step 2: `param.grad` is final. Free and reduce the unit if it was the last."""
        loop.refuse_reentrant(loop.backward_now() != self._backward)
        loop.check_gradient(bucket, param)
        if not self._sync:
            loop.keep_gradient(bucket, param)
        bucket.used.add(param)  # since `zero_grad`
        bucket.missing.discard(param)  # `missing`: those of the bucket whose gradients are still to come
        if any(b.missing for b in unit.trained):
            return
        # Every use of a weight adds to its gradient, so when all gradients are final nobody needs the weights any
        # more. A frozen weight has no gradient to tell: a unit with one waits for its inputs' gradients.
        if len(unit.trained) == len(unit.buckets):
            self._reshard_unit(unit)
        if not self.find_unused:
            self._reduce_unit(unit)

    def _reduce_begun(self) -> None:
        """With `find_unused`: another unit's backward begins, or none any more, so this one's gradients are all there.

        Only now are they reduced, and not when they are complete: on another rank they never may be. Collectives
        match by their order alone, the gathers in between included, so no rank may reduce earlier than another.
        """
        if self._begun is not None:
            self._reshard_unit(self._begun)
            self._reduce_unit(self._begun)
            self._waiting = [unit for unit in self._waiting if unit is not self._begun]

    def _reshard_after_inputs(self, unit: Unit, inputs) -> None:
        """Free `unit` in backward once the gradients of all its inputs are there."""
        leaves = [leaf for leaf in loop.tensors_in(inputs) if leaf.requires_grad]
        if leaves:
            register_multi_grad_hook(leaves, lambda gradients: self._reshard_unit(unit))

    def _end_backward(self, completed: bool = True) -> None:
        """Backward is over, or was given up: free what no gradient has freed, and receive the last reduction."""
        for unit in (*self.units, self.root):
            self._reshard_unit(unit)
        if self.find_unused and completed:
            self._reduce_begun()
            for unit in self._waiting:  # whose outputs got no gradient, and the root
                self._reduce_unit(unit)
        self._finish_reduction()
        self._backward = None

    @contextlib.contextmanager
    def no_sync(self):
        """For all but the last of several backwards before a step: gradients add up on this rank, whole, unsent."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    # Step 3, reduce gradients, as in ZeRO-2 with the unit as the bucket.

    def _reduce_unit(self, unit: Unit) -> None:
        if self._sync and unit.trained:
            self._sequence.next(f"the reduce-scatter of unit {unit.name!r}")
        for bucket in unit.trained:
            bucket.missing = set(bucket.params)
            if self._sync:
                self._reduce_bucket(bucket)

    def _reduce_bucket(self, bucket: Bucket) -> None:
        """Send one bucket, and let backward go on meanwhile."""
        with record_function("step 3 reduce gradients"):
            self._finish_reduction()  # the one before: at most two units' whole gradients are alive
            self._in_flight = Reduction(bucket, self.group)
        self._unused_known = False

    def _finish_reduction(self) -> None:
        if self._in_flight is not None:
            self._in_flight.finish(self.world_size)
            self._in_flight = None

    def _sync_gradients(self) -> None:
        """The end of step 3: receive the last unit, if backward could not."""
        self._finish_reduction()
        loop.require_gradients(self.trained, self.find_unused)
        if self.find_unused and not self._unused_known:
            loop.drop_unused(self.trained, self.group)
            self._unused_known = True

    def zero_grad(self) -> None:
        """Drop all gradients, also those of a backward that did not finish. Call it after `step()`."""
        if self._backward is not None:
            self._end_backward(completed=False)
        self._finish_reduction()
        self.model.zero_grad()
        self._unused_known = False
        for bucket in self.trained:
            bucket.used = set()  # the parameters that got a gradient since
            bucket.kept = {}  # parameter -> its whole gradient, under `no_sync`
            bucket.missing = set(bucket.params)  # what this backward has not finished yet
            for _, piece in bucket.pieces:
                piece.grad = None

    # Not the lesson, and alike in every stage: the docstrings are in harness/engine/loop.py.
    clip_grad_norm_ = loop.clip_grad_norm_
    full_state_dict = loop.full_state_dict
    load_full_state_dict = loop.load_full_state_dict


def main() -> None:
    from harness.run import walkthrough

    walkthrough.run(ZeRO3, __doc__)


if __name__ == "__main__":
    main()
