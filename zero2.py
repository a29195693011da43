"""ZeRO-2: every rank keeps 1/N of the gradients as well.

A rank updates only its shard. Once the gradients of all ranks are summed, it does not need the gradients of the other
shards, so it should never hold all of them at once. As soon as backward has finished the last gradient of a bucket,
ZeRO-2 sends the bucket in a reduce-scatter, which gives rank r only shard r of the sum. The local, whole gradients are
freed.

                       rank 0       rank 1       rank 2       rank 3
    parameters       [########]   [########]   [########]   [########]
    gradients        [##      ]   [  ##    ]   [    ##  ]   [      ##]
    optimizer state  [##      ]   [  ##    ]   [    ##  ]   [      ##]

A simple version, such as the article's, keeps all gradients until backward is over. To do better, step 3 must
run inside step 2. Backward reaches the last layer first, so bucket 0 has the last layer's parameters:

    backward     | layer 2's gradients | layer 1's gradients | layer 0's gradients |
    in flight                          | bucket 0 (layer 2)  | bucket 1 (layer 1)  | bucket 2 (layer 0) |

Steps: 0 partition, 1 forward, 2 backward with 3 reduce inside it, 4 update, 5 gather.

Run it: torchrun --nproc-per-node 2 zero2.py
Paper: ZeRO, section 5.2. Article: "AI in Multiple GPUs: ZeRO & FSDP", class `ZeRO_2`.
"""

import weakref

import torch
import torch.distributed as dist
from torch.profiler import record_function

from zero1 import (
    Bucket,
    broadcast_whole,
    check_model,
    check_optimizer,
    gather_parameters,
    group_by_size,
    main,
    take_over,
)

