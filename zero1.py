"""ZeRO-1: every rank keeps 1/N of the optimizer state.

Words of all three chapters:
    rank, world size  one process of the group, as a rule with a GPU of its own, and their number N
    Ψ                 the bytes of all parameters: 4 per element in float32 (in the paper Ψ is their number)
    optimizer state   what the optimizer remembers of each parameter: in AdamW two moments, 2Ψ
    activations       what forward keeps for backward; it grows with the batch, and no stage shards it
    bucket            a run of parameters laid end to end in one flat buffer, zero-padded and cut into N
    shard             one of the N equal parts of a bucket; rank r owns shard r and updates it
    piece             one parameter's elements inside this rank's shard: what the optimizer is handed
    collective        what all ranks call together, each with a tensor of its own, in the same order on every rank:
    all-reduce        every rank gets the sum of all ranks' tensors
    all-gather        every rank gets all shards, in the order of the ranks (before torch 2.13 `all_gather_into_tensor`)
    reduce-scatter    rank r gets shard r of the sum: the first half of an all-reduce (once `reduce_scatter_tensor`)

Data-parallel training (DDP: torch's DistributedDataParallel) repeats everything N times: every rank has the whole
model, computes gradients on data of its own, averages them with the others', and makes the same update. Each holds

    parameters Ψ  +  gradients Ψ  +  optimizer state 2Ψ  =  4Ψ      (7e9 parameters: 112 GB)

although all N copies of the optimizer state are equal, as all ranks see the same averaged gradient.
ZeRO-1 lets each rank update only 1/N of the parameters, so it needs only the state for these:

    parameters Ψ  +  gradients Ψ  +  optimizer state 2Ψ/N           (N = 8: 63 GB)
    peak = 2Ψ + 2Ψ/N + G      and activations; G is the largest single gradient, on its way into the buffer

and pays with one more collective, as a rank lacks what the others have updated. Sent per rank and step, times (N-1)/N:
DDP's all-reduce 2Ψ; here all-reduce 2Ψ + all-gather Ψ = 3Ψ (in the paper 2Ψ, see `_sync_gradients`).

Steps in all chapters: 0 partition, 1 forward, 2 backward, 3 reduce gradients, 4 update the shard, 5 gather parameters.

Paper: ZeRO (Rajbhandari et al., 2020), section 5.1, "P_os". Article: "AI in Multiple GPUs: ZeRO & FSDP".
Run it: ./launch.sh zero1 2
"""

import contextlib
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function  # names a step in profiles, and computes nothing

from harness.engine import loop
from harness.engine import refusals as checks  # bad input; and what every stage needs and none teaches


