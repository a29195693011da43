"""The common part of the three engines: the options, the optimizer's pieces, and the life of a gradient (life.py).

An engine is its chapter plus options, and inherits the chapter's steps. Each method here, and in zero1.py, zero2.py and
zero3.py of this folder, is a moment of a chapter that some option changes. The option's own file explains how.
"""

import torch
from torch.profiler import record_function

from zero1 import broadcast_whole, gather_parameters
from zero2 import weak_hook
from zero3 import default_units
from zerolab.engine import (
    accumulation,
    checks,
    clipping,
    groups,
    offload,
    parameters,
    precision,
    replicas,
    state_dict,
    unused,
)
from zerolab.engine.bucket import EngineBucket
from zerolab.engine.life import Gradients
from zerolab.engine.optimizers import as_list, as_one
from zerolab.engine.options import Options
from zerolab.engine.whole import WholeParameters


class Engine:
    """The common part of all three stages. The arguments of every engine:

    model, optimizer   as for the chapters; the optimizer may have any number of parameter groups, or be a list of them
    group              a process group, or a DeviceMesh of one dimension, or of two: (replicas, shards). Default: all
    param_dtype        the dtype to compute and to gather in, such as torch.bfloat16. Shards keep the parameters' dtype
    reduce_dtype       the dtype to reduce gradients in. Default: `param_dtype`
    find_unused        True: a step may leave parameters without a gradient
    offload_policy     torch's `CPUOffloadPolicy()`: shards and optimizer state in the host's memory
    whole              True, or a list of parameters: each belongs to one rank as a whole, as Muon needs it (whole.py)

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
        whole=False,
        **chapter_options,
    ):
        group, copies, all_ranks = replicas.groups_of(group)
        self.options = Options(
            group=group,
            replicas=copies,
            all_ranks=all_ranks,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            find_unused=find_unused,
            offload_policy=offload_policy,
            whole=WholeParameters(whole),
        )
        self.chapter_options = dict(chapter_options)
        self.gradients = Gradients.CLEARED
        self.sync = True  # False inside `no_sync`
        self.saving = None  # the running save of `checkpoint.async_save`
        self.optimizers = as_list(optimizer)
        super().__init__(model, as_one(self.optimizers), group=group, **chapter_options)
        parameters.adopt(self.buckets)
        if param_dtype is not None:
            for module in self.modules_that_cast():
                precision.cast_inputs(module, param_dtype)

    # Step 0.

    def check(self):
        others = {name: value for name, value in self.chapter_options.items() if name != "units"}
        checks.check_build(self.model, self.optimizers, self.options, others)

    def broadcast_untrained(self):
        """Broadcast the buffers. `partition` broadcasts frozen parameters, or puts them into separate buckets."""
        buffers = [buffer for buffer in self.model.buffers() if not buffer.is_meta]
        broadcast_whole(buffers, self.group)
        replicas.broadcast_over(self.options.replicas, buffers)

    def take_over_optimizer(self):
        names = {param: state_dict.plain_name(name) for name, param in self.model.named_parameters()}
        # For checkpoints: the names of each group's parameters, even if this rank owns no element of them.
        self.group_names = [[names[param] for param in group["params"]] for group in self.optimizer.param_groups]
        for optimizer in self.optimizers:
            groups.take_over(optimizer, self.buckets)
            optimizer.register_step_pre_hook(weak_hook(self.before_update))
            optimizer.register_step_post_hook(weak_hook(self.after_update))

    def before_update(self, optimizer, args, kwargs):
        checks.check_update(self)

    def after_update(self, optimizer, args, kwargs):
        for bucket in self.buckets:
            groups.collect_values(bucket)

    # The steps. torch.compile must not compile them, because they exchange the memory of parameters.

    def backward_began(self):
        """Called when a backward begins, or at its first gradient. Later calls in the same backward do no harm."""
        if self.gradients is Gradients.REDUCED:
            checks.check_cleared(self.buckets)
            for bucket in self.buckets:
                bucket.take_back()
        self.gradients = Gradients.LOCAL if self.sync else Gradients.KEPT

    @torch.compiler.disable
    def step(self):
        """The chapter's `step()`."""
        checks.check_memory(self.buckets)
        with record_function("step 3 reduce gradients"):
            self.reduce_gradients()
        self.gradients = Gradients.UPDATING  # only now the optimizer may step
        try:
            super().step()
        finally:
            self.gradients = Gradients.REDUCED

    @torch.compiler.disable
    def reduce_gradients(self):
        """Step 3, or the rest of it. From here on every piece in the optimizer has its gradient.

        You can call it before `step()` to read or change gradients. Raises RuntimeError like `step()`.
        """
        if self.gradients is Gradients.UPDATING:
            return  # the chapter's `step()` calls this again
        if self.gradients is not Gradients.REDUCED:
            checks.check_gradients(self)
            with parameters.without_checks():
                self.finish_reduction()
            for bucket in self.buckets:
                groups.hand_out_gradients(bucket)
            if self.options.find_unused:
                unused.drop_unused(self.buckets, self.options.all_ranks)
            self.gradients = Gradients.REDUCED
        if self.options.offload_policy is not None:
            # This is also done in `step()` if you have called this method before it, because a forward in between may
            # still copy shards.
            offload.wait_for_copies(self.buckets)

    @torch.compiler.disable
    def zero_grad(self):
        """The chapter's `zero_grad()`."""
        self.gradients = Gradients.CLEARED
        for bucket in self.buckets:
            bucket.clear()
        with parameters.without_checks():
            super().zero_grad()

    # Options that are methods, each from its own file.

    def no_sync(self):
        """`with engine.no_sync():` around all but the last of several backwards before a step (accumulation.py)."""
        return accumulation.no_sync(self)

    clip_grad_norm_ = clipping.clip_grad_norm_
    clip_grad_value_ = clipping.clip_grad_value_
    full_state_dict = state_dict.full_state_dict
    load_full_state_dict = state_dict.load_full_state_dict

    def train(self, mode=True):
        """Call `model.train(mode)`. Returns the engine."""
        self.model.train(mode)
        return self

    def eval(self):
        """Call `model.eval()`. Returns the engine."""
        return self.train(False)

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: its parts are on several ranks. Save it with "
            "zerolab.engine.checkpoint.save(engine, folder). For a copy of the weights call engine.full_state_dict()"
        )


