"""The changes that options make to a bucket, a unit and a reduction. Everything else is inherited from the chapters."""

import torch
import torch.distributed as dist

from zero1 import Bucket, all_gather
from zero2 import Reduction, reduce_scatter
from zero3 import Unit, version_of
from zerolab.engine import checks, groups, offload, parameters, precision, replicas, whole
from zerolab.engine.groups import cut
from zerolab.engine.tensor_parallel import local, local_gradient


class EngineBucket(Bucket):
    """A bucket of parameters that are all trained or all frozen. In addition to the chapter's attributes it has

    pieces    {parameter: its part of `shard`}, the tensors that the optimizer updates (groups.py)
    kept      {parameter: its whole gradient}, under `no_sync` (accumulation.py)
    used      parameters that got a gradient since `zero_grad()` (unused.py)
    owners    whole parameters: the rank that has each, in ascending order; None if they are cut (whole.py)
    copied    an event after the last copy between the host and the device, or None (offload.py)
    earlier   ZeRO-1: the shard's gradient (shard_numel,) from an earlier reduction in the same step, or None
    grad_of   ZeRO-1: {parameter: its `param.grad`, a view of `gradient`, or None if it cannot be one}
    """

    def __init__(self, *, named_params, options, group, **chapter):
        self.options = options
        self.copied = None
        self.trained = named_params[0][1].requires_grad
        self.owners = None
        if named_params[0][1] in options.whole.params:
            named_params, self.owners = options.whole.assign_owners(named_params, dist.get_world_size(group))
        # With tensor parallelism a parameter is a DTensor, and this rank computes with its local part.
        locals_ = [(name, local(param)) for name, param in named_params]
        self.is_split = any(part is not param for (_, part), (_, param) in zip(locals_, named_params))
        self.shapes = [param.shape for _, param in locals_]
        self.gradient_dtype = precision.reduce_dtype(locals_[0][1], options)
        super().__init__(named_params=locals_, group=group, **chapter)
        self.divide_first, self.divide_last = precision.divisors(self.gradient_dtype, self.world_size)
        ends = [*self.offsets[1:], self.numel]
        self.sizes = [self.offsets[0]]  # 0, or padding if rank 0 owns no whole parameter of this bucket
        for shape, begin, end in zip(self.shapes, self.offsets, ends):
            self.sizes += [shape.numel(), end - begin - shape.numel()]  # of a parameter, and of the padding behind it
        self.params = tuple(param for _, param in named_params)
        self.pieces = {}
        if self.trained:
            self.pieces = {param: piece.detach().requires_grad_() for param, piece in cut(self, self.shard).items()}
        self.kept = {}
        self.used = set()
        self.earlier = None

    # How parameters are laid out.

    def assign_places(self):
        if self.owners is None:
            super().assign_places()
        else:
            whole.assign_places(self)

    def alignment(self):
        return precision.alignment(self.params[0], self.options)

    def place(self, flat, index):
        begin, shape = self.offsets[index], self.shapes[index]
        return flat[begin : begin + shape.numel()].view(shape)

    def places(self, flat):
        """The places of all parameters, each as `place` returns it, but with a single split for all of them."""
        return [part.view(shape) for part, shape in zip(flat.split_with_sizes(self.sizes)[1::2], self.shapes)]

    def padding(self, flat):
        """The parts of `flat` that belong to no parameter."""
        return [part for part in flat.split_with_sizes(self.sizes)[::2] if part.numel()]

    def flatten(self):
        flat = super().flatten()
        flat[: self.offsets[0]].zero_()
        replicas.broadcast_over(self.options.replicas, [flat])
        return flat

    def make_shard(self):
        """With mixed precision or offload the shard has its own memory in ZeRO-1 and -2 too."""
        shard = super().make_shard()
        dtype = precision.compute_dtype(self.params[0], self.options)
        if dtype != self.flat.dtype:
            if shard.untyped_storage()._cdata == self.flat.untyped_storage()._cdata:
                shard = shard.clone()
            self.flat = self.flat.to(dtype)
            for index, param in enumerate(self.params):
                param.data = self.place(self.flat, index)
        if self.options.offload_policy is not None:
            shard = offload.to_host(shard, self.options.offload_policy)
            offload.mark_copy(self)
            offload.wait_for_copies([self])
        # The tensors that a gather receives and sends, unless the shard can be sent as it is. They are views of `flat`,
        # so they stay valid when its memory is freed and allocated again.
        self.received, self.sent = precision.sendable(self.flat), precision.sendable(self.flat[self.own])
        return shard

    # How they are gathered.

    def gather(self):
        """The shard is rounded, or copied from the host, into its own place in `flat`, and sent from there."""
        flat, shard = self.flat, self.shard
        if shard.dtype == flat.dtype and shard.device == flat.device and flat.is_floating_point():
            return super().gather()
        own = flat[self.own]
        # The shard is first copied to the device and then rounded. In a single `copy_` torch would do the same, but in
        # memory of its own, which the measurements of zerolab/measure do not see.
        own.copy_(shard.detach().to(flat.device, non_blocking=True))
        if self.options.offload_policy is not None:
            offload.mark_copy(self)
        return all_gather(self.received, self.sent, group=self.group, async_op=True)

    def gather_exact(self):
        """All values in the shards' dtype, in a new buffer (numel,) on the device. A collective."""
        shard = self.shard.detach().to(self.flat.device)
        flat = shard.new_empty(self.numel)
        all_gather(precision.sendable(flat), precision.sendable(shard), group=self.group)
        return flat

    # How gradients are reduced.

    def make_gradient(self):
        """In ZeRO-1: a `param.grad` must have its parameter's dtype, so it cannot always be a view of the buffer.

        Where it cannot, `ZeRO1Engine.on_gradient` adds each gradient to the buffer, and sets `param.grad` to None.
        """
        self.gradient = torch.zeros(self.numel, dtype=self.gradient_dtype, device=self.flat.device)
        self.place_of = dict(zip(self.params, self.places(self.gradient)))
        can_be_views = self.gradient_dtype == self.flat.dtype and not self.is_split
        self.grad_of = self.place_of if can_be_views else dict.fromkeys(self.params)
        self.grads = list(self.grad_of.values())

    def take_gradient(self, param):
        """Return `param.grad`, or the local part of a DTensor, and set `param.grad` to None."""
        gradient = parameters.get_grad(param)
        parameters.set_grad(param, None)
        if gradient is not None and gradient.requires_grad:
            checks.refuse_graph()
        if gradient is not None and self.is_split:
            return local_gradient(gradient)
        return gradient

    def take_back(self):
        """Called if a backward follows the reduction: collect the gradients of the pieces, so that new ones are added.

        Your loop may have changed these gradients, or set them to None. In ZeRO-1 they are moved out of the buffer,
        because the next all-reduce would average this rank's changed values with the unchanged ones of other ranks.
        """
        if self.gradient is None:
            groups.collect_gradients(self, self.shard.grad)
        else:
            self.earlier = torch.zeros_like(self.shard)
            groups.collect_gradients(self, self.earlier)
            self.shard.grad = None
            self.gradient.zero_()

    def clear(self):
        """In `zero_grad()`: clear what the chapter does not know. The chapter clears everything else."""
        self.used.clear()
        self.kept.clear()
        self.earlier = None
        for piece in self.pieces.values():
            piece.grad = None

    def take_sum(self, param):
        """Like `take_gradient`, but adds the gradient that `no_sync` has kept, if there is one."""
        gradient = self.take_gradient(param)
        if param not in self.kept:
            return gradient
        kept = self.kept.pop(param)
        return kept if gradient is None else kept.add_(gradient)


