"""ZeRO-1: every rank keeps 1/N of the optimizer state.

Several processes train one model together. Each process is a **rank**, as a rule with a GPU of its own. Their number N
is the **world size**. In data-parallel training (torch's is called DDP) every rank has the whole model. A rank computes
gradients on data of its own, the ranks average their gradients, and every rank makes the same update.

AdamW remembers two numbers for each parameter, its **optimizer state**. All ranks see the same average, so all keep the
same state: N copies of one thing. Under ZeRO-1 a rank owns 1/N of the parameters. It keeps the state of these alone and
updates these alone. Then the ranks give each other what they have updated.

                       rank 0       rank 1       rank 2       rank 3
    parameters       [########]   [########]   [########]   [########]
    gradients        [########]   [########]   [########]   [########]
    optimizer state  [##      ]   [  ##    ]   [    ##  ]   [      ##]     (how much, not which)

Words of torch:
    storage          the memory under a tensor. A view is another tensor on the same storage, perhaps on a part of it
    leaf             what autograd sees as an input and not as a result. Backward puts a leaf's gradient in its `.grad`
    hook             a function that torch calls at a certain moment
Words of ZeRO:
    bucket           a run of parameters laid end to end in one flat buffer, filled up with zeros (padding), cut into N
    shard            one of the N equal parts of a bucket. Rank r owns shard r
    piece            one parameter's elements inside this rank's shard. The optimizer is handed pieces
Words of communication:
    collective       what all ranks call together, each with a tensor of its own, and in the same order on every rank
    all-gather       every rank gets all shards, in the order of the ranks (before torch 2.13 `all_gather_into_tensor`)
    reduce-scatter   rank r gets shard r of the sum of all ranks' tensors (before 2.13 `reduce_scatter_tensor`)
    all-reduce       every rank gets the whole sum: a reduce-scatter and an all-gather in one
    in flight        of a collective: started, and not yet waited for

Ψ is the number of parameters. In float32 each number takes 4 bytes, so a rank holds, in bytes:

    DDP    4Ψ parameters + 4Ψ gradients + 8Ψ optimizer state      (7e9 parameters: 112 GB)
    here   4Ψ parameters + 4Ψ gradients + 8Ψ/N optimizer state    (N = 8: 63 GB)
    peak   8Ψ + 8Ψ/N + one gradient on its way into the buffer; and activations: what forward keeps for backward

In an all-gather of Ψ elements a rank sends its shard to N-1 others, Ψ (N-1)/N in all; in a reduce-scatter likewise. All
chapters leave out this (N-1)/N. DDP sends 2Ψ, an all-reduce. ZeRO-1 sends 3Ψ here, and 2Ψ in the paper (see step 3).

A training step has parts with the same numbers in all chapters: step 0 partition (once), 1 forward, 2 backward,
3 reduce gradients, 4 update the shard, 5 gather parameters.

Paper: ZeRO (Rajbhandari et al., 2020), section 5.1, "P_os". Article: "AI in Multiple GPUs: ZeRO & FSDP".
Run it: ./launch.sh zero1 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function  # gives a step its name in profiles, and computes nothing

# What every stage needs and none teaches; the chapter can be read without it. `moments`: points in time, not Adam's.
from harness.engine import gradient_hooks, gradients, optimizer, precision, refusals, state, units
from harness.engine.interface import Interface
from harness.engine.placement import Placement
from harness.engine.tensor_parallel import local
from harness.engine.waiting import wait


class Bucket:
    """A run of parameters in one flat buffer, cut into one equal shard per rank.

    A collective has a fixed cost, so many parameters share a bucket, and the cuts fall where they fall:

        flat   | embedding ............ | norm | weight ................... | bias |pad|
        cut    | shard 0           | shard 1           | shard 2            | shard 3  |

    Two of the articles cut each parameter by itself. That is a bucket of one parameter (`bucket_mb=0`).

    Attributes, in elements: `offsets[i]` is where `params[i]` starts. `numel` is the size of `flat`, `shard_numel` that
    of this rank's `shard`, and `start` is where the shard begins. `param_dtype` is the dtype of `flat`, `reduce_dtype`
    that of gradients when they are sent; without mixed precision both are the parameters' own.
    """

    def __init__(self, named_params: list[tuple[str, nn.Parameter]], rank: int, world_size: int, dtypes=(None, None)):
        self.names, self.params = zip(*named_params)
        self.shapes = [local(param).shape for param in self.params]  # `param` itself, but for tensor parallelism
        self.strides = [torch.empty(shape, device="meta").stride() for shape in self.shapes]
        self.param_dtype, self.reduce_dtype = precision.bucket_dtypes(self.params[0].dtype, *dtypes)
        # Every parameter and every shard starts on a multiple of 16 bytes. For unaligned tensors torch takes other
        # routines, which round differently. So our losses equal those of plain PyTorch to the bit.
        align = max(1, 16 // min(self.params[0].dtype.itemsize, self.param_dtype.itemsize))
        self.offsets, end = [], 0
        for shape in self.shapes:
            self.offsets.append(end)
            end = round_up(end + shape.numel(), align)
        self.numel = round_up(max(end, 1), align * world_size)  # never 0, even if all parameters are empty
        self.shard_numel = self.numel // world_size
        self.start = rank * self.shard_numel

    def flatten(self) -> None:
        """Step 0: move the parameters into one buffer, and make the model's weights views of it."""
        self.flat = local(self.params[0]).new_zeros(self.numel)  # zeros: padding must never hold a NaN
        for param, view in zip(map(local, self.params), self.views(self.flat)):
            view.copy_(param.detach())
            # The parameter gets another storage and stays the same object, so the model notices nothing. From now on a
            # collective that writes into `flat` writes into the weights.
            param.data = view
        self.shard = self.own_part(self.flat)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's place in a whole buffer (numel,), in the parameter's shape."""
        # In one call: `flat[start : start + shape.numel()].view(shape)`. There may be thousands of parameters.
        return [flat.as_strided(*place) for place in zip(self.shapes, self.strides, self.offsets)]

    def own_part(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a whole buffer: a view (shard_numel,)."""
        return flat[self.start : self.start + self.shard_numel]

    def cut(self, shard: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """(index of the parameter, its elements in `shard`, a 1-D view) wherever this rank owns some of it."""
        parts, shard_end = [], self.start + self.shard_numel
        for index, (offset, shape) in enumerate(zip(self.offsets, self.shapes)):
            first, end = max(offset, self.start), min(offset + shape.numel(), shard_end)
            if first < end:
                parts.append((index, shard[first - self.start : end - self.start]))
        return parts

    def make_pieces(self, place: Placement) -> None:
        """Step 0: what the optimizer is handed. `detach` makes a leaf, as optimizers want, on the shard's memory.

        So updating a piece updates the shard. A shard may hold parts of several parameters, with another weight decay
        each, or without a gradient: so the optimizer gets a piece per parameter.
        """
        place.adopt(self)  # mixed precision and offload only: the shard moves into memory of its own
        trained = self.params[0].requires_grad
        self.pieces = [(index, part.detach().requires_grad_(trained)) for index, part in self.cut(self.shard)]


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple  # -(-a // b) is a / b, rounded up


def make_buckets(named_params, bucket_mb: float | None, *layout) -> list[Bucket]:
    """Bucket 0 holds the last parameters, for backward reaches them first. `layout` goes to `Bucket`."""
    return [Bucket(run, *layout) for run in units.by_size(named_params, bucket_mb)]


def partition(model: nn.Module, *layout) -> tuple[list[Bucket], list[Bucket]]:
    """(buckets of the trained parameters, buckets of the frozen ones). `layout` goes to `make_buckets`."""
    named = list(model.named_parameters())
    trained = [(name, param) for name, param in named if param.requires_grad]
    frozen = [(name, param) for name, param in named if not param.requires_grad]
    return make_buckets(trained, *layout), make_buckets(frozen, *layout)


def gather_parameters(buckets: list[Bucket], group) -> None:
    """Step 5: every rank sends the shard that it has updated, and receives the others' straight into the weights."""
    works = []
    for bucket in buckets:
        shard = precision.rounded_shard(bucket)  # in float32 `bucket.shard`; it may be a view of the output
        # async_op: the collective is only started, so that all buckets travel at once.
        works.append(dist.all_gather_single(precision.sendable(bucket.flat), shard, group=group, async_op=True))
    for bucket, work in zip(buckets, works):
        wait(work, "all-gather", bucket)  # `work.wait()`, and an error that names the bucket


class ZeRO1(Interface):
    """Data-parallel training of `model` with the optimizer state cut into N.

    `optimizer_cls` takes the list of this rank's pieces (1-D float tensors) and returns a `torch.optim.Optimizer` that
    treats each element by itself, as SGD and AdamW do (Muon looks at matrices). `group` is the process group or
    DeviceMesh to shard over (default: all ranks). `bucket_mb` is the size of a bucket in MiB, and `param_groups` are a
    torch optimizer's, over the model's parameters. `param_dtype` is that of weights and computation, `reduce_dtype`
    (default: the same) that of gradients when they are sent; shards keep the model's. `find_unused=True` lets a step
    leave parameters without a gradient. A mesh of two dimensions has replicas along the first, `offload_policy` moves
    shards to the host: engine/placement.py. All ranks start from rank 0's parameters and buffers. Several backwards
    before a step add up, and send as much as one.

    Raises ValueError, TypeError or RuntimeError for what cannot work. Source: paper, section 5.1; article's `ZeRO_1`.
    """

    def training_step(self, inputs, targets, loss_fn) -> torch.Tensor:
        """One whole step on this rank's batch. Returns this rank's loss, 0-d and detached."""
        with record_function("step 1 forward"):
            loss = loss_fn(self(inputs), targets)  # self(...) calls the model
        with record_function("step 2 backward"):
            loss.backward()
        self.step()
        self.zero_grad()
        return loss.detach()

    def step(self) -> None:
        """Steps 3 to 5, after `backward()`: from this rank's gradients to updated parameters on every rank."""
        with record_function("step 3 reduce gradients"):
            self._reduce_gradients()
        with record_function("step 4 update the shard"):
            self.optimizer.step()
        with record_function("step 5 gather parameters"):
            gather_parameters(self.trained_buckets, self.group)  # the frozen ones have not changed

    def _reduce_gradients(self) -> None:
        """Step 3: average the gradients over the ranks, and hand this rank's part to the optimizer.

        Every rank receives all averages and uses 1/N of them. This is one article's order: the all-reduce sends 2Ψ, and
        with step 5 it is 3Ψ. The paper has a reduce-scatter here, which sends Ψ (./launch.sh exercise zero1_2psi).
        The all-reduce begins when backward is over, so nothing hides it. ZeRO-2 sends while backward computes.
        """
        if self.hooks.reduced:
            return  # done: `clip_grad_norm_` needs the averages before `step`, and has called this
        works = []
        for bucket in self.trained_buckets:
            to_sum = precision.before_sum(bucket.flat_gradient, self.world_size)  # `flat_gradient` itself, in place
            works.append(dist.all_reduce(to_sum, group=self.group, async_op=True))
        for bucket, work in zip(self.trained_buckets, works):
            wait(work, "all-reduce", bucket)
            precision.mean_of_sum(bucket.flat_gradient, self.world_size)  # divided by N, in place
            shard = self.placement.final_shard(bucket, bucket.own_part(bucket.flat_gradient))  # that part, no copy
            for (_, piece), (_, gradient) in zip(bucket.pieces, bucket.cut(shard)):
                piece.grad = gradient.to(piece.dtype)  # of the same dtype: a view, no copy
        gradients.require_all(self)  # an error for a parameter without a gradient

    def zero_grad(self) -> None:
        """Drop all gradients, after `step()`. Their buffer stays: the next backward writes over it, later ones add."""
        gradients.forget(self)

    def _shards_changed(self) -> None:
        """`load_full_state_dict` has written new values into all shards: bring the weights up to date."""
        gather_parameters(self.buckets, self.group)

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
            for bucket in self.trained_buckets:  # it stays: to allocate it anew would take longer than to overwrite it
                bucket.flat_gradient = torch.zeros_like(bucket.flat, dtype=bucket.reduce_dtype)
        self.optimizer = optimizer.over_pieces(self, optimizer_cls, param_groups)
        self.hooks = gradient_hooks.CollectingHooks(self)  # from here on gradients move into `flat_gradient`
        self.zero_grad()


def main() -> None:
    from harness.measure import walkthrough

    walkthrough.run(ZeRO1, __doc__)


if __name__ == "__main__":
    main()
