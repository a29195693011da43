"""ZeRO-1 with options.

As in the chapter, a `param.grad` is a view of its bucket's gradient buffer, wherever this is possible. With a
`reduce_dtype` it is not, because torch requires that a gradient has its parameter's dtype. Then a hook adds the
gradient to the buffer.
"""

from zero1 import ZeRO1
from zero2 import weak_hook
from zerolab.engine import replicas
from zerolab.engine.bucket import to_optimizer
from zerolab.engine.common import BucketEngine


class ZeRO1Engine(BucketEngine, ZeRO1):
    """ZeRO-1 with the options of `Engine` and the chapter's `bucket_mb`."""

    def __init__(self, model, optimizer, *, bucket_mb=None, **options):
        super().__init__(model, optimizer, bucket_mb=bucket_mb, **options)
        for bucket in self.buckets:
            for param, place in bucket.place_of.items():
                if bucket.grad_of[param] is None:
                    param.register_post_accumulate_grad_hook(weak_hook(self.on_gradient, bucket, place))
                else:
                    param.register_hook(weak_hook(self.before_gradient))
                    param.register_post_accumulate_grad_hook(weak_hook(self.after_gradient, bucket))

    def before_gradient(self, gradient):
        """Autograd has a gradient. A backward adds it to the bucket next; `torch.autograd.grad` does not."""
        self.backward_began()

    def after_gradient(self, bucket, param):
        """Autograd has added the gradient to the bucket."""
        bucket.used.add(param)

    def on_gradient(self, bucket, place, param):
        """`param.grad` is finished, and has to move to its place in the bucket."""
        self.backward_began()
        bucket.used.add(param)
        place.add_(bucket.take_gradient(param))

    def finish_reduction(self):
        works = [self.start_reduce(bucket) for bucket in self.buckets]
        for bucket, work in zip(self.buckets, works):
            work.wait()
            self.finish_reduce(bucket)

    def start_reduce(self, bucket):
        if bucket.divide_first > 1:
            bucket.gradient /= bucket.divide_first
        return super().start_reduce(bucket)

    def finish_reduce(self, bucket):
        bucket.gradient /= bucket.divide_last
        self.deliver(bucket, bucket.gradient[bucket.own])

    def deliver(self, bucket, own):
        """`own` is this rank's part of the mean over the ranks that shard."""
        replicas.average_over(self.options.replicas, own)
        bucket.shard.grad = to_optimizer(bucket, own, bucket.earlier)
        bucket.earlier = None
