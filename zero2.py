"""ZeRO-2: every rank keeps 1/N of the gradients as well.

A rank updates its shard only. Once the gradients of all ranks are summed, it has no use for those of the other shards.
So it should never hold all of them at once. As soon as backward has finished the last gradient of a bucket, ZeRO-2
sends the bucket in a reduce-scatter. The rank keeps 1/N of the sum and frees the rest, while backward goes on.

                       rank 0       rank 1       rank 2       rank 3
    parameters       [########]   [########]   [########]   [########]
    gradients        [##      ]   [  ##    ]   [    ##  ]   [      ##]
    optimizer state  [##      ]   [  ##    ]   [    ##  ]   [      ##]

Per rank, in bytes (float32 and AdamW), and sent per step, in elements:

    memory   4Ψ parameters + 4Ψ/N gradients + 8Ψ/N optimizer state     (7e9 parameters, N = 8: 38.5 GB)
    peak     4Ψ + 12Ψ/N + (2 - 1/N) B, for equal buckets of B bytes; without activations, late in backward
    sent     Ψ reduce-scatter + Ψ all-gather = 2Ψ, as under DDP

At that moment two buckets have whole gradients: the one that backward is finishing, and the one in flight. The former
has no gradient shard yet, so B/N is subtracted. Smaller buckets mean a lower peak and more collectives. (Unequal ones:
`PEAK_FORMULAS` in harness/measure/memory.py.) Activations come on top, but are largest early in backward, when there
are hardly any gradients yet. So the peak of both together comes early as a rule, and is less than the two peaks' sum.

ZeRO-2 sends less than the ZeRO-1 of chapter 1, because an all-reduce is a reduce-scatter and an all-gather in one, and
here the all-gather brings parameters and not gradients.

A simple version keeps all gradients until backward is over; the article says that its version does this. To do better,
step 3 must run inside step 2. Buckets are counted from the last layer, which backward reaches first:

    backward     | layer 2's gradients | layer 1's gradients | layer 0's gradients |
    in flight                          | bucket 0 (layer 2)  | bucket 1 (layer 1)  | bucket 2 (layer 0) |

The words, `Bucket` and step 5 are those of zero1.py. What changes from there: ./launch.sh changes zero1 zero2

Paper: ZeRO (Rajbhandari et al., 2020), sections 5.2 "P_os+g" (memory) and 7 (traffic). Article: "AI in Multiple GPUs:
ZeRO & FSDP", whose `ZeRO_2` is named there and not printed. Run it: ./launch.sh zero2 2
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from harness.engine import gradient_hooks, gradients, optimizer, precision, state, units
from harness.engine.interface import Interface
from harness.engine.waiting import wait
from zero1 import Bucket, gather_parameters


class Reduction:
    """One bucket's gradients in flight: every rank puts in its whole gradients, and gets its shard of the mean.

    Step 3 of one bucket, in two halves: `__init__` sends, `finish` receives. In between the whole buffer must stay
    alive and unchanged, because the collective still reads it.
    """

    def __init__(self, bucket: Bucket, group):
        self.bucket = bucket
        self.flat = torch.zeros_like(bucket.flat, dtype=bucket.reduce_dtype)  # zeros: for the padding, as in `flat`
        # All gradients are copied into their places, in one call, and no `param.grad` is left.
        torch._foreach_copy_(bucket.views(self.flat), gradients.take(bucket))
        self.shard = self.flat.new_empty(bucket.shard_numel)
        to_sum = precision.before_sum(self.flat, dist.get_world_size(group))  # unchanged, except in float16
        self.work = dist.reduce_scatter_single(self.shard, to_sum, group=group, async_op=True)

    def finish(self, world_size: int) -> None:
        """The shard of the mean is there: hand it to the optimizer."""
        wait(self.work, "reduce-scatter", self.bucket)
        self.flat = None  # the whole gradients are gone, 1/N is left. (On a GPU the memory's next user queues behind.)
        precision.mean_of_sum(self.shard, world_size)  # divided by N, in place
        # Calls `add_to_pieces` right here, unless replicas or offload want the shard first.
        self.bucket.placement.deliver(self.bucket, self.shard, add_to_pieces)


def add_to_pieces(bucket: Bucket, shard: torch.Tensor) -> None:
    """The end of step 3: each piece gets its part of the mean. The backwards of one step add up."""
    for (_, piece), (_, gradient) in zip(bucket.pieces, bucket.cut(shard)):
        gradient = gradient.to(piece.dtype)  # of the same dtype: a view, no copy
        piece.grad = gradient if piece.grad is None else piece.grad.add_(gradient)


class ZeRO2(Interface):
    """Data-parallel training of `model` with optimizer state and gradients cut into N.

    Step 0, the set-up of all that the other steps use, stands last: `__init__`. Options and errors are ZeRO-1's.
    With k backwards before a step a rank sends kΨ gradients and Ψ parameters. If all but the last run under `no_sync()`
    it sends 2Ψ, and keeps whole gradients, 4Ψ bytes. With `find_unused` a bucket that lacks a gradient waits for the
    end of backward, and the buckets behind it too.
    """

    # The steps.

    def training_step(self, inputs, targets, loss_fn) -> torch.Tensor:
        """One whole step on this rank's batch. Returns this rank's loss, 0-d and detached."""
        with record_function("step 1 forward"):
            loss = loss_fn(self(inputs), targets)
        with record_function("step 2 backward"):
            loss.backward()  # and step 3 inside it: autograd calls `on_gradient`, which sends bucket by bucket
        self.step()
        self.zero_grad()
        return loss.detach()

    def step(self) -> None:
        """The end of step 3, and steps 4 and 5: from reduced gradients to updated parameters on every rank."""
        with record_function("step 3 reduce gradients"):
            self._reduce_gradients()
        with record_function("step 4 update the shard"):
            self.optimizer.step()
        with record_function("step 5 gather parameters"):
            gather_parameters(self.trained_buckets, self.group)  # the frozen ones have not changed

    def _reduce_gradients(self) -> None:
        """The end of step 3: receive the last bucket."""
        self._receive()
        gradients.require_all(self)  # without `find_unused` an error for a parameter that got no gradient

    def zero_grad(self) -> None:
        """Drop all gradients, also those of a backward that did not finish. Call it after `step()`."""
        self._receive()  # else the next step would receive it, and add it
        gradients.forget(self)
        self._turns, self._complete = deque(self.trained_buckets), set()  # in their order; those that are complete

    # The moments at which ZeRO-2 acts inside step 2, and what triggers them.

    def watch_gradients(self) -> None:
        """Set up once: autograd calls a parameter's hook, and that `on_gradient`, whenever its gradient is finished."""
        for bucket in self.trained_buckets:
            for index, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(self.hooks.calling(self.on_gradient, bucket, index))

    def on_gradient(self, bucket: Bucket, index: int) -> None:
        """The gradient of `bucket.params[index]` is final."""
        bucket.missing.discard(index)  # what backward has still to bring; `self.hooks` fills it when a backward begins
        if not bucket.missing:
            self.gradients_final(bucket)  # the last one has come: the bucket is complete

    def gradients_final(self, bucket: Bucket) -> None:
        """All gradients of `bucket` are final. Send the buckets whose turn has come.

        A collective carries no name: the third one of this rank meets the third one of every other rank. So buckets are
        sent in one fixed order, that of `trained_buckets`. A model that finishes its gradients in another order still
        trains correctly, but finished buckets wait their turn, whole.
        """
        self._complete.add(bucket)
        while self._turns[0] in self._complete:
            first = self._turns.popleft()
            self._complete.remove(first)
            self._turns.append(first)  # for the next backward
            self._send(first)

    # The moves.

    def _send(self, bucket: Bucket) -> None:
        """Step 3, first half: send one bucket. Backward goes on meanwhile."""
        with record_function("step 3 reduce gradients"):
            # The bucket before has travelled while backward filled this one. To receive it first frees its gradients
            # before others are copied into a buffer. If all come in turn, two at most are whole: that is ZeRO-2.
            self._receive()
            self._in_flight = Reduction(bucket, self.group)

    def _receive(self) -> None:
        """Step 3, second half: receive the bucket in flight, if there is one."""
        if self._in_flight is not None:
            self._in_flight.finish(self.world_size)
            self._in_flight = None

    # The set-up.

    def __init__(self, model: nn.Module, optimizer_cls, *, bucket_mb=None, param_groups=None, **options):
        # What cannot work raises here, on every rank, before anything is changed. Sets `rank`, `world_size`, `group`.
        self.prepare(model, optimizer_cls, param_groups, {"bucket_mb": bucket_mb}, **options)
        with record_function("step 0 partition"), torch.no_grad():
            # Backward reaches the last parameters first: they come first. A bucket has one dtype, all trained or none.
            parts = units.by_size(model.named_parameters(), bucket_mb)
            self.buckets = [Bucket(part, self.rank, self.world_size, self.dtypes) for part in parts]
            self.trained_buckets = [bucket for bucket in self.buckets if bucket.params[0].requires_grad]
            for bucket in self.buckets:
                bucket.flatten()
                dist.broadcast(precision.sendable(bucket.flat), group_src=0, group=self.placement.everyone)
                bucket.make_pieces(self.placement)
            state.broadcast_buffers(model, self.placement.everyone)  # what the model registered as buffers stays whole
        self.optimizer = optimizer.over_pieces(self, optimizer_cls, param_groups)
        self._in_flight = None  # the `Reduction` that was sent and not received
        self.hooks = gradient_hooks.BucketHooks(self)  # calls `on_gradient`, and knows the hard cases
        self.watch_gradients()
        self.zero_grad()

    def _shards_changed(self) -> None:  # `load_full_state_dict` and others that write into shards call it
        gather_parameters(self.buckets, self.group)


def main() -> None:
    from harness.measure import walkthrough

    walkthrough.run(ZeRO2, __doc__)


if __name__ == "__main__":
    main()
