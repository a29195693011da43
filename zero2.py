"""ZeRO-2: every rank keeps 1/N of the gradients as well.

A rank updates its shard only. Once the gradients of all ranks are summed, it has no use for those of the other shards.
So it should never hold all of them at once. As soon as backward has finished the last gradient of a bucket, ZeRO-2
sends the bucket in a reduce-scatter. The rank keeps 1/N of the sum. Its own, **whole** gradients are freed when the
next bucket is sent, or, for the last one, in `step()`.

                       rank 0       rank 1       rank 2       rank 3
    parameters       [########]   [########]   [########]   [########]
    gradients        [##      ]   [  ##    ]   [    ##  ]   [      ##]
    optimizer state  [##      ]   [  ##    ]   [    ##  ]   [      ##]

Per rank, in bytes (float32 and AdamW, one backward per step), and sent per step, in elements:

    memory   4Ψ parameters + 4Ψ/N gradients + 8Ψ/N optimizer state     (7e9 parameters, N = 8: 38.5 GB)
    peak     4Ψ + 12Ψ/N + (2 - 1/N) B, for equal buckets of B bytes; without activations, late in backward
    sent     Ψ reduce-scatter + Ψ all-gather = 2Ψ, as under DDP

Right before the last bucket is sent two have whole gradients: the one that backward is finishing, and the one in
flight. The former has no gradient shard yet, so B/N is subtracted. Smaller buckets mean a lower peak and more
collectives. Activations are added, but they are largest early in backward, when there are hardly any gradients yet. So
the peak of gradients and activations together comes early as a rule, and is less than the sum of their two peaks.

ZeRO-2 sends less than the ZeRO-1 of chapter 1, because an all-reduce is a reduce-scatter and an all-gather in one, and
here the all-gather brings parameters and not gradients.

A simple version keeps all gradients until backward is over; the article says that its own does. To do better,
step 3 must run inside step 2. Buckets are counted from the last layer, which backward reaches first:

    backward     | layer 2's gradients | layer 1's gradients | layer 0's gradients |
    in flight                          | bucket 0 (layer 2)  | bucket 1 (layer 1)  | bucket 2 (layer 0) |

The words, `Bucket` and step 5 are those of zero1.py. What changes from there: ./launch.sh changes zero1 zero2. Paper:
ZeRO, sections 5.2 "P_os+g" and 7. Article: "AI in Multiple GPUs", which names `ZeRO_2`. Run it: ./launch.sh zero2 2
"""

import torch
import torch.distributed as dist
from torch.profiler import record_function

from zero1 import Bucket, by_size, gather_parameters, over_pieces, share_the_rest

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # before torch 2.13


class Reduction:
    """One bucket's gradients in flight: every rank puts in its whole gradients, and gets its shard of the mean.

    Step 3 of one bucket, in two halves: `__init__` sends, `finish` receives. In between nobody may write into `flat`,
    as the collective still reads it.
    """

    def __init__(self, bucket):
        self.bucket = bucket
        self.flat = torch.zeros_like(bucket.flat)  # new for each bucket: the whole gradients, and zeros for padding
        self.fill()
        self.shard = torch.empty_like(bucket.shard)  # receives this rank's part of the sum
        self.work = reduce_scatter(
            self.shard,
            self.flat,
            group=bucket.group,
            async_op=True,  # only start it
        )

    def fill(self):
        """All gradients are copied to their places, and no `param.grad` is left."""
        bucket = self.bucket
        for index in range(len(bucket.params)):
            place = bucket.place(self.flat, index)
            place.copy_(bucket.take_gradient(index))

    def finish(self):
        """The sum is there: hand this rank's part of the mean to the optimizer."""
        self.work.wait()
        self.flat = None  # the whole gradients are gone, 1/N is left. (On a GPU who uses this memory next is queued.)
        self.shard /= self.bucket.world_size
        parts = self.bucket.cut(self.shard)
        for piece, part in zip(self.bucket.pieces, parts):
            if piece.grad is None:
                piece.grad = part  # a view, no copy
            else:
                piece.grad += part  # of a later backward before the same step


