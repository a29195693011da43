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
    peak     4Ψ + 12Ψ/N + (2 - 1/N) B, for equal buckets of B bytes; and activations
    sent     Ψ reduce-scatter + Ψ all-gather = 2Ψ, as under DDP

At the peak two buckets have whole gradients: the one that backward is finishing, and the one in flight. The former has
no gradient shard yet, so B/N is subtracted. Smaller buckets mean a lower peak and more collectives. (For unequal
buckets: `PEAK_FORMULAS` in harness/measure/dry_run.py.)

ZeRO-2 sends less than the ZeRO-1 of chapter 1, because an all-reduce is a reduce-scatter and an all-gather in one, and
here the all-gather brings parameters and not gradients.

A simple version keeps all gradients until backward is over: the article below has it, and says so. To do better, step 3
must run inside step 2. Autograd calls a hook whenever a gradient is final; harness/engine/gradient_hooks.py turns these
calls into the one moment of this chapter, `gradients_final`. Buckets are counted from the last layer:

    backward     | layer 2's gradients | layer 1's gradients | layer 0's gradients |
    in flight                          | bucket 0 (layer 2)  | bucket 1 (layer 1)  | bucket 2 (layer 0) |

The words, `Bucket` and step 5 are those of zero1.py. What changes from there: ./launch.sh changes zero1 zero2

Paper: ZeRO (Rajbhandari et al., 2020), section 5.2, "P_os+g". Article: "AI in Multiple GPUs: ZeRO & FSDP".
Run it: ./launch.sh zero2 2
"""

from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from harness.engine import gradient_hooks, gradients, optimizer, precision, refusals, state
from harness.engine.interface import Interface
from harness.engine.placement import Placement
from harness.engine.waiting import wait
from zero1 import Bucket, gather_parameters, partition


class Reduction:
    """One bucket's gradients in flight: every rank puts in its whole gradients, and gets its shard of the mean.

    Step 3 of one bucket, in two halves: `__init__` sends, `finish` receives. In between the whole buffer must stay
    alive and unchanged, because the collective still reads it.
    """

    def __init__(self, bucket: Bucket, group):
        self.bucket = bucket
        # (numel,); zeros: padding is sent along, and must never hold a NaN
        self.flat = torch.zeros_like(bucket.flat, dtype=bucket.reduce_dtype)
        # Every gradient is copied into its place, and no `param.grad` is left.
        torch._foreach_copy_(bucket.views(self.flat), gradients.take(bucket))
        self.shard = self.flat.new_empty(bucket.shard_numel)
        to_sum = precision.before_sum(self.flat, dist.get_world_size(group))  # `self.flat` itself, in place
        self.work = dist.reduce_scatter_single(self.shard, to_sum, group=group, async_op=True)

    def finish(self, world_size: int) -> None:
        """Hand this rank's shard of the mean to the optimizer. A piece adds up the backwards of one step."""
        wait(self.work, "reduce-scatter", self.bucket)
        self.flat = None  # the whole gradients are gone: this makes it ZeRO-2
        precision.mean_of_sum(self.shard, world_size)  # divided by N, in place
        self.bucket.placement.deliver(self.bucket, self.shard)  # to `piece.grad`, where several backwards add up


class ZeRO2(Interface):
    """Data-parallel training of `model` with optimizer state and gradients cut into N.

    Options and errors are those of `ZeRO1`. A collective carries no name: the third one of this rank meets the third
    one of every other rank. So buckets are sent in one fixed order, the last parameters' first. A model that finishes
    its gradients in another order trains right. But its complete buckets wait for their turn, with whole gradients.

    Several backwards before a step add up. With k backwards a rank sends kΨ gradients and Ψ parameters. A backward
    under `no_sync()` sends nothing: if all but the last run so, a rank sends 2Ψ, and keeps whole gradients, 4Ψ bytes.
    With `find_unused=True` a bucket that lacks a gradient waits for the end of backward, and the buckets behind it too.

    Source: ZeRO paper, section 5.2; article class `ZeRO_2`, which is named there and not printed.
    """

    # The moves.

    def _send(self, bucket: Bucket) -> None:
        """Step 3, first half: send one bucket. Backward goes on meanwhile."""
        with record_function("step 3 reduce gradients"):
            # The bucket before has travelled while backward filled this one. It is received first: that frees its whole
            # gradients before another buffer is made. So never more than two buckets are whole.
            self._receive()
            self._in_flight = Reduction(bucket, self.group)

    def _receive(self) -> None:
        """Step 3, second half: receive the bucket in flight, if there is one."""
        if self._in_flight is not None:
            self._in_flight.finish(self.world_size)
            self._in_flight = None

    # The moment.

    def gradients_final(self, bucket: Bucket) -> None:
        """Inside step 2: all gradients of `bucket` are final. Send the buckets whose turn has come."""
        self._complete.add(bucket)
        while self._turns[0] in self._complete:
            first = self._turns.popleft()
            self._complete.remove(first)
            self._turns.append(first)  # for the next backward
            self._send(first)

    # The steps.

    def training_step(self, inputs, targets, loss_fn) -> torch.Tensor:
        """One whole step on this rank's batch. Returns this rank's loss, 0-d and detached."""
        with record_function("step 1 forward"):
            loss = loss_fn(self(inputs), targets)
        with record_function("step 2 backward"):
            loss.backward()  # and step 3 inside it, bucket by bucket
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
        gradients.require_all(self)  # an error for a parameter without a gradient

    def zero_grad(self) -> None:
        """Drop all gradients, also those of a backward that did not finish. Call it after `step()`."""
        self._receive()  # a buffer must not go while a collective uses it
        gradients.forget(self)
        self._turns, self._complete = deque(self.trained_buckets), set()

    def _shards_changed(self) -> None:
        """`load_full_state_dict` has written new values into all shards: bring the weights up to date."""
        gather_parameters(self.buckets, self.group)

    # The set-up.

    def __init__(self, model: nn.Module, optimizer_cls, *, group=None, bucket_mb=None, param_groups=None,
                 param_dtype=None, reduce_dtype=None, find_unused=False, offload_policy=None):  # fmt: skip
        place, self.dtypes = Placement(group, offload_policy), (param_dtype, reduce_dtype)
        # What cannot work raises here, on every rank, and before anything is changed.
        refusals.check(model, optimizer_cls, param_groups, place, self.dtypes, find_unused, bucket_mb=bucket_mb)
        self.model, self.group, self.placement, self.find_unused = model, place.group, place, find_unused
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        with record_function("step 0 partition"), torch.no_grad():
            self.trained_buckets, frozen = partition(model, bucket_mb, self.rank, self.world_size, self.dtypes)
            self.buckets = self.trained_buckets + frozen
            for bucket in self.buckets:
                bucket.flatten()
                dist.broadcast(precision.sendable(bucket.flat), group_src=0, group=place.everyone)
                bucket.make_pieces(place)
            state.broadcast_buffers(model, place.everyone)  # what the model has registered as buffers stays whole
        self.optimizer = optimizer.over_pieces(self, optimizer_cls, param_groups)
        self._in_flight = None  # the `Reduction` that was sent and not received
        self.hooks = gradient_hooks.BucketHooks(self)  # from here on backward calls `gradients_final`
        self.zero_grad()


def main() -> None:
    from harness.measure import walkthrough

    walkthrough.run(ZeRO2, __doc__)


if __name__ == "__main__":
    main()
