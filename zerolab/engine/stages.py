"""ZeRO-1 and ZeRO-2 with what real training adds. The steps are the chapters', inherited."""

import torch
import torch.distributed as dist
from torch.profiler import record_function

import zero1
import zero2
from zerolab.engine import state
from zerolab.engine.base import Engine, SendingEngine
from zerolab.engine.bucket import EngineBucket
from zerolab.engine.hooks import not_compiled
from zerolab.engine.options import precision
from zerolab.engine.safety import guard
from zerolab.engine.safety.unchanged import Look
from zerolab.engine.safety.waiting import NamedWork


class BucketEngine(Engine):
    """What ZeRO-1 and ZeRO-2 have in common: buckets by size."""

    def __init__(self, model, optimizer_cls, *, bucket_mb=None, param_groups=None, **options):
        # What cannot work raises here, on every rank, before anything is changed.
        self.prepare(model, optimizer_cls, param_groups, {"bucket_mb": bucket_mb}, **options)
        super().__init__(model, self.over_pieces(optimizer_cls, param_groups), bucket_mb=bucket_mb, group=self.group)

    def partition(self, bucket_mb):
        """Step 0. Frozen parameters have buckets, too, each its own, behind the trained ones."""
        with record_function("step 0 partition"), torch.no_grad():
            state.broadcast_buffers(self.model, self.placement.everyone)
            runs = zero1.by_size(self.model, bucket_mb)
            runs += [[pair] for pair in self.model.named_parameters() if not pair[1].requires_grad]
            self.all_buckets = [EngineBucket(run, self.placement, self.dtypes) for run in runs]
        return [bucket for bucket in self.all_buckets if bucket.trained]

    def watch_gradients(self) -> None:
        for bucket in self.all_buckets:
            guard.adopt(bucket, self)
        self.look = Look(self)
        self.handles = [self.look.handle, *precision.cast_inputs(self)]
        super().watch_gradients()

    def shards_changed(self) -> None:
        """Somebody has written into the shards: all ranks gather what is new."""
        for work in [bucket.gather() for bucket in self.all_buckets]:
            work.wait()
        super().shards_changed()


class ZeRO1Engine(BucketEngine, zero1.ZeRO1):
    """ZeRO-1 for real training. Options beside the chapter's: `Engine.prepare`."""

    def partition(self, bucket_mb):
        buckets = super().partition(bucket_mb)
        for bucket in buckets:
            bucket.gradient = torch.zeros_like(bucket.flat, dtype=bucket.reduce_dtype)
        return buckets

    def on_gradient(self, bucket, index: int, param) -> None:
        bucket.used.add(index)
        param.zero_moved = True
        self.gradients_are_reduced = False
        super().on_gradient(bucket, index, param)

    @not_compiled
    def zero_grad(self) -> None:
        self.forget_gradients()
        super().zero_grad()
        if self.find_unused:  # a parameter that this rank does not use must contribute zeros, and not an old gradient
            for bucket in self.buckets:
                bucket.gradient.zero_()

    def reduce_gradients(self) -> None:
        """Step 3, as in the chapter: in the reduce dtype, over replicas, to the host, and once."""
        if self.gradients_are_reduced:  # `clip_grad_norm_` needs the averages and has called this; none came since
            return self.require_all()  # but somebody may have written into the weights
        started = []
        for bucket in self.buckets:
            if bucket.divisors[0] > 1:
                bucket.gradient.div_(bucket.divisors[0])
            started.append(self.start_sum(bucket))
        for bucket, (work, total, own) in zip(self.buckets, started):
            work.wait()
            total.div_(bucket.divisors[1])
            if self.placement.elsewhere:
                own = self.placement.final_shard(bucket, own)
            for piece, part in zip(bucket.pieces, bucket.cut(own)):
                piece.grad = part.to(piece.dtype)
        self.require_all()
        for bucket in self.buckets:
            bucket.missing -= bucket.used  # what another rank alone has used: a later backward adds to the mean

    def start_sum(self, bucket) -> tuple[NamedWork, torch.Tensor, torch.Tensor]:
        """Start to add up the ranks' gradients: (the work, where the sum will be, this rank's part of that: a view)."""
        work = dist.all_reduce(bucket.gradient, group=self.group, async_op=True)
        return NamedWork(work, "all-reduce", bucket), bucket.gradient, bucket.gradient[bucket.own]


class ZeRO2Engine(SendingEngine, BucketEngine, zero2.ZeRO2):
    """ZeRO-2 for real training. Options beside the chapter's: `Engine.prepare`.

    A bucket that lacks gradients is final when backward ends, if an earlier backward of this step has brought them
    (several losses, each with a backward of its own), or with `find_unused`. Under `no_sync` gradients are kept.
    """

    def on_gradient(self, bucket, index: int, param) -> None:
        self.notice_backward()
        bucket.came(index)
        self.backward_brought = True
        if self.sync:
            self.gradients_are_reduced = False
            super().on_gradient(bucket, index, param)
        else:
            bucket.keep(index)
            bucket.missing.discard(index)

    def end_backward(self) -> None:
        """What waits for gradients that do not come is final now, if it may be: with zeros for these on this rank."""
        self.backward_number = None
        for bucket in self.buckets:
            earlier = self.backward_brought and bucket.missing <= bucket.used
            if bucket.missing and (self.find_unused or earlier):
                bucket.missing = set()
                self.gradients_are_reduced = self.gradients_are_reduced and not self.sync
        if self.sync:
            self.send_complete()
