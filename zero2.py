"""ZeRO-2: every rank keeps 1/N of the gradients as well.

Every rank must compute all gradients, because every gradient is a sum over the batches of all ranks. A rank need not
keep them, because it updates only its own shard: once the gradients of a bucket are summed, the rank needs only its
shard of the sum. ZeRO-1 sums the gradients after backward, so all whole gradients are in memory at once. ZeRO-2 sums
them during backward. As soon as backward has finished the last gradient of a bucket, a reduce-scatter adds up the
bucket's gradients over the ranks and gives rank r only shard r of the sum. Then the whole gradients of the bucket are
freed.

                       rank 0       rank 1       rank 2       rank 3
    parameters       [########]   [########]   [########]   [########]
    gradients        [##      ]   [  ##    ]   [    ##  ]   [      ##]
    optimizer state  [##      ]   [  ##    ]   [    ##  ]   [      ##]

So step 3 runs inside step 2. (The article named below reduces the gradients after backward, which is simpler, but keeps
all whole gradients in memory until then.) Backward reaches the last layer first, so bucket 0 contains the last layer's
parameters. In this diagram each layer is one bucket. Each of the first three columns is the time in which one layer's
gradients are computed. In the last column backward is over:

    backward     | layer 2's gradients | layer 1's gradients | layer 0's gradients |
    in flight                          | bucket 0 (layer 2)  | bucket 1 (layer 1)  | bucket 2 (layer 0) |
    whole grads  | bucket 0            | buckets 0 and 1     | buckets 1 and 2     | bucket 2           |

Steps: 0 partition, 1 forward, 2 backward with 3 reduce inside it, 4 update, 5 gather. A reduce-scatter and the
all-gather of step 5 together send as much as DDP's all-reduce, because an all-reduce is one of each.

Run it: torchrun --nproc-per-node 2 zero2.py --trace. It prints the same losses as zero1.py, and shows that fewer bytes
of gradients are whole at a time.
Paper: ZeRO, section 5.2. Article: "AI in Multiple GPUs: ZeRO & FSDP", "ZeRO-2: Gradient Partitioning".
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

# Every rank sends a whole buffer and receives its shard of the sum. (torch 2.13 renamed this collective.)
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ZeRO2:
    """Train `model` on several ranks, each of which keeps 1/N of the optimizer state and of the gradients.

    Arguments, use and saving are as in `ZeRO1`. During backward each `param.grad` becomes None when its bucket is sent.
    To clip by the norm of the whole gradient, use the gradients of the shards:

        engine.reduce_gradients()  # now every `shard.grad` is this rank's part of the mean
        shards = engine.optimizer.param_groups[0]["params"]
        squares = sum(shard.grad.square().sum() for shard in shards)  # padding is zero and adds nothing
        torch.distributed.all_reduce(squares)  # over all ranks
        for shard in shards:
            shard.grad *= (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1)
        engine.step()

    With k backwards before a step, a rank sends k times as much, because each backward sends its own gradients.
    """

    def __init__(self, model, optimizer, *, bucket_mb=None, group=None):
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.check()
        self.world_size = dist.get_world_size(group)
        self.in_flight = None  # the `Reduction` that was sent and not yet received
        self.turn = 0  # the index of the next bucket to send; they are sent in the order of `self.buckets`
        with record_function("step 0 partition"), torch.no_grad():
            self.buckets = self.partition(bucket_mb)
            self.take_over_optimizer()
        self.bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}
        self.watch_gradients()
        self.zero_grad()

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def training_step(self, inputs, targets, loss_fn):
        """One whole step on this rank's batch. Returns this rank's loss, 0-d and detached."""
        with record_function("step 1 forward"):
            loss = loss_fn(self(inputs), targets)
        with record_function("step 2 backward"):
            loss.backward()  # step 3 runs inside it: autograd calls `on_gradient`, which sends complete buckets
        self.step()
        self.zero_grad()
        return loss.detach()

    def on_gradient(self, param):
        """Inside step 2: a hook, that is, a function of ours that autograd calls when it has finished `param.grad`.

        Autograd calls it once per backward, even for a parameter that forward uses several times (tied weights),
        because it first adds up the gradients of all uses. So a bucket is complete when `on_gradient` has been called
        once for each of its parameters.
        """
        if self.turn == len(self.buckets):
            # All buckets were sent, so this is the first gradient of the next backward, which starts with bucket 0.
            # The gradients are not marked as missing earlier, when the last bucket is sent, because then the check in
            # `step()` would find all of them missing.
            self.expect_gradients()
        bucket = self.bucket_of[param]
        check_gradient(bucket, param)
        bucket.missing.remove(param)
        self.send_complete()

    def expect_gradients(self):
        """Before a backward: mark every gradient as missing, and make bucket 0 the next one to send."""
        self.turn = 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.params)

    def send_complete(self):
        """Send the buckets that have all their gradients, and whose turn it is.

        A collective carries no name: the third one of this rank meets the third one of every other rank. So buckets are
        sent in one fixed order. Ranks may finish gradients in different orders, for example where a model calls its
        branches in an order that depends on the data. Then a complete bucket waits for its turn, and meanwhile its
        gradients stay whole.
        """
        while self.turn < len(self.buckets) and not self.buckets[self.turn].missing:
            self.send(self.buckets[self.turn])
            self.turn += 1

    def send(self, bucket):
        """Step 3, first half: send one bucket. Backward continues meanwhile."""
        with record_function("step 3 reduce gradients"):
            # Receive the previous bucket first. It was in flight while backward computed this bucket's gradients, and
            # receiving it frees its whole gradients. After that, this bucket's gradients are copied into one buffer,
            # which is sent. So the whole gradients of at most two buckets are in memory, however large the model is, as
            # long as backward finishes the buckets in their order. In return, backward waits here if the network is
            # slower than the computation. DDP does not wait, because it keeps all buckets in flight.
            self.receive()
            with record_function(f"send {bucket.name}"):
                self.in_flight = self.make_reduction(bucket)
                self.in_flight.start()

    def receive(self):
        """Step 3, second half: receive the bucket in flight, if there is one."""
        if self.in_flight is not None:
            with record_function(f"receive {self.in_flight.bucket.name}"):
                self.in_flight.finish()
                self.in_flight = None  # frees the whole gradients: operations that are queued later may use the memory

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

        Raises RuntimeError for gradients that are missing or were not sent.
        """
        self.receive()
        check_complete(self.buckets)

    def zero_grad(self):
        """Clear all gradients, including what an unfinished backward has left. Call it after `step()`."""
        self.receive()  # otherwise the next backward would receive the bucket in flight and add it to new gradients
        self.expect_gradients()
        for bucket in self.buckets:
            bucket.shard.grad = None
            for param in bucket.params:
                param.grad = None

    # Step 0. Down to `make_bucket` these methods are the same as in ZeRO1, except that `partition` makes no buffers for
    # gradients. `take_over_optimizer` does not replace `optimizer.zero_grad()`, because after `step()` the shards'
    # gradients, which it clears, are the only ones.

    def check(self):
        check_model(self.model, self.group)
        check_optimizer(self.model, self.optimizer)

    def partition(self, bucket_mb):
        """Step 0: decide which rank owns what."""
        self.broadcast_untrained()
        runs = self.make_runs(bucket_mb)
        return [self.make_bucket(f"bucket {index}", run) for index, run in enumerate(runs)]

    def broadcast_untrained(self):
        """Step 0: frozen parameters and buffers get rank 0's values and stay whole. No stage changes them later."""
        broadcast_whole(self.model.parameters(), self.group)
        broadcast_whole(self.model.buffers(), self.group)

    def make_runs(self, bucket_mb):
        return group_by_size(self.model, bucket_mb)

    def make_bucket(self, name, named_params):
        return Bucket(name, named_params, self.group)

    def take_over_optimizer(self):
        take_over(self.optimizer, self.buckets)

    def watch_gradients(self):
        """Step 0: have autograd call `on_gradient(param)` whenever it has finished a `param.grad`."""
        for param in self.bucket_of:
            param.register_post_accumulate_grad_hook(weak_hook(self.on_gradient))

    def make_reduction(self, bucket):
        return Reduction(bucket)