class Bucket:
    """A run of parameters in one flat buffer, cut into one equal shard per rank.

    The articles cut every parameter by itself: with N = 2 and W of 6 elements, rank 0 owns W[0:3] and rank 1 W[3:6].
    That is a bucket of one parameter (here with starts rounded up to 16 bytes: W[0:4] and W[4:6]). A collective has a
    fixed cost, so many parameters share a bucket, and the cuts fall where they fall:

        flat   | embedding ............ | norm | weight ................... | bias |pad|
        cut    | shard 0           | shard 1           | shard 2            | shard 3  |

    Attributes: `names`, `params`; `offsets`, where each starts, and `start`, where this rank's shard begins, in
    elements; `numel` of the buffer `flat`, `shard_numel` = numel / N of its `shard`; `pieces`, see `make_pieces`;
    `param_dtype` of `flat`, `reduce_dtype` of gradients under way: by default the parameters' own.
    """

    def __init__(self, named_params: list[tuple[str, nn.Parameter]], rank: int, world_size: int, dtypes=(None, None)):
        self.names, self.params = zip(*named_params)
        self.param_dtype, self.reduce_dtype = loop.bucket_dtypes(self.params[0].dtype, *dtypes)
        # Matrix kernels take other paths, with other last bits, for operands that do not start on a 16-byte
        # boundary. Starting every parameter and every shard on one keeps results those of plain PyTorch.
        align = max(1, 16 // min(self.params[0].dtype.itemsize, self.param_dtype.itemsize))
        self.offsets, end = [], 0
        for param in self.params:
            self.offsets.append(end)
            end += -(-param.numel() // align) * align  # rounded up
        self.shard_numel = max(1, -(-end // (world_size * align))) * align  # never 0, even if all are empty
        self.numel = self.shard_numel * world_size
        self.start = rank * self.shard_numel

    def flatten(self) -> None:
        """Step 0: move the parameters into one buffer, and make the model's weights views of it."""
        self.flat = self.params[0].new_zeros(self.numel)  # zeros: padding must never hold a NaN
        for param, view in zip(self.params, self.views(self.flat)):
            view.copy_(param.detach())
            # Only the storage behind the parameter changes. It stays the same object, so the model and
            # whoever else holds it notice nothing, and a collective into `flat` writes into the weights.
            param.data = view
        self.shard = self.flat[self.start : self.start + self.shard_numel]

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a whole buffer (numel,), in the parameter's shape."""
        return [flat[o : o + p.numel()].view(p.shape) for o, p in zip(self.offsets, self.params)]

    def cut(self, shard: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """(index of the parameter, its 1-D part of `shard`) wherever this rank owns some of it."""
        parts = []
        for index, (offset, param) in enumerate(zip(self.offsets, self.params)):
            first = max(offset, self.start) - self.start
            last = min(offset + param.numel(), self.start + self.shard_numel) - self.start
            if first < last:
                parts.append((index, shard[first:last]))
        return parts

    def make_pieces(self) -> None:
        """Step 0: what the optimizer is handed: a tensor per parameter that this rank owns some of.

        Pieces and not the shard as one tensor, so that parameter groups, and parameters without a gradient, behave
        as in plain PyTorch. Each is a leaf, as optimizers want, on the shard's memory: updating it updates the shard.
        """
        loop.round_weights(self)  # in mixed precision: `flat` becomes bfloat16, say, beside a shard that stays float32
        self.pieces = [(index, part.detach().requires_grad_()) for index, part in self.cut(self.shard)]


def make_buckets(named_params, bucket_mb: float, rank: int, world_size: int, dtypes=(None, None)) -> list[Bucket]:
    """Fill buckets of at most `bucket_mb` MiB, last parameter first: backward finishes them in that order.

    With 0 every parameter gets its own, the articles' layout; so does one that is larger than `bucket_mb`.
    """
    runs, run_bytes = [], 0.0
    for name, param in reversed(named_params):
        nbytes = param.numel() * param.element_size()
        if not runs or run_bytes + nbytes > bucket_mb * 2**20 or param.dtype != runs[-1][-1][1].dtype:
            runs.append([])  # a dtype of its own as well: a buffer has only one
            run_bytes = 0
        runs[-1].append((name, param))
        run_bytes += nbytes
    return [Bucket(run, rank, world_size, dtypes) for run in runs]


class ZeRO1:
    """Data-parallel training of `model` with the optimizer state cut into N.

    `optimizer_cls` takes the list of this rank's pieces (1-D float tensors) and returns a `torch.optim.Optimizer` that
    treats each element by itself (SGD, Adam, AdamW, RMSprop, Adagrad; not Muon or Shampoo, which look at matrices);
    `param_groups` are a torch optimizer's, over the model's own parameters; `group` is the process group to shard over
    (default: all ranks); `bucket_mb` the size of a bucket in MiB, 0 for one parameter. All start from rank 0's
    parameters and buffers. Several backwards before a step add up, and send as much as one. `param_dtype` is that of
    weights and computation, `reduce_dtype` (default: the same) of the gradients' buffer; the shard keeps the model's.
    With `find_unused` a step may leave parameters without gradient, on some ranks or all, for one small all-reduce.
    Errors, on every rank: RuntimeError without a process group, ValueError, TypeError. Paper 5.1, class `ZeRO_1`
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
            for bucket in self.trained:
                # The gradients' buffer stays from step to step: a large allocation costs more than filling it.
                bucket.flat_gradient = torch.zeros_like(bucket.flat, dtype=bucket.reduce_dtype)
                bucket.gradients = bucket.views(bucket.flat_gradient)
            for buffer in model.buffers():
                dist.broadcast(buffer, group_src=0, group=group)
        loop.prepare_forward(model, self.buckets, param_dtype)
        self.optimizer = loop.make_optimizer(optimizer_cls, self.trained, param_groups)
        self.zero_grad()
        for bucket in self.trained:
            for index, param in enumerate(bucket.params):
                # Called when `param.grad` is final for this backward, however often `param` was used.
                param.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket, index))

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def training_step(self, inputs, targets, loss_fn) -> torch.Tensor:
        """One whole step on this rank's batch; returns this rank's loss, detached."""
        with record_function("step 1 forward"):
            loss = loss_fn(self(inputs), targets)
        with record_function("step 2 backward"):
            loss.backward()
        self.step()
        self.zero_grad()
        return loss.detach()

    def step(self) -> None:
        """Steps 3 to 5, after `backward()`: from local gradients to updated parameters on every rank."""
        with record_function("step 3 reduce gradients"):
            self._sync_gradients()
        with record_function("step 4 update the shard"):
            self.optimizer.step()
        with record_function("step 5 gather parameters"):
            self._sync_params(self.trained)  # the frozen ones have not changed

    def _on_gradient(self, bucket: Bucket, index: int, param: nn.Parameter) -> None:
        """Called inside step 2: move `param.grad` into the bucket's buffer, so that it exists only once."""
        gradient = bucket.gradients[index]
        store = gradient.add_ if self.find_unused or param in bucket.used else gradient.copy_  # over the last step's
        store(param.grad)
        bucket.used.add(param)  # since `zero_grad`
        param.grad, self._reduced = None, False  # so `_sync_gradients` has something to do

    def no_sync(self):
        """For all but the last of several backwards before a step. ZeRO-1 sends nothing before `step()` anyway."""
        return contextlib.nullcontext()

    def _sync_gradients(self) -> None:
        """Step 3: average the gradients over the ranks, and hand this rank's slices to the optimizer."""
        if self._reduced:
            return  # `clip_grad_norm_` has been here
        loop.require_gradients(self.trained, self.find_unused)
        works = []
        for bucket in self.trained:
            # Every rank gets all averaged gradients and uses 1/N of them: the articles' sequence, 2Ψ here and 3Ψ in
            # all. The paper has a reduce-scatter for this stage too, Ψ and 2Ψ in all, as ZeRO-2 does.
            # async_op: started, and finished by the `wait` below, so that all buckets travel at once.
            works.append(dist.all_reduce(bucket.flat_gradient, group=self.group, async_op=True))
        for bucket, work in zip(self.trained, works):
            loop.wait(work, "all-reduce", bucket)
            bucket.flat_gradient.div_(self.world_size)  # after the sum, which is rounded once and not on every rank
            shard = bucket.flat_gradient[bucket.start : bucket.start + bucket.shard_numel]
            for (_, piece), (_, gradient) in zip(bucket.pieces, bucket.cut(shard)):
                piece.grad = gradient.to(piece.dtype)  # of the same dtype: a view, no copy
        if self.find_unused:
            loop.drop_unused(self.trained, self.group)
        self._reduced = True

    def _sync_params(self, buckets: list[Bucket]) -> None:
        """Step 5: every rank contributes the shard it has just updated, straight into the weights."""
        works = []
        for bucket in buckets:
            shard = loop.rounded_shard(bucket)  # in float32 the shard itself, a slice of the output, as is allowed
            works.append(dist.all_gather_single(bucket.flat, shard, group=self.group, async_op=True))
        for bucket, work in zip(buckets, works):
            loop.wait(work, "all-gather", bucket)

    def zero_grad(self) -> None:
        """Drop all gradients (their buffer stays for the next backward). Call it after `step()`."""
        self.model.zero_grad()
        self._reduced = False
        for bucket in self.trained:
            bucket.used = set()  # the parameters that got a gradient since
            if self.find_unused:
                bucket.flat_gradient.zero_()  # what stays unused here must send none, or after a clip the others'
            for _, piece in bucket.pieces:
                piece.grad = None

    # Not the lesson, and alike in every stage: the docstrings are in harness/engine/loop.py.
    clip_grad_norm_ = loop.clip_grad_norm_
    full_state_dict = loop.full_state_dict
    load_full_state_dict = loop.load_full_state_dict


def main() -> None:
    from harness.run import walkthrough

    walkthrough.run(ZeRO1, __doc__)


if __name__ == "__main__":
    main()
