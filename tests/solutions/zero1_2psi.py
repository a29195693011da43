"""Solutions and mistakes for the exercise `zero1_2psi`: see the docstring of this package."""

import torch
import torch.distributed as dist


class Solution:
    class ZeRO1:
        def start_reduce(self, bucket):
            bucket.mean = bucket.gradient.new_empty(bucket.shard_numel)
            return dist.reduce_scatter_single(bucket.mean, bucket.gradient, group=self.group, async_op=True)

        def finish_reduce(self, bucket):
            bucket.shard.grad = bucket.mean / self.world_size
            bucket.mean = None


class IntoItsOwnPart:
    class ZeRO1:
        def start_reduce(self, bucket):
            own = bucket.gradient[bucket.own]
            return dist.reduce_scatter_single(own, bucket.gradient, group=self.group, async_op=True)

        def finish_reduce(self, bucket):
            bucket.shard.grad = bucket.gradient[bucket.own].div_(self.world_size)


class ListOfParts:
    class ZeRO1:
        def start_reduce(self, bucket):
            bucket.shard.grad = torch.zeros_like(bucket.shard)
            parts = list(bucket.gradient.split(bucket.shard_numel))
            return dist.reduce_scatter(bucket.shard.grad, parts, group=self.group, async_op=True)

        def finish_reduce(self, bucket):
            bucket.shard.grad.div_(self.world_size)


class DivideBeforeTheSum:
    class ZeRO1:
        def start_reduce(self, bucket):
            bucket.gradient.div_(self.world_size)
            bucket.shard.grad = torch.empty_like(bucket.shard)
            return dist.reduce_scatter_single(bucket.shard.grad, bucket.gradient, group=self.group, async_op=True)

        def finish_reduce(self, bucket):
            pass


class SummedNotAveraged:
    found = "summed, not averaged"

    class ZeRO1:
        def finish_reduce(self, bucket):
            bucket.shard.grad = bucket.mean


class StillAnAllReduce:
    found = "all-reduce"

    class ZeRO1:
        def start_reduce(self, bucket):
            bucket.mean = bucket.gradient[bucket.own]
            return dist.all_reduce(bucket.gradient, group=self.group, async_op=True)


class ChangedWhileItTravels:
    found = "changed or freed before the wait"

    class ZeRO1:
        def start_reduce(self, bucket):
            bucket.mean = torch.empty_like(bucket.shard)
            work = dist.reduce_scatter_single(bucket.mean, bucket.gradient, group=self.group, async_op=True)
            bucket.gradient.mul_(1)
            return work


class LeavesOutPaddingBuckets:
    found = "collectives"

    class ZeRO1:
        def start_reduce(self, bucket):
            bucket.mean = torch.zeros_like(bucket.shard)
            if not bucket.shard.any():

                class Nothing:
                    def wait(self):
                        pass

                return Nothing()
            return dist.reduce_scatter_single(bucket.mean, bucket.gradient, group=self.group, async_op=True)
