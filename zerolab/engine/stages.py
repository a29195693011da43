"""The three engines: the chapters plus options. The steps are the chapters', inherited.

Each method here is a moment of a chapter that some option changes. The option's own file says how.
"""

import warnings

import torch
from torch.autograd import Variable

from zero1 import ZeRO1, broadcast_whole
from zero2 import ZeRO2, weak_hook
from zero3 import ZeRO3, default_units, in_backward
from zerolab.engine import (
    accumulation,
    checks,
    clipping,
    groups,
    meta,
    offload,
    precision,
    replicas,
    state_dict,
    unused,
)
from zerolab.engine.bucket import EngineBucket, EngineReduction, EngineUnit, to_optimizer
from zerolab.engine.options import Options
from zerolab.engine.together import on_all_ranks


class Engine:
    """The common part of all three stages. The arguments of every engine:

    model, optimizer   as for the chapters; the optimizer may have any number of parameter groups
    group              a process group, or a DeviceMesh of one dimension, or of two: (replicas, shards). Default: all
    param_dtype        the dtype to compute and to gather in, such as torch.bfloat16. Shards keep the parameters' dtype
    reduce_dtype       the dtype to reduce gradients in. Default: `param_dtype`
    find_unused        True: a step may leave parameters without a gradient
    offload_policy     torch's `CPUOffloadPolicy()`: shards and optimizer state in the host's memory

    Raises ValueError, TypeError or RuntimeError, on every rank, for a model, an optimizer or an option that cannot
    work. See checks.py, and docs/limits.md for what is not detected.
    """

    def __init__(
        self,
        model,
        optimizer,
        *,
        group=None,
        param_dtype=None,
        reduce_dtype=None,
        find_unused=False,
        offload_policy=None,
        **chapter_options,
    ):
        group, copies, everyone = replicas.groups_of(group)
        self.options = Options(
            group=group,
            replicas=copies,
            everyone=everyone,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            find_unused=find_unused,
            offload_policy=offload_policy,
        )
        self.sync = True  # False inside `no_sync`
        self.ready = False  # whether the optimizer's pieces have the gradients of all backwards so far
        self.updating = False  # whether `step()` runs
        self.chapter_options = dict(chapter_options)
        self.saving = None  # the thread of `checkpoint.async_save`
        super().__init__(model, optimizer, group=group, **chapter_options)

    # Step 0.

    def check(self):
        others = {name: value for name, value in self.chapter_options.items() if name != "units"}
        checks.check_build(self.model, self.optimizer, self.options, **others)

    def broadcast_untrained(self):
        """Broadcast the buffers. `partition` broadcasts frozen parameters, or puts them into separate buckets."""
        buffers = [buffer for buffer in self.model.buffers() if not buffer.is_meta]
        broadcast_whole(buffers, self.group)
        replicas.broadcast_over(self.options.replicas, buffers)

    def take_over_optimizer(self):
        names = {param: state_dict.plain_name(name) for name, param in self.model.named_parameters()}
        # For checkpoints: the names of each group's parameters, even if this rank owns no element of them.
        self.group_names = [[names[param] for param in group["params"]] for group in self.optimizer.param_groups]
        groups.take_over(self.optimizer, self.buckets)
        self.optimizer.register_step_pre_hook(weak_hook(self.before_update))
        self.optimizer.register_step_post_hook(weak_hook(self.after_update))

    def before_update(self, optimizer, args, kwargs):
        checks.check_step(self)

    def after_update(self, optimizer, args, kwargs):
        for bucket in self.buckets:
            groups.collect_values(bucket)

    # The steps.

    def step(self):
        """The chapter's `step()`."""
        checks.check_memory(self.buckets)
        self.updating = True  # only now the optimizer may step
        try:
            super().step()
        finally:
            self.updating = False

    def reduce_gradients(self):
        """Step 3, or the rest of it. From here on every piece in the optimizer has its gradient.

        You can call it before `step()` to read or change gradients. Raises RuntimeError like `step()`.
        """
        if not self.ready:
            checks.check_cleared(self.buckets)
            self.set_moved(False)
            with checks.without_checks():
                super().reduce_gradients()
            for bucket in self.buckets:
                groups.hand_out_gradients(bucket)
                bucket.handed_out = True
            if self.options.find_unused:
                unused.drop_unused(self.buckets, self.options.everyone)
                for bucket in self.buckets:
                    bucket.handed_out = any(piece.grad is not None for piece in bucket.pieces.values())
            self.ready = True
            self.set_moved(True)
        if self.options.offload_policy is not None:
            # Also in `step()` if you called this method before: a forward in between may still copy shards.
            offload.wait_for_copies(self.buckets)

    def zero_grad(self):
        """The chapter's `zero_grad()`."""
        self.set_moved(False)
        with checks.without_checks():
            super().zero_grad()
        self.ready = False
        for bucket in self.buckets:
            bucket.used.clear()
            bucket.kept.clear()
            bucket.handed_out = False
            for piece in bucket.pieces.values():
                piece.grad = None

    def set_moved(self, moved):
        """Set whether reading `param.grad` is an error. In ZeRO-1 it never is, because gradients stay in place."""

    def shards_changed(self):
        """Called after something other than the optimizer has written to the shards."""

    # Options that are methods, each from its own file.

    def no_sync(self):
        """`with engine.no_sync():` around all but the last of several backwards before a step (accumulation.py)."""
        return accumulation.no_sync(self)

    clip_grad_norm_ = clipping.clip_grad_norm_
    clip_grad_value_ = clipping.clip_grad_value_
    full_state_dict = state_dict.full_state_dict
    load_full_state_dict = state_dict.load_full_state_dict

    def train(self, mode=True):
        """`model.train(mode)`. Returns the engine."""
        self.model.train(mode)
        return self

    def eval(self):
        """`model.eval()`. Returns the engine."""
        return self.train(False)

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: its parts are on several ranks. Save it with "
            "zerolab.engine.checkpoint.save(engine, folder). For a copy of the weights call engine.full_state_dict()"
        )