class BucketEngine(Engine):
    """The common part of ZeRO-1 and ZeRO-2, which do not divide the parameters, and have buckets of `bucket_mb`.

    all_buckets   the buckets, and those of frozen parameters that need their own (`broadcast_frozen`)
    """

    def check(self):
        super().check()
        checks.check_has_values(self.model, self.options)

    def partition(self, bucket_mb):
        frozen = broadcast_frozen(self)
        buckets = super().partition(bucket_mb)
        self.all_buckets = buckets + [self.make_bucket(name, [(name, param)]) for name, param in frozen]
        return buckets

    def make_runs(self, bucket_mb):
        whole = self.options.whole
        return whole.split(super().make_runs(whole.bucket_mb(self) if bucket_mb is None else bucket_mb))

    def make_bucket(self, name, named_params):
        return EngineBucket(name=name, named_params=named_params, group=self.group, options=self.options)

    def modules_that_cast(self):
        return [self.model, *default_units(self.model)]

    def shards_changed(self):
        """Called after something other than the optimizer has written to the shards."""
        gather_parameters(self.all_buckets)


def broadcast_frozen(engine):
    """Step 0 of ZeRO-1 and -2: start with rank 0's frozen parameters. Returns those that need their own bucket.

    In mixed precision a frozen parameter has its own bucket, whose shards keep the exact values.
    """
    frozen = [(name, param) for name, param in engine.model.named_parameters() if not param.requires_grad]
    if engine.options.param_dtype is not None:
        return frozen
    params = [param for _, param in frozen]
    broadcast_whole(params, engine.group)
    replicas.broadcast_over(engine.options.replicas, params)
    return []
