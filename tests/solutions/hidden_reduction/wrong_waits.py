"""in flight after backward in a step"""

import torch.distributed as dist

from zero1 import ZeRO1


class Engine(ZeRO1):
    def __init__(self, model, optimizer, *, bucket_mb=None, group=None):
        super().__init__(model, optimizer, bucket_mb=bucket_mb, group=group)
        self.works = []
        self.left = {bucket: len(bucket.params) for bucket in self.buckets}
        for bucket in self.buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(lambda param, bucket=bucket: self.one_less(bucket))

    def one_less(self, bucket):
        self.left[bucket] -= 1
        begun = len(self.works) % len(self.buckets)
        for each in self.buckets[begun:]:
            if self.left[each] > 0:
                break
            gradient = each.gradient / self.world_size
            dist.all_reduce(gradient, group=self.group)
            self.works.append((each, gradient))
            each.gradient.zero_()
            self.left[each] = len(each.params)

    def reduce_gradients(self):
        for bucket, gradient in self.works:
            mean = gradient[bucket.own]
            bucket.shard.grad = mean if bucket.shard.grad is None else bucket.shard.grad + mean
        self.works = []
