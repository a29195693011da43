"""in different orders"""

import torch.distributed as dist

from zero1 import ZeRO1


class Engine(ZeRO1):
    def __init__(self, model, optimizer, *, bucket_mb=None, group=None):
        super().__init__(model, optimizer, bucket_mb=bucket_mb, group=group)
        self.sent = []
        self.left = {bucket: len(bucket.params) for bucket in self.buckets}
        for bucket in self.buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(lambda param, bucket=bucket: self.one_less(bucket))

    def one_less(self, bucket):
        self.left[bucket] -= 1
        if self.left[bucket] == 0:
            gradient = bucket.gradient.clone()
            bucket.gradient.zero_()
            self.left[bucket] = len(bucket.params)
            self.sent.append((bucket, gradient, dist.all_reduce(gradient, group=self.group, async_op=True)))

    def reduce_gradients(self):
        for bucket, gradient, work in self.sent:
            work.wait()
            mean = gradient[bucket.own] / self.world_size
            bucket.shard.grad = mean if bucket.shard.grad is None else bucket.shard.grad + mean
        self.sent = []