# torch 2.13 renamed this collective. Every rank sends a whole buffer and receives its shard of the sum.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ZeRO2:
    """Train `model` on several ranks, each of which keeps 1/N of the optimizer state and of the gradients.

    Arguments and use are as in `ZeRO1`. With k backwards before a step a rank sends kΨ gradients and Ψ parameters.

    Trains        as ZeRO-1, but every trained parameter needs a gradient in every backward, on all ranks alike. An
                  unused parameter is an error: freeze it before the build.
    Raises        what `check` raises. In a backward, for a sparse gradient, and for a second gradient of a bucket that
                  was never completed. In `step()`, for a parameter without a gradient, and for a `param.grad` that came
                  after its bucket was sent. In `optimizer.step()`, where `engine.step()` was needed.
    Not detected  What ZeRO-1 does not detect, and
                  - `param.grad` is None after backward. `param.grad = None` changes nothing, and torch's
                    `clip_grad_norm_` and loops over `param.grad` find nothing. After `reduce_gradients()` the gradients
                    are in `optimizer.param_groups[0]["params"]`, this rank's shards.
                  - `optimizer.step()` after several backwards: it lacks the bucket in flight and gathers nothing.
                  - `optimizer.zero_grad()` between backward and `step()`: the bucket in flight is still added.
                  - A GradScaler: each rank would look for infs in its own shards only.
    """

    def __init__(self, model, optimizer, *, bucket_mb=None, group=None):
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.check()
        self.world_size = dist.get_world_size(group)
        self.in_flight = None  # the `Reduction` that was sent and not yet received
        self.turn = 0  # the index of the bucket that is sent next
        with record_function("step 0 partition"), torch.no_grad():
            self.buckets = self.partition(bucket_mb)
            self.take_over_optimizer()
        self.bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}
        self.watch_gradients()
        self.zero_grad()

    def check(self):
        """Raise an error for what cannot be trained, on every rank alike and before anything is sent."""
        check_model(self.model, self.group)
        check_optimizer(self.model, self.optimizer)

    def partition(self, bucket_mb):
        """Step 0: decide which rank owns what."""
        self.broadcast_untrained()
        return [self.make_bucket(run) for run in group_by_size(self.model, bucket_mb)]

    def broadcast_untrained(self):
        """Step 0: frozen parameters and buffers start as rank 0's and stay whole. No stage changes them later."""
        broadcast_whole(self.model.parameters(), self.group)
        broadcast_whole(self.model.buffers(), self.group)

    def make_bucket(self, named_params):
        return Bucket(named_params, self.group)

    def take_over_optimizer(self):
        """Step 0: the optimizer gets this rank's shards."""
        take_over(self.optimizer, self.buckets)

    def watch_gradients(self):
        """Step 0: have autograd call `on_gradient(param)` whenever it has finished a `param.grad`."""
        for param in self.bucket_of:
            param.register_post_accumulate_grad_hook(weak_hook(self.on_gradient))

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

    def on_gradient(self, param):
        """Inside step 2: `param.grad` is finished."""
        if self.turn == len(self.buckets):  # all were sent, so this is the first gradient of another backward
            # Here, and not right after the last bucket was sent: `step()` still has to check `missing`.
            self.expect_gradients()
        bucket = self.bucket_of[param]
        check_gradient(bucket, param)
        bucket.missing.remove(param)
        self.send_complete()

    def expect_gradients(self):
        """Every gradient is missing, and the first bucket is sent next."""
        self.turn = 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.params)

    def send_complete(self):
        """Send the buckets that have all their gradients, and whose turn it is.

        A collective carries no name: the third one of this rank meets the third one of every other rank. So buckets are
        sent in one fixed order. Ranks may finish gradients in different orders, for example where a model calls its
        branches in an order that depends on the data. Then a complete bucket waits, and stays whole.
        """
        while self.turn < len(self.buckets) and not self.buckets[self.turn].missing:
            self.send(self.buckets[self.turn])
            self.turn += 1

    def send(self, bucket):
        """Step 3, first half: send one bucket. Backward goes on meanwhile."""
        with record_function("step 3 reduce gradients"):
            # The previous bucket travelled while backward computed this one. It is received first, which frees its
            # gradients before others are copied. So at most two buckets are whole, and that is ZeRO-2. The price:
            # backward waits here where the network is slower than the computation. DDP keeps all buckets in flight.
            self.receive()
            self.in_flight = self.make_reduction(bucket)
            self.in_flight.start()

    def make_reduction(self, bucket):
        return Reduction(bucket)

    def receive(self):
        """Step 3, second half: receive the bucket in flight, if there is one."""
        if self.in_flight is not None:
            self.in_flight.finish()
            self.in_flight = None  # drops its buffers

    def step(self):
        """The end of step 3, and steps 4 and 5: from reduced gradients to updated parameters on every rank."""
        with record_function("step 3 reduce gradients"):
            self.reduce_gradients()
        with record_function("step 4 update the shard"):
            self.optimizer.step()
        with record_function("step 5 gather parameters"):
            gather_parameters(self.buckets)

    def reduce_gradients(self):
        """The end of step 3: receive the last bucket. From here on every `shard.grad` is this rank's part of the mean.

        Raises RuntimeError for gradients that did not come, or were not sent.
        """
        self.receive()
        check_complete(self.buckets)

    def zero_grad(self):
        """Clear all gradients, including what an unfinished backward has left. Call it after `step()`."""
        self.receive()  # else the next step would receive it, and add it
        self.expect_gradients()
        for bucket in self.buckets:
            bucket.shard.grad = None
            for param in bucket.params:
                param.grad = None


class Reduction:
    """One bucket's gradients on their way: every rank sends its whole gradients and receives its shard of the mean.

    Between `start` and `finish` nobody may write to `flat`, because the collective still reads it.

    tensor  shape           memory   lives
    flat    (numel,)        its own  until `finish`: the whole gradients of this rank, and zeros as padding
    shard   (shard_numel,)  its own  from `finish` on it is `bucket.shard.grad`, or is added to it
    """

    def __init__(self, bucket):
        self.bucket = bucket
        self.flat = self.lay_out_gradients()
        self.shard = self.flat.new_empty(bucket.shard_numel)
        self.work = None

    def lay_out_gradients(self):
        return self.bucket.lay_out(take_gradients(self.bucket), self.bucket.flat.dtype)

    def start(self):
        """Send. Backward goes on meanwhile."""
        self.work = reduce_scatter(self.shard, self.flat, group=self.bucket.group, async_op=True)

    def finish(self):
        """Receive: this rank's part of the mean becomes the gradient of the shard."""
        self.work.wait()
        self.flat = None  # frees the whole gradients. (On a GPU: for the kernels that are queued from here on.)
        self.average()
        self.deliver()

    def average(self):
        self.shard /= self.bucket.world_size  # and not ReduceOp.AVG, which is wrong in older versions of gloo

    def deliver(self):
        shard = self.bucket.shard
        if shard.grad is None:
            shard.grad = self.shard
        else:
            shard.grad += self.shard  # of a later backward before the same step