class Reduction:
    """The reduce-scatter of one bucket: every rank sends its whole gradients and receives its shard of the mean.

    Between `start` and `finish` no code may write to `gradient`, because the collective still reads it.

    tensor          shape           memory   lives
    gradient        (numel,)        its own  until `finish`; contains this rank's whole gradients, and zeros as padding
    shard_gradient  (shard_numel,)  its own  until `finish` adds it to `shard.grad`, or as `shard.grad` if that was None
    """

    def __init__(self, bucket):
        self.bucket = bucket
        self.gradient = self.lay_out_gradients()
        self.shard_gradient = self.gradient.new_empty(bucket.shard_numel)
        self.work = None

    def start(self):
        """Send. Backward continues meanwhile."""
        self.work = reduce_scatter(self.shard_gradient, self.gradient, group=self.bucket.group, async_op=True)

    def finish(self):
        """Receive this rank's part of the mean, and add it to the gradient of the shard."""
        self.work.wait()
        self.average()
        self.deliver()

    # These are separate methods because zerolab/engine overrides them.

    def lay_out_gradients(self):
        return self.bucket.lay_out(take_gradients(self.bucket), self.bucket.flat.dtype)

    def average(self):
        self.shard_gradient /= self.bucket.world_size  # not ReduceOp.AVG, because older versions of gloo get it wrong

    def deliver(self):
        shard = self.bucket.shard
        if shard.grad is None:
            shard.grad = self.shard_gradient
        else:
            shard.grad += self.shard_gradient  # a later backward before the same step


