"""the weights after two steps of two backwards each"""

import torch.distributed as dist

from zero1 import ZeRO1


class Engine(ZeRO1):
    def __init__(self, model, optimizer, *, bucket_mb=None, group=None):
        super().__init__(model, optimizer, bucket_mb=bucket_mb, group=group)
        self.sent = []
        for bucket in self.buckets:
            bucket.missing = set(bucket.params)
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(lambda param, bucket=bucket: self.on_gradient(bucket, param))

    def on_gradient(self, bucket, param):
        bucket.missing.discard(param)
        while len(self.sent) < len(self.buckets) and not self.buckets[len(self.sent)].missing:
            gradient = self.buckets[len(self.sent)].gradient
            self.sent.append(dist.all_reduce(gradient, group=self.group, async_op=True))

    def reduce_gradients(self):
        for bucket, work in zip(self.buckets, self.sent):
            work.wait()
            bucket.gradient /= self.world_size
            bucket.shard.grad = bucket.gradient[bucket.own]
            bucket.missing = set(bucket.params)
        self.sent = []