class EngineUnit(EngineBucket, Unit):
    """A unit whose weights raise an error when they are read while they are freed (parameters.py)."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.version = version_of(self)  # again, because with tensor parallelism the chapter saw only the local parts
        self.open_ended = self.options.find_unused or not self.trained  # the unit has no last gradient
        self.on_recomputation = None  # called if a checkpoint reads a freed weight in backward

    def wait(self):
        if self.work is not None:
            super().wait()
            parameters.mark_gathered(self.params)

    def free(self):
        if self.allocated:
            try:
                super().free()
            finally:  # `free` raises an error for a weight that was written to, after it has freed the memory
                parameters.mark_freed(self.params)


class EngineReduction(Reduction):
    """A reduction in `reduce_dtype` that adds gradients kept by `no_sync`, averages over replicas, and offloads."""

    def lay_out_gradients(self):
        bucket = self.bucket
        flat = torch.empty(bucket.numel, dtype=bucket.gradient_dtype, device=bucket.flat.device)
        with parameters.without_checks():
            gradients = [bucket.take_sum(param) for param in bucket.params]
        places = bucket.places(flat)
        given = [index for index, gradient in enumerate(gradients) if gradient is not None]
        if given:
            torch._foreach_copy_([places[index] for index in given], [gradients[index] for index in given])
        # Only the places of missing gradients and the padding are set to zero. Setting all of `flat` would be one more
        # pass over all gradients.
        zeros = [place for place, gradient in zip(places, gradients) if gradient is None] + bucket.padding(flat)
        if zeros:
            torch._foreach_zero_(zeros)
        if bucket.divide_first > 1:
            flat /= bucket.divide_first
        return flat

    def start(self):
        if not self.gradient.is_complex():
            return super().start()
        # NCCL can reduce complex numbers as pairs of real numbers. torch converts them only in an all-reduce.
        whole, shard = precision.as_real(self.gradient), precision.as_real(self.shard_gradient)
        self.work = reduce_scatter(shard, whole, group=self.bucket.group, async_op=True)

    def average(self):
        self.shard_gradient /= self.bucket.divide_last
        replicas.average_over(self.bucket.options.replicas, self.shard_gradient)

    def deliver(self):
        self.gradient = None  # it was sent, and is freed before the shard is converted or copied
        shard = self.bucket.shard
        earlier, shard.grad = shard.grad, None
        shard.grad = to_optimizer(self.bucket, self.shard_gradient, earlier)


def to_optimizer(bucket, shard, earlier=None):
    """Convert a reduced shard to the optimizer's dtype and device. Adds the gradient `earlier`, if there is one."""
    shard = shard.to(bucket.shard.dtype)
    if earlier is not None:
        # With offload `earlier` is on the host. The sum is computed on the device, because otherwise the host would
        # have to wait for the copy of `shard` in the middle of backward. This costs 4Ψ/N more bytes over PCIe.
        shard += earlier.to(shard.device, non_blocking=True)
    policy = bucket.options.offload_policy
    if policy is None:
        return shard
    host = offload.to_host(shard, policy)
    offload.mark_copy(bucket)
    return host
