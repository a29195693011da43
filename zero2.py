"""ZeRO-2: every rank keeps 1/N of the gradients as well.

A rank updates only its shard, so the gradients of the other shards are of no use to it once they are
summed. ZeRO-2 never has them all: as soon as backward has finished the last gradient of a bucket, the
bucket is reduce-scattered, the rank keeps its 1/N of the sum, and the whole gradients are freed while backward
goes on with the layers below.

    parameters Ψ  +  gradients Ψ/N  +  optimizer state 2Ψ/N         (7e9 parameters, N = 8: 38.5 GB)

and on top of it, during backward only, at most two buckets of whole gradients: the one that backward
is filling and the one on its way. A smaller bucket means a lower peak and more collectives. With B for a bucket (and
the weight behind it, if it ends in that weight's bias, whose gradient comes later), A for the larger of it and the one
before, and T for it and all that is reduced after it

    peak = Ψ + 2Ψ/N + (Ψ - T)/N + A + B      for the bucket that makes this most; and activations

With equal buckets of b bytes that is the last one, with T = A = B = b: Ψ + 3Ψ/N - b/N + 2b.

Sent per rank and step, with the factor (N-1)/N: reduce-scatter Ψ + all-gather Ψ = 2Ψ, the same as DDP,
whose all-reduce is a reduce-scatter and an all-gather in one.

The article's simplified version keeps all gradients until backward is over, and says so. What it
takes to do better is this chapter: steps 2 and 3 are no longer one after the other. Step 3 runs inside
step 2, from a hook that autograd calls whenever it has finished a parameter's gradient:

    backward  | layer 2's gradients | layer 1's gradients | layer 0's gradients |
    reduce                          | bucket 0            | bucket 1            | bucket 2 |

Steps: 0 partition, 1 forward, 2 backward with 3 reduce gradients inside, 4 update the shard, 5 gather
parameters. The words, `Bucket` and `make_buckets` are those of zero1.py.

See what changes between the chapters: diff <(sed -n '/^class ZeRO1/,/^def main/p' zero1.py) \
<(sed -n '/^class ZeRO2/,/^def main/p' zero2.py)

Paper: ZeRO (Rajbhandari et al., 2020), section 5.2, "P_os+g". Article: "AI in Multiple GPUs: ZeRO & FSDP".
Run it: ./launch.sh zero2 2
"""

import contextlib
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from harness.engine import loop
from harness.engine import refusals as checks
from zero1 import Bucket, make_buckets


class Reduction:
    """One bucket's gradients on their way from N whole copies to N shards of the mean.

    Step 3 of one bucket, in two halves: `__init__` sends, `finish` receives. Between the two the whole
    buffer must stay alive, because the collective still reads it.
    """

    def __init__(self, bucket: Bucket, group):
        self.bucket = bucket
        # (numel,); zeros: padding is sent along, and must never hold a NaN
        self.flat = torch.zeros_like(bucket.flat, dtype=bucket.reduce_dtype)
        for param, view in zip(bucket.params, bucket.views(self.flat)):
            if param.grad is not None:  # None with `find_unused` only, and counts as zeros
                view.copy_(param.grad)
                param.grad = None
            if param in bucket.kept:  # from earlier backwards, under `no_sync`
                view.add_(bucket.kept.pop(param))
        self.shard = self.flat.new_empty(bucket.shard_numel)
        self.work = dist.reduce_scatter_single(self.shard, self.flat, group=group, async_op=True)

    def finish(self, world_size: int) -> None:
        """Add this rank's shard of the mean to what the pieces have from earlier backwards of this step."""
        loop.wait(self.work, "reduce-scatter", self.bucket)  # on CUDA the stream waits, not the host
        self.flat = None  # the whole gradients are gone; this is what makes it ZeRO-2
        self.shard.div_(world_size)  # after the sum, which is rounded once and not on every rank
        for (_, piece), (_, gradient) in zip(self.bucket.pieces, self.bucket.cut(self.shard)):
            gradient = gradient.to(piece.dtype)
            piece.grad = gradient if piece.grad is None else piece.grad.add_(gradient)