class BucketEngine(Engine):
    """The common part of ZeRO-1 and ZeRO-2."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if self.options.param_dtype is not None:
            for module in (self.model, *default_units(self.model)):
                precision.cast_inputs(module, self.options.param_dtype)

    def check(self):
        super().check()
        on_all_ranks(lambda: checks.check_has_values(self.model), self.options.everyone)

    def partition(self, bucket_mb):
        """Step 0. In mixed precision a frozen parameter has its own bucket, whose shards keep the exact values."""
        frozen = [pair for pair in self.model.named_parameters() if not pair[1].requires_grad]
        if self.options.param_dtype is None:
            broadcast_whole([param for _, param in frozen], self.group)
            replicas.broadcast_over(self.options.replicas, [param for _, param in frozen])
            frozen = []
        buckets = super().partition(bucket_mb)
        self.all_buckets = buckets + [self.make_bucket(pair[0], [pair]) for pair in frozen]
        return buckets

    def make_bucket(self, name, named_params):
        return EngineBucket(name, named_params, group=self.group, options=self.options)

    def shards_changed(self):
        for work in [bucket.gather() for bucket in self.all_buckets]:
            work.wait()


class ZeRO1Engine(BucketEngine, ZeRO1):
    """ZeRO-1 with the options of `Engine` and the chapter's `bucket_mb`."""

    def __init__(self, *args, bucket_mb=None, **options):
        super().__init__(*args, bucket_mb=bucket_mb, **options)
        self.place_of = {}  # parameter -> (its bucket, the index there)
        for bucket in self.buckets:
            for index, param in enumerate(bucket.params):
                self.place_of[param] = bucket, index
                param.register_post_accumulate_grad_hook(weak_hook(self.on_gradient))

    def on_gradient(self, param):
        """`param.grad` is finished. The chapter needs no such hook, but here the gradient may have to move."""
        bucket, index = self.place_of[param]
        bucket.used.add(param)
        if self.ready:  # `reduce_gradients` was called already, and has to be called again
            for each in self.buckets:
                each.shard.grad = None
        self.ready = False
        if bucket.grads[index] is None:
            bucket.place(bucket.gradient, index).add_(bucket.take_gradient(param))

    def start_reduce(self, bucket):
        first, _ = precision.divisors(bucket.gradient.dtype, self.world_size)
        if first > 1:
            bucket.gradient /= first
        return super().start_reduce(bucket)

    def finish_reduce(self, bucket):
        _, last = precision.divisors(bucket.gradient.dtype, self.world_size)
        bucket.gradient /= last
        own = bucket.gradient[bucket.own]
        if self.options.replicas is not None:
            own = replicas.average_over(self.options.replicas, own.clone())  # a later backward adds to the row's mean
        bucket.shard.grad = to_optimizer(bucket, own)

    def reduce_gradients(self):
        if not self.ready:
            checks.check_gradients(self.buckets, self.options.find_unused)
        super().reduce_gradients()


