"""Solutions and mistakes for the exercise `zero2`: see the docstring of this package."""

import torch
import torch.distributed as dist

from zero1 import Bucket
from zero2 import Reduction, check_complete, check_gradient, reduce_scatter, take_gradients


class Solution:
    class Reduction:
        def lay_out_gradients(self):
            return self.bucket.lay_out(take_gradients(self.bucket), self.bucket.flat.dtype)

        def start(self):
            group = self.bucket.group
            self.work = dist.reduce_scatter_single(self.shard, self.flat, group=group, async_op=True)

        def finish(self):
            self.work.wait()
            del self.flat
            self.average()
            self.deliver()

        def average(self):
            self.shard.div_(self.bucket.world_size)

        def deliver(self):
            previous = self.bucket.shard.grad
            self.bucket.shard.grad = self.shard if previous is None else previous + self.shard

    def take_gradients(bucket):
        for param in bucket.params:
            gradient = param.grad
            param.grad = None
            yield gradient

    class ZeRO2:
        def send(self, bucket):
            self.receive()
            self.in_flight = self.make_reduction(bucket)
            self.in_flight.start()

        def receive(self):
            previous, self.in_flight = self.in_flight, None
            if previous is not None:
                previous.finish()

        def send_complete(self):
            for index, bucket in enumerate(self.buckets):
                if index == self.turn and not bucket.missing:
                    self.send(bucket)
                    self.turn += 1

        def on_gradient(self, param):
            if self.turn >= len(self.buckets):
                self.expect_gradients()
            bucket = self.bucket_of[param]
            check_gradient(bucket, param)
            bucket.missing.discard(param)
            self.send_complete()

        def expect_gradients(self):
            for bucket in self.buckets:
                bucket.missing = {param for param in bucket.params}
            self.turn = 0

        def reduce_gradients(self):
            self.receive()
            check_complete(self.buckets)


# Other correct ways.


class DivideBeforeTheSum:
    """As DDP does."""

    class Reduction:
        def start(self):
            self.flat /= self.bucket.world_size
            self.work = reduce_scatter(self.shard, self.flat, group=self.bucket.group, async_op=True)

        def finish(self):
            self.work.wait()
            self.flat = None
            self.deliver()

        def average(self):
            pass


class EverythingInFinish:
    class Reduction:
        def finish(self):
            self.work.wait()
            self.flat = self.work = None
            mean = self.shard / self.bucket.world_size
            shard = self.bucket.shard
            if shard.grad is not None:
                mean += shard.grad
            shard.grad = self.shard = mean


class ListOfParts:
    class Reduction:
        def start(self):
            parts = list(self.flat.split(self.bucket.shard_numel))
            self.work = dist.reduce_scatter(self.shard, parts, group=self.bucket.group, async_op=True)


class LayOutByHand:
    class Reduction:
        def lay_out_gradients(self):
            flat = torch.zeros_like(self.bucket.flat) if self.bucket.flat.untyped_storage().nbytes() else None
            for index, param in enumerate(self.bucket.params):
                self.bucket.place(flat, index).copy_(param.grad)
                param.grad = None
            return flat


class ReceiveInline:
    class ZeRO2:
        def send(self, bucket):
            if self.in_flight is not None:
                self.in_flight.finish()
                self.in_flight = None
            self.in_flight = Reduction(bucket)
            self.in_flight.start()

        def receive(self):
            if self.in_flight:
                self.in_flight.finish()
            self.in_flight = None


class SliceOfTheRest:
    class ZeRO2:
        def send_complete(self):
            for bucket in self.buckets[self.turn :]:
                if len(bucket.missing) > 0:
                    return
                self.turn += 1
                self.send(bucket)


class ExpectInline:
    class ZeRO2:
        def on_gradient(self, param):
            if self.turn == len(self.buckets):
                self.turn = 0
                for bucket in self.buckets:
                    bucket.missing = set(bucket.params)
            check_gradient(self.bucket_of[param], param)
            self.bucket_of[param].missing -= {param}
            self.send_complete()


class RefuseByHand:
    class ZeRO2:
        def reduce_gradients(self):
            if self.in_flight is not None:
                self.in_flight.finish()
                self.in_flight = None
            if any(bucket.missing for bucket in self.buckets):
                raise RuntimeError("some parameters have no gradient")


# Mistakes.


class GradientsStay:
    found = "no gradient here"

    class Reduction:
        def lay_out_gradients(self):
            return self.bucket.lay_out([param.grad for param in self.bucket.params], self.bucket.flat.dtype)


class WrongPlaces:
    found = "what lay_out_gradients returns"

    class Reduction:
        def lay_out_gradients(self):
            flat = torch.cat([gradient.flatten() for gradient in take_gradients(self.bucket)])
            return torch.cat([flat, flat.new_zeros(self.bucket.numel - flat.numel())])


class NothingIsCopied:
    found = "what lay_out_gradients returns"

    class Reduction:
        def lay_out_gradients(self):
            for _ in take_gradients(self.bucket):
                pass
            return torch.zeros(self.bucket.numel, dtype=self.bucket.flat.dtype)


class InBfloat16:
    found = "torch.bfloat16"

    class Reduction:
        def lay_out_gradients(self):
            return self.bucket.lay_out(take_gradients(self.bucket), torch.bfloat16)