def take_gradients(bucket):
    """Yield the gradient of each parameter; `param.grad` is None from then on.

    One at a time, so that each is freed as soon as it is copied to its place.
    """
    for param in bucket.params:
        gradient, param.grad = param.grad, None
        yield gradient


def check_gradient(bucket, param):
    """Raise RuntimeError for a gradient that cannot be sent."""
    if param in bucket.missing and not param.grad.is_sparse:
        return
    (name,) = [name for name, each in zip(bucket.names, bucket.params) if each is param]
    if param.grad.is_sparse:
        raise RuntimeError(f"the gradient of {name!r} is sparse: build its embedding with sparse=False")
    raise RuntimeError(
        f"a second gradient of {name!r} came before its bucket was complete: an earlier backward left out some "
        "parameters. Call zero_grad() of this stage now; then use every trained parameter in every backward"
    )


def check_complete(buckets):
    """Raise RuntimeError if a parameter has no gradient, or one that was not sent."""
    missing, left = [], []
    for bucket in buckets:
        for name, param in zip(bucket.names, bucket.params):
            if param in bucket.missing:
                missing.append(name)
            elif param.grad is not None:
                left.append(name)
    if missing:
        raise RuntimeError(
            f"no gradient for {missing}: use every trained parameter in every backward, or freeze it before the build"
        )
    if left:
        raise RuntimeError(
            f"param.grad of {left} was set after the gradients were sent. Change the gradients of the shards in "
            "optimizer.param_groups instead, after reduce_gradients()"
        )


def weak_hook(method, *objects):
    """A hook that calls `method(*objects, ...)` for as long as they live.

    torch keeps hooks in C++, where Python's garbage collector cannot look. A hook that held the stage, which holds the
    model, which has the hook, would keep all of them alive forever.
    """
    method = weakref.WeakMethod(method)
    objects = [weakref.ref(each) for each in objects]

    def hook(*args):
        living = method()
        if living is not None:
            return living(*[each() for each in objects], *args)

    return hook


# Without this line, that happens
#
# `bucket.missing.remove`     nobody knows when a bucket is complete
# `self.turn`                 ranks that finish gradients in different orders add up different buckets
# `param.grad = None`         all gradients stay whole until `zero_grad()`
# `self.receive()` in `send`  all buckets are in flight at the end of backward, each with its whole gradients
# `weak_hook`                 a stage that was dropped stays in memory, and its model with it
#
# The cost. Ψ is the number of parameters; memory is in bytes (float32 and AdamW), traffic in elements.
#
#     held   4Ψ parameters + 4Ψ/N gradients + 8Ψ/N optimizer state     7e9 parameters, N = 8: 38.5 GB
#     peak   4Ψ + 12Ψ/N + (2 - 1/N) B, for equal buckets of B bytes and one backward per step, without activations
#     sent   Ψ reduce-scatter + Ψ all-gather = 2Ψ per rank and step, as under DDP
#
# Just before the last bucket is sent, two have whole gradients: the one that backward has just finished, and the one in
# flight. The first of them has no gradient shard yet, so B/N is subtracted. Smaller buckets mean a lower peak and more
# collectives. (On CPUs the peak is B higher, because gloo copies the bucket that it reduces.) Activations are largest
# early in backward, when there are hardly any gradients yet. So the peak of both together usually comes early, and is
# less than the sum of their peaks.
#
# ZeRO-2 sends less than the ZeRO-1 of chapter 1, because an all-reduce is a reduce-scatter and an all-gather in one,
# and here the all-gather brings parameters, not gradients (paper, section 7).


if __name__ == "__main__":
    main(ZeRO2)