class ZeRO2:
    """Data-parallel training of `model` with optimizer state and gradients cut into N.

    Arguments, what it trains and what it cannot see are ZeRO-1's. With k backwards before a step a rank sends kΨ
    gradients and Ψ parameters. (`ZeRO2Engine` has `no_sync()`: 2Ψ for any k, and 4Ψ bytes of whole gradients.)
    """

    def __init__(self, model, optimizer_cls, *, bucket_mb=None, group=None):
        self.model = model
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.buckets = self.partition(bucket_mb)
        self.optimizer = over_pieces(optimizer_cls, self.buckets)
        self.in_flight = None  # the `Reduction` that was sent and not received
        self.turn = 0  # the number of the bucket that is sent next
        self.watch_gradients()
        self.zero_grad()

    def partition(self, bucket_mb):
        """Step 0: who owns what."""
        with record_function("step 0 partition"), torch.no_grad():
            share_the_rest(self.model, self.group)
            return [Bucket(run, self.group) for run in by_size(self.model, bucket_mb)]

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def training_step(self, inputs, targets, loss_fn):
        """One whole step on this rank's batch. Returns this rank's loss, 0-d and detached."""
        with record_function("step 1 forward"):
            loss = loss_fn(self(inputs), targets)
        with record_function("step 2 backward"):
            loss.backward()  # and step 3 inside it: autograd calls `on_gradient`, which sends bucket by bucket
        self.step()
        self.zero_grad()
        return loss.detach()

    def step(self):
        """The end of step 3, and steps 4 and 5: from reduced gradients to updated parameters on every rank."""
        with record_function("step 3 reduce gradients"):
            self.reduce_gradients()
        with record_function("step 4 update the shard"):
            self.optimizer.step()
        with record_function("step 5 gather parameters"):
            gather_parameters(self.buckets)

    def reduce_gradients(self):
        """The end of step 3: receive the last bucket."""
        self.receive()
        for bucket in self.buckets:
            bucket.require_gradients()

    def zero_grad(self):
        """Drop all gradients, also those of a backward that did not finish. Call it after `step()`."""
        self.receive()  # else the next step would receive it, and add it
        self.begin_backward()
        for bucket in self.buckets:
            bucket.drop_gradients()

    def watch_gradients(self):
        """Set up once: autograd calls `on_gradient` whenever it has finished a `param.grad`."""
        for bucket in self.buckets:
            bucket.watch(self.on_gradient)

    def begin_backward(self):
        """All gradients are still to come, and the first bucket is sent next."""
        self.turn = 0
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.params)))

    def on_gradient(self, bucket, index, param):
        """Inside step 2: `param.grad` is finished."""
        if self.turn == len(self.buckets):  # all were sent: this is the first gradient of another backward
            self.begin_backward()
        bucket.missing.remove(index)  # KeyError: an earlier backward was not complete, and no zero_grad() came
        self.send_complete()

    def send_complete(self):
        """Send the buckets whose gradients have all come, and whose turn has.

        A collective carries no name: the third one of this rank meets the third one of every other rank. So buckets are
        sent in one fixed order. Ranks may finish gradients in different orders, for example where a model calls its
        branches in the order in which a rank's own data came. Then a complete bucket waits, and stays whole.
        """
        while self.turn < len(self.buckets) and not self.buckets[self.turn].missing:
            self.send(self.buckets[self.turn])
            self.turn += 1

    def send(self, bucket):
        """Step 3, first half: send one bucket. Backward goes on meanwhile."""
        with record_function("step 3 reduce gradients"):
            # The bucket before has travelled while backward computed this one. It is received first: this frees its
            # gradients before others are copied. If all come in turn, two at most are whole: that is ZeRO-2.
            self.receive()
            self.in_flight = Reduction(bucket)

    def receive(self):
        """Step 3, second half: receive the bucket in flight, if there is one."""
        if self.in_flight is not None:
            self.in_flight.finish()
            self.in_flight = None


# Without `missing` nobody knows when a bucket is complete. Without turns ranks that finish gradients in different
# orders add up different buckets. Without `param.grad = None` all gradients stay whole. Without `receive` in `send` all
# buckets would be in flight at the end of backward, each with its whole gradients.


def main():
    from harness.measure import walkthrough

    walkthrough.run(ZeRO2, __doc__)


if __name__ == "__main__":
    main()