class TwoCopies:
    found = "bytes alive"

    class Reduction:
        def lay_out_gradients(self):
            flat = self.bucket.lay_out([param.grad for param in self.bucket.params], self.bucket.flat.dtype)
            Bucket.kept = [*getattr(Bucket, "kept", []), [param.grad for param in self.bucket.params]]
            for _ in take_gradients(self.bucket):
                pass
            return flat


class Synchronous:
    found = "async_op=True?"

    class Reduction:
        def start(self):
            self.work = reduce_scatter(self.shard, self.flat, group=self.bucket.group)


class AnAllReduce:
    found = "found all-reduce"

    class Reduction:
        def start(self):
            self.work = dist.all_reduce(self.flat, group=self.bucket.group, async_op=True)


class ChangedWhileItTravels:
    found = "self.flat"

    class Reduction:
        def start(self):
            self.work = reduce_scatter(self.shard, self.flat, group=self.bucket.group, async_op=True)
            self.flat.zero_()


class WholeGradientsStay:
    found = "bytes alive after"

    class Reduction:
        def finish(self):
            self.work.wait()
            self.average()
            self.deliver()


class WholeGradientsStayElsewhere:
    found = "bytes alive after"

    class Reduction:
        def finish(self):
            self.work.wait()
            Reduction.kept = [*getattr(Reduction, "kept", []), self.flat]
            self.flat = None
            self.average()
            self.deliver()


class NobodyWaits:
    found = "in flight"

    class Reduction:
        def finish(self):
            self.flat = None
            self.average()
            self.deliver()


class TheLastBackwardCounts:
    found = "shard.grad after call"

    class Reduction:
        def deliver(self):
            self.bucket.shard.grad = self.shard


class SummedNotAveraged:
    found = "summed, not averaged"

    class Reduction:
        def average(self):
            pass


class DividedTwice:
    found = "divided by N twice"

    class Reduction:
        def start(self):
            self.flat /= self.bucket.world_size
            self.work = reduce_scatter(self.shard, self.flat, group=self.bucket.group, async_op=True)


class AllInFlight:
    found = "in flight"

    class ZeRO2:
        def send(self, bucket):
            self.sent = getattr(self, "sent", [])
            self.in_flight = self.make_reduction(bucket)
            self.in_flight.start()
            self.sent.append(self.in_flight)

        def receive(self):
            for reduction in getattr(self, "sent", []):
                reduction.finish()
            self.sent, self.in_flight = [], None


class ReceivedAtOnce:
    found = "in flight after those of call"

    class ZeRO2:
        def send(self, bucket):
            self.in_flight = self.make_reduction(bucket)
            self.in_flight.start()
            self.receive()


class ReceivedTooLate:
    found = "bytes alive"

    class ZeRO2:
        def send(self, bucket):
            previous, self.in_flight = self.in_flight, self.make_reduction(bucket)
            if previous is not None:
                previous.finish()
            self.in_flight.start()


class InTheOrderOfThisRank:
    found = "in send_complete"

    class ZeRO2:
        def send_complete(self):
            sent = getattr(self, "sent", set()) if self.turn else set()
            for bucket in self.buckets:
                if not bucket.missing and bucket not in sent:
                    self.send(bucket)
                    sent.add(bucket)
                    self.turn += 1
            self.sent = sent


class AllAtTheEnd:
    found = "collectives"

    class ZeRO2:
        def send_complete(self):
            if not any(bucket.missing for bucket in self.buckets):
                for bucket in self.buckets:
                    self.send(bucket)
                self.turn = len(self.buckets)


class LeavesOutPaddingBuckets:
    found = "collectives"

    class ZeRO2:
        def send_complete(self):
            while self.turn < len(self.buckets) and not self.buckets[self.turn].missing:
                if self.buckets[self.turn].shard.any():
                    self.send(self.buckets[self.turn])
                self.turn += 1


class NoTurns:
    found = "self.turn"

    class ZeRO2:
        def send_complete(self):
            for bucket in self.buckets:
                if not bucket.missing:
                    self.send(bucket)


class NothingIsRemoved:
    found = "of on_gradient"

    class ZeRO2:
        def on_gradient(self, param):
            if self.turn == len(self.buckets):
                self.expect_gradients()
            check_gradient(self.bucket_of[param], param)
            self.send_complete()


class OneBackwardOnly:
    found = "RuntimeError"

    class ZeRO2:
        def on_gradient(self, param):
            bucket = self.bucket_of[param]
            check_gradient(bucket, param)
            bucket.missing.remove(param)
            self.send_complete()


class BucketIsCompleteAtItsFirstGradient:
    found = "TypeError"

    class ZeRO2:
        def on_gradient(self, param):
            if self.turn == len(self.buckets):
                self.expect_gradients()
            bucket = self.bucket_of[param]
            bucket.missing = set()
            self.send_complete()


class NothingIsRefused:
    found = "if a parameter gets no gradient"

    class ZeRO2:
        def reduce_gradients(self):
            self.receive()


class MissingLookedForInOneBucket:
    found = "if a parameter gets no gradient"

    class ZeRO2:
        def reduce_gradients(self):
            self.receive()
            check_complete(self.buckets[:1])


class MissingOnlyIfAllOfABucketAre:
    found = "if a part of a bucket gets no gradient"

    class ZeRO2:
        def reduce_gradients(self):
            self.receive()
            for bucket in self.buckets:
                if len(bucket.missing) == len(bucket.params):
                    raise RuntimeError("a bucket has no gradients")


class LastBucketIsNotReceived:
    found = "in flight"

    class ZeRO2:
        def reduce_gradients(self):
            check_complete(self.buckets)