class SendingEngine(Engine):
    """The common part of ZeRO-2 and ZeRO-3: gradients are sent while backward goes on."""

    def make_reduction(self, bucket):
        return EngineReduction(bucket)

    def set_moved(self, moved):
        for bucket in self.buckets:
            bucket.moved = moved

    def flush(self):
        """Send what is still incomplete, with zeros for the gradients that did not come (`find_unused`)."""

    def reduce_gradients(self):
        if not self.ready:
            checks.check_gradients(self.buckets, self.options.find_unused)
            if self.options.find_unused:
                self.flush()  # if backward has brought no gradient at all on this rank
        super().reduce_gradients()


class ZeRO2Engine(SendingEngine, BucketEngine, ZeRO2):
    """ZeRO-2 with the options of `Engine` and the chapter's `bucket_mb`."""

    def __init__(self, *args, bucket_mb=None, **options):
        self.backward_id = None
        super().__init__(*args, bucket_mb=bucket_mb, **options)
        checks.adopt(self.buckets)

    def on_gradient(self, param):
        bucket = self.bucket_of[param]
        bucket.used.add(param)
        self.ready = False
        if not self.sync:
            accumulation.keep(bucket, param)
            return
        if self.options.find_unused:
            self.notice_backward()
        super().on_gradient(param)

    def notice_backward(self):
        """On the first call in a backward, have autograd call `flush` when the backward is over."""
        number = torch._C._current_graph_task_id()
        if self.backward_id != number:
            self.backward_id = number
            self.expect_gradients()
            Variable._execution_engine.queue_callback(weak_hook(self.flush))

    def flush(self):
        for bucket in self.buckets[self.turn :]:
            bucket.missing.clear()
        self.send_complete()


