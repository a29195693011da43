"""What is sent is a copy, so a second backward may add to the buffer meanwhile."""

import torch.distributed as dist

from zero1 import ZeRO1, check_gradients


class Engine(ZeRO1):
    def __init__(self, model, optimizer, *, bucket_mb=None, group=None):
        super().__init__(model, optimizer, bucket_mb=bucket_mb, group=group)
        self.sent = []
        self.expect()
        self.bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}
        for param in self.bucket_of:
            param.register_post_accumulate_grad_hook(self.on_gradient)

    def expect(self):
        self.turn = 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.params)

    def on_gradient(self, param):
        if self.turn == len(self.buckets):
            self.expect()
        self.bucket_of[param].missing.discard(param)
        while self.turn < len(self.buckets) and not self.buckets[self.turn].missing:
            bucket = self.buckets[self.turn]
            gradient = bucket.gradient.clone()
            bucket.gradient.zero_()
            work = dist.all_reduce(gradient, group=self.group, async_op=True)
            self.sent.append((bucket, gradient, work))
            self.turn += 1

    def reduce_gradients(self):
        check_gradients(self.buckets)
        for bucket, gradient, work in self.sent:
            work.wait()
            bucket.gradient += gradient / self.world_size
        for bucket in self.buckets:
            bucket.shard.grad = bucket.gradient[bucket.own]
        self.sent = []