class ZeRO2:
    """Data-parallel training of `model` with optimizer state and gradients cut into N.

    `optimizer_cls` takes the list of this rank's pieces (1-D float tensors) and returns a
    `torch.optim.Optimizer`; `group` is the process group to shard over (default: all ranks);
    `bucket_mb` the size of a bucket in MiB, 0 for a bucket per parameter. All ranks start from rank 0's
    parameters and buffers. Elementwise optimizers only, see `ZeRO1`.

    Buckets are reduced in one fixed order on every rank, the last parameters' first, whatever order
    autograd finishes in: a collective is matched with the others by its turn alone. At most two
    buckets of whole gradients are alive while gradients finish in that order. A model that finishes
    them in the opposite order (its first parameters are used last) still trains right, but every bucket
    waits for bucket 0, and in the end all gradients are whole at once.

    Several backwards before a step add up: k of them send (k+1)Ψ (k reduce-scatters, one all-gather) and keep
    nothing whole, or 2Ψ with the first k-1 under `no_sync()`, which keeps Ψ of whole gradients. ZeRO-1 keeps them
    whole in any case and sends 3Ψ for any k, which is why it is still of use. `param_groups` are a torch
    optimizer's, over the model's own parameters.

    `param_dtype` is the dtype of weights and computation, `reduce_dtype` (default: the same) of gradients on their way;
    shards keep the model's. bfloat16 with float32 holds 2 + (4 + 4 + 8)/N bytes per parameter. `find_unused=True`
    lets a step leave parameters without gradient, on some ranks or on all, for one small all-reduce. A bucket that
    lacks one waits for the end of backward, and the buckets behind it wait with it.

    Raises RuntimeError without a process group, ValueError or TypeError for a model, option or optimizer
    that cannot work, each on every rank. Source: ZeRO paper section 5.2; article class `ZeRO_2`.
    """

    def __init__(self, model: nn.Module, optimizer_cls, *, group=None, bucket_mb: float = 25.0, param_groups=None,
                 param_dtype=None, reduce_dtype=None, find_unused: bool = False):  # fmt: skip
        self.model, self.group, self.find_unused = model, group, find_unused
        dtypes = param_dtype, reduce_dtype
        self.rank, self.world_size = checks.check(model, group, dtypes, find_unused, bucket_mb=bucket_mb)
        with record_function("step 0 partition"), torch.no_grad():
            layout = bucket_mb, self.rank, self.world_size, dtypes
            self.trained = make_buckets(loop.trainable(model), *layout)
            self.buckets = self.trained + make_buckets(loop.frozen(model), *layout)
            for bucket in self.buckets:
                bucket.flatten()
                dist.broadcast(bucket.flat, group_src=0, group=group)
                bucket.make_pieces()
            for buffer in model.buffers():
                dist.broadcast(buffer, group_src=0, group=group)
        loop.prepare_forward(model, self.buckets, param_dtype)
        self.optimizer = loop.make_optimizer(optimizer_cls, self.trained, param_groups)
        self._in_flight = None  # the `Reduction` on its way
        self._sync = True  # False under `no_sync`
        self.zero_grad()
        for bucket in self.trained:
            for param in bucket.params:
                # Called when `param.grad` is final for this backward, however often `param` was used.
                param.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket))

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def training_step(self, inputs, targets, loss_fn) -> torch.Tensor:
        """One whole step on this rank's batch; returns this rank's loss, detached."""
        with record_function("step 1 forward"):
            loss = loss_fn(self(inputs), targets)
        with record_function("step 2 backward"):
            loss.backward()  # and step 3 inside it, bucket by bucket
        self.step()
        self.zero_grad()
        return loss.detach()

    def step(self) -> None:
        """The end of step 3, and steps 4 and 5: from reduced gradients to updated parameters everywhere."""
        with record_function("step 3 reduce gradients"):
            self._sync_gradients()
        with record_function("step 4 update the shard"):
            self.optimizer.step()
        with record_function("step 5 gather parameters"):
            self._sync_params(self.trained)  # the frozen ones have not changed

    def _on_gradient(self, bucket: Bucket, param: nn.Parameter) -> None:
        """Step 3, called inside step 2: `param.grad` is final. Reduce the buckets whose turn has come."""
        bucket.used.add(param)  # since `zero_grad`
        if not self._sync:
            loop.keep_gradient(bucket, param)  # in `bucket.kept`, whole
            return
        if self.find_unused and self._backward is None:
            self._backward = loop.when_backward_ends(self._end_backward)
        loop.check_gradient(bucket, param)  # an error if its bucket is on its way already
        bucket.missing.discard(param)  # `missing`: those of the bucket whose gradients are still to come
        if not self._waiting:
            self._waiting = list(self.trained)  # another backward begins
        while self._waiting and not self._waiting[0].missing:
            self._reduce_bucket(self._waiting.pop(0))

    def _end_backward(self) -> None:
        """With `find_unused`: reduce what waits for gradients that do not come, zeros on this rank."""
        self._backward = None
        while self._waiting:
            self._reduce_bucket(self._waiting.pop(0))

    @contextlib.contextmanager
    def no_sync(self):
        """For all but the last of several backwards before a step: gradients add up on this rank, whole, unsent."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def _reduce_bucket(self, bucket: Bucket) -> None:
        """Send one complete bucket, and let backward go on meanwhile."""
        # The bucket before has had all of this bucket's backward for its way. Receiving it first frees its
        # buffer before another is made, which keeps the promise of two.
        with record_function("step 3 reduce gradients"):
            self._finish_reduction()
            self._in_flight = Reduction(bucket, self.group)
        bucket.missing, self._unused_known = set(bucket.params), False

    def _finish_reduction(self) -> None:
        """Receive the bucket that is on its way, if one is."""
        if self._in_flight is not None:
            self._in_flight.finish(self.world_size)
            self._in_flight = None

    def _sync_gradients(self) -> None:
        """The end of step 3: receive the last bucket."""
        self._finish_reduction()
        loop.require_gradients(self.trained, self.find_unused)
        if self.find_unused and not self._unused_known:
            loop.drop_unused(self.trained, self.group)
            self._unused_known = True

    def _sync_params(self, buckets: list[Bucket]) -> None:
        """Step 5: every rank contributes the shard it has just updated, straight into the weights."""
        works = []
        for bucket in buckets:
            shard = loop.rounded_shard(bucket)  # in float32 the shard itself, a slice of the output, as is allowed
            works.append(dist.all_gather_single(bucket.flat, shard, group=self.group, async_op=True))
        for bucket, work in zip(buckets, works):
            loop.wait(work, "all-gather", bucket)

    def zero_grad(self) -> None:
        """Drop all gradients, also those of a backward that did not finish. Call it after `step()`."""
        self._finish_reduction()
        self.model.zero_grad()
        self._backward, self._unused_known = None, False  # both for `find_unused`: under way; agreed with the others
        self._waiting = []  # the buckets that this backward has not reduced yet
        for bucket in self.trained:
            bucket.used = set()  # the parameters that got a gradient since
            bucket.kept = {}  # parameter -> its whole gradient, under `no_sync`
            bucket.missing = set(bucket.params)  # what this backward has not finished yet
            for _, piece in bucket.pieces:
                piece.grad = None

    # Not the lesson, and alike in every stage: the docstrings are in harness/engine/loop.py.
    clip_grad_norm_ = loop.clip_grad_norm_
    full_state_dict = loop.full_state_dict
    load_full_state_dict = loop.load_full_state_dict


def main() -> None:
    from harness.run import walkthrough

    walkthrough.run(ZeRO2, __doc__)


if __name__ == "__main__":
    main()
