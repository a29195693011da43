"""Solutions and mistakes for the exercise `zero1`: see the docstring of this package."""

import torch
import torch.distributed as dist

from zero1 import all_gather, broadcast_whole, gather_parameters, round_up


class Solution:
    class Bucket:
        def __init__(self, named_params, group):
            self.names, self.params = zip(*named_params)
            self.group = group
            self.world_size = dist.get_world_size(group)
            align = self.alignment()
            sizes = [(param.numel() + align - 1) // align * align for param in self.params]
            self.offsets = [sum(sizes[:index]) for index in range(len(sizes))]
            units = max(1, (sum(sizes) + self.world_size * align - 1) // (self.world_size * align))
            self.shard_numel = units * align
            self.numel = self.world_size * self.shard_numel
            rank = dist.get_rank(group)
            self.own = slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)
            self.flat = self.flatten()
            self.shard = self.make_shard().requires_grad_(self.params[0].requires_grad)
            self.gradient = None
            self.missing = set()

        def flatten(self):
            buffer = self.params[0].new_zeros(self.numel)
            for param, begin in zip(self.params, self.offsets):
                view = buffer[begin : begin + param.numel()].reshape(param.shape)
                view.copy_(param)
                param.data = view
            broadcast_whole([buffer], self.group)
            return buffer

        def lay_out(self, tensors, dtype):
            buffer = self.params[0].new_zeros(self.numel, dtype=dtype)
            for begin, tensor in zip(self.offsets, tensors):
                buffer[begin : begin + tensor.numel()] = tensor.flatten()
            return buffer

        def place(self, flat, index):
            return flat.narrow(0, self.offsets[index], self.params[index].numel()).view_as(self.params[index])

        def make_shard(self):
            return self.flat.detach()[self.own]

        def make_gradient(self):
            self.gradient = self.flat.new_zeros(self.numel)
            self.grads = []
            for index, _ in enumerate(self.params):
                self.grads.append(self.place(self.gradient, index))

        def gather(self):
            return dist.all_gather_single(self.flat, self.shard.detach(), group=self.group, async_op=True)

    class ZeRO1:
        def start_reduce(self, bucket):
            return dist.all_reduce(bucket.gradient, group=self.group, async_op=True)

        def finish_reduce(self, bucket):
            mine = bucket.gradient[bucket.own]
            mine /= self.world_size
            bucket.shard.grad = mine

        def reduce_gradients(self):
            self.check_gradients()
            works = []
            for bucket in self.buckets:
                works.append(self.start_reduce(bucket))
            for index, work in enumerate(works):
                work.wait()
                self.finish_reduce(self.buckets[index])
            self.reduced = True

        def step(self):
            self.reduce_gradients()
            self.optimizer.step()
            gather_parameters(self.buckets)

    def gather_parameters(buckets):
        works = []
        for bucket in buckets:
            works.append(bucket.gather())
        for work in works:
            work.wait()


# Other correct ways.


class DivideBeforeTheSum:
    """As DDP does."""

    class ZeRO1:
        def start_reduce(self, bucket):
            bucket.gradient /= self.world_size
            return dist.all_reduce(bucket.gradient, group=self.group, async_op=True)

        def finish_reduce(self, bucket):
            bucket.shard.grad = bucket.gradient[bucket.own]


class DivideEverything:
    class ZeRO1:
        def finish_reduce(self, bucket):
            bucket.gradient *= 1 / self.world_size
            bucket.shard.grad = bucket.gradient.view(self.world_size, -1)[dist.get_rank(self.group)]


class AverageInTheCollective:
    class ZeRO1:
        def reduce_gradients(self):
            self.check_gradients()
            works = {}
            for bucket in self.buckets:
                works[bucket] = dist.all_reduce(bucket.gradient, group=self.group, async_op=True)
            for bucket, work in reversed(works.items()):
                work.wait()
                bucket.gradient.div_(self.world_size)
                bucket.shard.grad = bucket.gradient[bucket.own]
            self.reduced = True


class LayOutWithALoop:
    class Bucket:
        def __init__(self, named_params, group):
            self.names, self.params = zip(*named_params)
            self.group = group
            self.world_size = dist.get_world_size(group)
            align = self.alignment()
            self.offsets, end = [], 0
            for param in self.params:
                self.offsets += [end]
                end += param.numel()
                while end % align:
                    end += 1
            self.numel = max(end, 1)
            while self.numel % (align * self.world_size):
                self.numel += 1
            self.shard_numel = self.numel // self.world_size
            begin = self.shard_numel * dist.get_rank(group)
            self.own = slice(begin, begin + self.shard_numel)
            self.flat = self.flatten()
            self.shard = self.make_shard().requires_grad_(self.params[0].requires_grad)
            self.gradient = None
            self.missing = set()


class LayOutByTheChaptersFunctions:
    class Bucket:
        def flatten(self):
            flat = self.lay_out([param.detach() for param in self.params], self.params[0].dtype)
            broadcast_whole([flat], self.group)
            for index, param in enumerate(self.params):
                param.data = self.place(flat, index)
            return flat

        def make_shard(self):
            begin = dist.get_rank(self.group) * self.shard_numel
            return self.flat.narrow(0, begin, self.shard_numel)

        def make_gradient(self):
            self.gradient = torch.zeros_like(self.flat)
            self.grads = [self.place(self.gradient, index) for index in range(len(self.offsets))]


class GatherIntoPieces:
    class Bucket:
        def gather(self):
            parts = list(self.flat.split(self.shard_numel))
            return dist.all_gather(parts, self.shard.detach(), group=self.group, async_op=True)


class WaitInAnyOrder:
    class ZeRO1:
        def step(self):
            self.reduce_gradients()
            self.optimizer.step()
            works = [bucket.gather() for bucket in self.buckets]
            for work in reversed(works):
                work.wait()

    def gather_parameters(buckets):
        for work in [bucket.gather() for bucket in buckets][::-1]:
            work.wait()


# Mistakes.


class NoRoomBetweenParameters:
    found = "self.offsets[1]"

    class Bucket:
        def __init__(self, named_params, group):
            self.names, self.params = zip(*named_params)
            self.group = group
            self.world_size = dist.get_world_size(group)
            align = self.alignment()
            self.offsets = []
            end = 0
            for param in self.params:
                self.offsets.append(end)
                end += param.numel()
            self.shard_numel = round_up(-(-max(end, 1) // self.world_size), align)
            self.numel = self.shard_numel * self.world_size
            start = dist.get_rank(group) * self.shard_numel
            self.own = slice(start, start + self.shard_numel)
            self.flat = self.flatten()
            self.shard = self.make_shard().requires_grad_(self.params[0].requires_grad)
            self.gradient = None
            self.missing = set()


class RoundedDown:
    found = "self.shard_numel"

    class Bucket:
        def __init__(self, named_params, group):
            self.names, self.params = zip(*named_params)
            self.group = group
            self.world_size = dist.get_world_size(group)
            align = self.alignment()
            self.offsets = []
            end = 0
            for param in self.params:
                self.offsets.append(end)
                end += round_up(param.numel(), align)
            self.shard_numel = max(end // self.world_size // align, 1) * align
            self.numel = self.shard_numel * self.world_size
            start = dist.get_rank(group) * self.shard_numel
            self.own = slice(start, start + self.shard_numel)
            self.flat = self.flatten()
            self.shard = self.make_shard().requires_grad_(self.params[0].requires_grad)
            self.gradient = None
            self.missing = set()


class TooMuchPadding:
    found = "self.shard_numel"

    class Bucket:
        def __init__(self, named_params, group):
            self.names, self.params = zip(*named_params)
            self.group = group
            self.world_size = dist.get_world_size(group)
            align = self.alignment()
            self.offsets = []
            end = 0
            for param in self.params:
                self.offsets.append(end)
                end += round_up(param.numel(), align)
            self.shard_numel = round_up(end, align)
            self.numel = self.shard_numel * self.world_size
            start = dist.get_rank(group) * self.shard_numel
            self.own = slice(start, start + self.shard_numel)
            self.flat = self.flatten()
            self.shard = self.make_shard().requires_grad_(self.params[0].requires_grad)
            self.gradient = None
            self.missing = set()


class EmptyShards:
    """`max(end, 1)` is left out."""

    found = "a bucket's only parameter has no elements"

    class Bucket:
        def __init__(self, named_params, group):
            self.names, self.params = zip(*named_params)
            self.group = group
            self.world_size = dist.get_world_size(group)
            align = self.alignment()
            self.offsets = []
            end = 0
            for param in self.params:
                self.offsets.append(end)
                end += round_up(param.numel(), align)
            self.shard_numel = round_up(-(-end // self.world_size), align)
            self.numel = self.shard_numel * self.world_size
            start = dist.get_rank(group) * self.shard_numel
            self.own = slice(start, start + self.shard_numel)
            self.flat = self.flatten()
            self.shard = self.make_shard().requires_grad_(self.params[0].requires_grad)
            self.gradient = None
            self.missing = set()


class RankAmongAll:
    found = "in a group of one rank"

    class Bucket:
        def __init__(self, named_params, group):
            self.names, self.params = zip(*named_params)
            self.group = group
            self.world_size = dist.get_world_size(group)
            align = self.alignment()
            self.offsets = []
            end = 0
            for param in self.params:
                self.offsets.append(end)
                end += round_up(param.numel(), align)
            self.shard_numel = round_up(-(-max(end, 1) // self.world_size), align)
            self.numel = self.shard_numel * self.world_size
            start = dist.get_rank() * self.shard_numel
            self.own = slice(start, start + self.shard_numel)
            self.flat = self.flatten()
            self.shard = self.make_shard().requires_grad_(self.params[0].requires_grad)
            self.gradient = None
            self.missing = set()


class WeightsStayWhereTheyWere:
    found = "the memory of self.params[0]"

    class Bucket:
        def flatten(self):
            flat = self.lay_out(self.params, self.params[0].dtype)
            broadcast_whole([flat], self.group)
            return flat


class EachRankKeepsItsOwnWeights:
    found = "collectives of call 1 of flatten"

    class Bucket:
        def flatten(self):
            flat = self.lay_out(self.params, self.params[0].dtype)
            for index, param in enumerate(self.params):
                param.data = self.place(flat, index)
            return flat


class PaddingIsNotZero:
    found = "what is sent in the broadcast"

    class Bucket:
        def lay_out(self, tensors, dtype):
            flat = torch.ones(self.numel, dtype=dtype)
            for index, tensor in enumerate(tensors):
                self.place(flat, index).copy_(tensor)
            return flat

        def flatten(self):
            flat = self.lay_out(self.params, self.params[0].dtype)
            for index, param in enumerate(self.params):
                param.data = self.place(flat, index)
            broadcast_whole([flat], self.group)
            return flat


class ShardIsACopy:
    found = "what make_shard returns"

    class Bucket:
        def make_shard(self):
            return self.flat[self.own].clone()


class GradientsAreNotInTheBuffer:
    found = "self.grads[0]"

    class Bucket:
        def make_gradient(self):
            self.gradient = torch.zeros_like(self.flat)
            self.grads = [torch.zeros_like(param) for param in self.params]


class SummedNotAveraged:
    found = "summed, not averaged"

    class ZeRO1:
        def finish_reduce(self, bucket):
            bucket.shard.grad = bucket.gradient[bucket.own]


class DividedTwice:
    found = "divided by N twice"

    class ZeRO1:
        def start_reduce(self, bucket):
            bucket.gradient /= self.world_size
            return dist.all_reduce(bucket.gradient, group=self.group, async_op=True)

        def finish_reduce(self, bucket):
            bucket.gradient /= self.world_size
            bucket.shard.grad = bucket.gradient[bucket.own]


class DividedByAllRanks:
    found = "in a group of one rank"

    class ZeRO1:
        def finish_reduce(self, bucket):
            bucket.gradient /= dist.get_world_size()
            bucket.shard.grad = bucket.gradient[bucket.own]


class ReducedInTheDefaultGroup:
    found = "the group of a collective"

    class ZeRO1:
        def start_reduce(self, bucket):
            return dist.all_reduce(bucket.gradient, async_op=True)


class AnotherRanksPart:
    found = "shard.grad after call"

    class ZeRO1:
        def finish_reduce(self, bucket):
            bucket.gradient /= self.world_size
            bucket.shard.grad = bucket.gradient[: bucket.shard_numel]


class AWholeCopy:
    found = "bytes alive after call"

    class ZeRO1:
        def finish_reduce(self, bucket):
            bucket.gradient /= self.world_size
            bucket.shard.grad = bucket.gradient.clone()[bucket.own]


class WaitedForAtOnce:
    found = "before the next is started"

    class ZeRO1:
        def start_reduce(self, bucket):
            work = dist.all_reduce(bucket.gradient, group=self.group, async_op=True)
            work.wait()
            return work


class OneAfterTheOther:
    found = "before the next is started"

    class ZeRO1:
        def reduce_gradients(self):
            self.check_gradients()
            for bucket in self.buckets:
                self.start_reduce(bucket).wait()
                self.finish_reduce(bucket)
            self.reduced = True


class NobodyWaits:
    found = "in flight"

    class ZeRO1:
        def reduce_gradients(self):
            self.check_gradients()
            for bucket in self.buckets:
                self.start_reduce(bucket)
                self.finish_reduce(bucket)
            self.reduced = True


class NothingIsChecked:
    found = "if a param.grad was replaced"

    class ZeRO1:
        def reduce_gradients(self):
            works = [self.start_reduce(bucket) for bucket in self.buckets]
            for bucket, work in zip(self.buckets, works):
                work.wait()
                self.finish_reduce(bucket)
            self.reduced = True


class CheckedAfterTheFirstSend:
    found = "if a param.grad was replaced"

    class ZeRO1:
        def reduce_gradients(self):
            works = []
            for bucket in self.buckets:
                works.append(self.start_reduce(bucket))
                self.check_gradients()
            for bucket, work in zip(self.buckets, works):
                work.wait()
                self.finish_reduce(bucket)
            self.reduced = True


class MissingLookedForInOneBucket:
    found = "if a param.grad was replaced"

    class ZeRO1:
        def reduce_gradients(self):
            first = self.buckets[0]
            if any(param.grad is not grad for param, grad in zip(first.params, first.grads)):
                raise RuntimeError("a gradient was replaced")
            works = [self.start_reduce(bucket) for bucket in self.buckets]
            for bucket, work in zip(self.buckets, works):
                work.wait()
                self.finish_reduce(bucket)
            self.reduced = True


class MissingOnlyIfAllOfABucketAre:
    found = "if a param.grad was replaced"

    class ZeRO1:
        def reduce_gradients(self):
            for bucket in self.buckets:
                if all(param.grad is not grad for param, grad in zip(bucket.params, bucket.grads)):
                    raise RuntimeError("all gradients of a bucket were replaced")
            works = [self.start_reduce(bucket) for bucket in self.buckets]
            for bucket, work in zip(self.buckets, works):
                work.wait()
                self.finish_reduce(bucket)
            self.reduced = True


class LeavesOutPaddingBuckets:
    found = "waits in"

    class ZeRO1:
        def reduce_gradients(self):
            self.check_gradients()
            mine = [bucket for bucket in self.buckets if bucket.shard.any()]
            works = [self.start_reduce(bucket) for bucket in mine]
            for bucket, work in zip(mine, works):
                work.wait()
                self.finish_reduce(bucket)
            self.reduced = True


class GatheredInTheDefaultGroup:
    found = "the group of a collective"

    class Bucket:
        def gather(self):
            return all_gather(self.flat, self.shard.detach(), async_op=True)


class GatherIsWaitedFor:
    found = "not started with async_op=True"

    class Bucket:
        def gather(self):
            work = all_gather(self.flat, self.shard.detach(), group=self.group, async_op=True)
            work.wait()
            return work


class GatherReturnsNothing:
    found = "is a return missing"

    class Bucket:
        def gather(self):
            self.work = all_gather(self.flat, self.shard.detach(), group=self.group, async_op=True)


class GatheredIntoANewBuffer:
    found = "is it a new tensor?"

    class Bucket:
        def gather(self):
            self.flat = torch.empty_like(self.flat)
            return all_gather(self.flat, self.shard.detach(), group=self.group, async_op=True)


class SendsZeros:
    found = "what is sent in"

    class Bucket:
        def gather(self):
            return all_gather(self.flat, torch.zeros_like(self.shard), group=self.group, async_op=True)


class GathersOneAfterTheOther:
    found = "in flight"

    def gather_parameters(buckets):
        for bucket in buckets:
            bucket.gather().wait()


class GathersAndDoesNotWait:
    found = "in flight"

    def gather_parameters(buckets):
        for bucket in buckets:
            bucket.gather()


class UpdatesBeforeReducing:
    found = "RuntimeError"

    class ZeRO1:
        def step(self):
            self.optimizer.step()
            self.reduce_gradients()
            gather_parameters(self.buckets)


class DoesNotUpdate:
    found = "what is sent in the"

    class ZeRO1:
        def step(self):
            self.reduce_gradients()
            gather_parameters(self.buckets)


class DoesNotGather:
    found = "collectives"

    class ZeRO1:
        def step(self):
            self.reduce_gradients()
            self.optimizer.step()