class ZeRO3Engine(SendingEngine, ZeRO3):
    """ZeRO-3 with the options of `Engine`, the chapter's `units` and `prefetch`, and

    reshard_after_forward   False: units stay gathered from forward to backward. Sends 2Ψ per step instead of 3Ψ
    init_fn, state_dict     where a model on the `meta` device gets its values from (meta.py)

    A module has one unit for each kind of parameter: for each dtype, trained or frozen. Frozen parameters are sharded
    too.
    """

    def __init__(
        self, *args, units=None, prefetch=1, reshard_after_forward=True, init_fn=None, state_dict=None, **options
    ):
        self.reshard_after_forward = reshard_after_forward
        self.source = meta.Source(init_fn, state_dict)
        self.at_work = None  # the module whose backward began last, never the root
        self.waiting = []  # units whose backward is over when backward moves on: frozen ones, and all with find_unused
        super().__init__(*args, units=units, prefetch=prefetch, **options)
        checks.adopt(self.units)
        for unit in self.units:
            checks.mark_freed(unit.params)
        if self.options.param_dtype is not None:
            for module in dict.fromkeys([self.model, *(unit.module for unit in self.units)]):
                precision.cast_inputs(module, self.options.param_dtype)

    @property
    def buckets(self):
        """The units that are trained, under the name that the options use."""
        return [unit for unit in self.units if unit.trained]

    @property
    def all_buckets(self):
        return self.units

    # Step 0.

    def check(self):
        super().check()
        units = self.chapter_options["units"]
        if units is not None:
            self.chapter_options["units"] = units = list(units)
            checks.check_units(self.model, units)
        prefetch = self.chapter_options["prefetch"]
        if prefetch < 0:
            raise ValueError(f"prefetch must be a number of units, 0 or more, got {prefetch!r}")
        self.source.check(self.model, self.options)

    def partition(self, modules):
        self.source.open(self.model, self.options)
        units = super().partition(self.chapter_options["units"] or modules)
        self.source.finish()
        self.warn_of_large_root(units)
        return units

    def make_units(self, name, module, named_params):
        by_kind = {}
        for param_name, param in named_params:
            by_kind.setdefault((param.dtype, param.requires_grad), []).append((param_name, param))
        units = []
        for pairs in by_kind.values():
            self.source.fill_parameters(pairs)
            units.append(EngineUnit(name, module, pairs, group=self.group, options=self.options))
        return units

    def watch_gradients(self):
        for param in self.unit_of:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(weak_hook(self.on_gradient))

    def plan_prefetch(self, prefetch):
        """Here `prefetch` counts modules, and a module may have several units."""
        units_per_module = {}
        for unit in self.units:
            units_per_module[unit.module] = units_per_module.get(unit.module, 0) + 1
        super().plan_prefetch(prefetch * max(units_per_module.values()))

    def warn_of_large_root(self, units):
        total = sum(unit.numel for unit in units)
        root = sum(unit.numel for unit in units if unit.module is self.model)
        if 2 * root > total and torch.distributed.get_rank() == 0:
            warnings.warn(
                f"{root / total:.0%} of the model is in no unit, so it stays gathered from the start of forward to the "
                "end of backward. Pass units=[...], the modules to gather and free one by one, such as the layers",
                stacklevel=6,
            )

    # Forward.

    @torch.compiler.disable  # in a compiled unit the hooks run between two graphs
    def before_forward(self, unit, module, inputs):
        if in_backward():
            # A checkpoint recomputes several units in a row. Backward has not reached them yet, so it does not leave
            # them either.
            super().before_backward(unit)
        else:
            super().before_forward(unit, module, inputs)

    @torch.compiler.disable
    def after_forward(self, unit, module, inputs, output):
        if self.reshard_after_forward or in_backward() or not torch.is_grad_enabled():
            super().after_forward(unit, module, inputs, output)
        else:
            self.watch_output(unit, output)

    # Backward.

    def on_output(self, unit, gradient):
        checks.check_first_order()
        super().on_output(unit, gradient)

    def notice_backward(self):
        checks.check_one_backward(self)
        super().notice_backward()

    def expect_gradients(self):
        super().expect_gradients()
        self.at_work = None
        self.waiting = [unit for unit in self.units if self.waits(unit)]

    def waits(self, unit):
        """Whether the unit's backward is over when backward moves on, and not with its last gradient."""
        return self.options.find_unused or not unit.trained

    def before_backward(self, unit):
        self.notice_backward()
        if unit.module is not self.at_work and unit.module is not self.model:
            self.leave(self.at_work)
            self.at_work = unit.module
            if self.waits(unit) and unit not in self.waiting:  # it ran twice, and was left once already
                unit.missing = set(unit.params)
                self.waiting.append(unit)
        super().before_backward(unit)

    def leave(self, module):
        """Backward leaves `module`. The units that waited for this are done."""
        for unit in [unit for unit in self.waiting if unit.module is module]:
            self.waiting.remove(unit)
            unit.missing.clear()
            self.finish_waiting(unit)

    def finish_waiting(self, unit):
        if unit.trained and self.sync:
            super().finish(unit)
        else:
            unit.free()

    def on_gradient(self, param):
        unit = self.unit_of[param]
        unit.used.add(param)
        self.ready = False
        super().on_gradient(param)
        if not self.sync and checks.get_grad(param) is not None:
            accumulation.keep(unit, param)

    def finish(self, unit):
        """All gradients are there. With `find_unused` other ranks may still wait for theirs."""
        if self.waits(unit):
            return
        if self.sync:
            super().finish(unit)
        else:
            unit.free()

    def flush(self):
        """The end of backward: finish all waiting units, in the same order on all ranks."""
        for unit in self.units[::-1]:
            if unit in self.waiting:
                self.waiting.remove(unit)
                unit.missing.clear()
                self.finish_waiting(unit)

    def end_backward(self):
        self.flush()
        for unit in self.units:
            if len(unit.missing) == len(unit.params):
                unit.missing.clear()  # this backward never reached it, for example a gradient of the inputs only
        self.backward_id = None
        super().end_backward()

    def zero_grad(self):
        super().zero_grad()
        self.backward_id = None  # also after a backward that raised an error

    def shards_changed(self):
        self.free_all()  # gathered weights have the old values