def take_gradients(bucket):
    """The gradient of each parameter. `param.grad` becomes None, so the gradients are freed once they are copied."""
    gradients = [param.grad for param in bucket.params]
    for param in bucket.params:
        param.grad = None
    return gradients


def weak_hook(method, *objects):
    """A hook that calls `method(*objects, ...)`, and keeps neither the method's stage nor `objects` alive.

    A stage refers to its model, the model refers to its hooks, and an ordinary hook would refer to the stage. torch
    keeps these hooks in C++, where Python's garbage collector cannot see this cycle, so the stage and the model would
    never be freed. When the stage has been freed, this hook does nothing.
    """
    method = weakref.WeakMethod(method)
    references = [weakref.ref(each) for each in objects]

    def hook(*args):
        living = method()
        if living is not None:
            return living(*[reference() for reference in references], *args)

    return hook


# For reference: what ZeRO-2 refuses, in addition to what ZeRO-1 refuses.


def check_gradient(bucket, param):
    """Raise RuntimeError for a gradient that cannot be sent."""
    if param in bucket.missing and not param.grad.is_sparse:
        return
    (name,) = [name for name, each in zip(bucket.names, bucket.params) if each is param]
    if param.grad.is_sparse:
        raise RuntimeError(f"the gradient of {name!r} is sparse: build its embedding with sparse=False")
    raise RuntimeError(
        f"a second gradient of {name!r} came before its bucket was complete: an earlier backward left out some "
        "parameters, or several reentrant checkpoints use this one. Call zero_grad() of this stage now; then use every "
        "trained parameter in every backward, and checkpoints with use_reentrant=False"
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


# What ZeRO-2 trains
#
# - All models that ZeRO-1 trains, if every trained parameter gets a gradient in every backward, on all ranks alike.
#   Freeze an unused parameter before the build.
#
# What it raises
#
# - At the build: what ZeRO-1 raises.
# - In a backward: a sparse gradient, and a second gradient of a parameter whose bucket was not complete. The second
#   error is also raised if several reentrant checkpoints (`use_reentrant=True`) use one weight. On GPUs, complex
#   gradients raise an error too, because NCCL does not reduce-scatter them. zerolab/engine supports them.
# - In `step()`: a parameter without a gradient, and a `param.grad` that was set after its bucket was sent.
# - In `optimizer.step()`: shards without a gradient. Call `engine.step()`.
# - In backward: a graph built before the last `step()`, as in plain PyTorch ("modified by an inplace operation").
#
# What it does not detect, besides what ZeRO-1 does not detect
#
# - Modules that run in a different order than the one in which they are registered in the model. Training is correct,
#   but buckets that are complete wait for their turn, so more gradients are whole, in the worst case all of them.
# - Code that reads or clears `param.grad`, which is None after backward: torch's `clip_grad_norm_` and loops over
#   `param.grad` find nothing, and `param.grad = None` clears nothing.
# - A hook of yours on a finished gradient (`register_post_accumulate_grad_hook`). If you register it after the build,
#   it runs after the stage's hook, when `param.grad` may be None already. If you register it before the build, it sees
#   the local gradient.
# - `optimizer.step()` after several backwards, when every shard has a gradient already: it does not use the bucket that
#   is still in flight, and does not gather the updated parameters.
# - `optimizer.zero_grad()` between two backwards: the bucket in flight is not cleared, and is added to the gradients of
#   the second backward. After `step()`, `optimizer.zero_grad()` clears all gradients, as in plain PyTorch.
# - A GradScaler: each rank looks for infs in its own shards only, so some ranks may skip a step that others take.
#
# What goes wrong if you delete a line. A test deletes each of these lines, and checks what is said here.
#
# - `self.expect_gradients()` in `ZeRO2.on_gradient`: an error in the second backward before a step, "a second gradient
#   of ... came before its bucket was complete".
# - `bucket.missing.remove(param)` in `ZeRO2.on_gradient`: an error in `step()`, "no gradient for ...". No bucket is
#   ever complete, so none is sent.
# - `self.send_complete()` in `ZeRO2.on_gradient`: an error in `step()`, "param.grad of ... was set after the gradients
#   were sent". In fact no gradient was sent, and all are still whole.
# - `self.turn += 1` in `ZeRO2.send_complete`: an error in backward. The first bucket is sent again, without gradients.
# - `self.receive()` in `ZeRO2.send`: an error in `step()`, "optimizer.step() was called before the gradients were
#   reduced". Only the last bucket is received.
# - `self.in_flight.finish()` in `ZeRO2.receive`: the same error. No bucket is received.
# - `self.receive()` in `ZeRO2.reduce_gradients`: the same error. The last bucket is still in flight.
# - `gather_parameters(self.buckets)` in `ZeRO2.step`: silently wrong. Each rank continues with N-1 stale shards.
# - `self.receive()` in `ZeRO2.zero_grad`: silently wrong after a backward that raised an error. The bucket that this
#   backward has sent is added to the gradients of the next step.
# - `bucket.shard.grad = None` in `ZeRO2.zero_grad`: silently wrong. The gradients of all steps add up.
# - `self.work.wait()` in `Reduction.finish`: silently wrong. The optimizer reads gradients that the collective has not
#   written yet.
# - `self.average()` in `Reduction.finish`: silently wrong. Gradients are N times too large.
# - `param.grad = None` in `take_gradients`: an error in `step()`, "param.grad of ... was set after the gradients were
#   sent". Until then all gradients stay whole.
#
# Two changes that look harmless. The new line is the one after *as*:
#
# - `method = weakref.WeakMethod(method)` in `weak_hook`, as `strong = method; method = lambda: strong`: more memory. A
#   stage that you drop is never freed, and neither is its model.
# - `self.send_complete()` in `ZeRO2.on_gradient`, as `if not bucket.missing: self.send(bucket)`: an error, or silently
#   wrong, if ranks finish gradients in different orders. Then the ranks add up different buckets.
#
# The cost. Ψ is the number of parameters; memory is in bytes (float32 and AdamW), traffic in elements.
#
#     held   4Ψ parameters + 4Ψ/N gradients + 8Ψ/N optimizer state     7e9 parameters, N = 8: 38.5 GB
#     peak   4Ψ + 12Ψ/N + 4(2 - 1/N) B, without activations, for equal buckets of B elements and one backward per step
#     sent   Ψ reduce-scatter + Ψ all-gather = 2Ψ per rank and step, as under DDP
#
# Just before the last bucket is sent, the whole gradients of two buckets are in memory: the bucket that backward has
# just finished, and the bucket in flight. The term 12Ψ/N counts the optimizer state and a gradient shard for each
# bucket. The bucket that is just finished has no gradient shard yet, so 4B/N is subtracted. For the demo, whose buckets
# are equal except for the small last one, the formula is exact to 1% on 2, 4 and 8 ranks. With unequal buckets, 2B
# becomes the largest b + max(b, b') of all buckets, where b is the size of a bucket and b' is the size of the bucket
# before it. (The b inside max is the copy that is sent, because a bucket's gradients are copied before they are freed.)
# On CPUs, gloo makes one more copy of the bucket that it reduces, and the demo does not count this copy. gloo also
# sends more than Ψ, because its reduce-scatter is an all-reduce.
#
# Smaller buckets mean a lower peak and more collectives. Activations are largest early in backward, when there are
# hardly any gradients yet. So the sum of activations and gradients is usually largest early in backward, and is less
# than the peak of the activations plus the peak of the gradients.
#
# ZeRO-2 sends less than ZeRO-1 in zero1.py. There, the all-gather half of the all-reduce brings gradients that a rank
# does not use. Here, the only all-gather brings parameters (paper, section 7).


if __name__ == "__main__":
    main(ZeRO2, bucket_mb=0.25)
