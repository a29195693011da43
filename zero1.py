"""ZeRO-1: every rank keeps 1/N of the optimizer state.

Several processes train one model together. Each process is a **rank**, usually with a GPU of its own. Their number N is
the **world size**. In data-parallel training (torch's is called DDP) every rank has the whole model. A rank computes
gradients on data of its own, the ranks average their gradients, and every rank makes the same update.

AdamW remembers two numbers for each parameter, its **optimizer state**. All ranks see the same average, so all keep the
same state: N copies of one thing. Under ZeRO-1 a rank owns 1/N of the parameters. It keeps the state of these alone and
updates these alone. Then the ranks give each other what they have updated.

                       rank 0       rank 1       rank 2       rank 3
    parameters       [########]   [########]   [########]   [########]
    gradients        [########]   [########]   [########]   [########]
    optimizer state  [##      ]   [  ##    ]   [    ##  ]   [      ##]     (really 1/N of each bucket)

One step of two ranks with four weights and plain SGD, learning rate 0.1. Rank 0 owns the first two, rank 1 the others:

                                 rank 0                   rank 1
    weights                      1.0  2.0  3.0  4.0       1.0  2.0  3.0  4.0
    2 backward: own gradients    2    0    4    2         4    2    0    6
    3 reduce:   their mean       3    1    2    4         3    1    2    4
    4 update:   own weights      0.7  1.9  .    .         .    .    2.8  3.6
    5 gather:   all weights      0.7  1.9  2.8  3.6       0.7  1.9  2.8  3.6

Words of torch:
    storage          the memory under a tensor. A view is another tensor on the same storage, perhaps on a part of it
    hook             a function that torch calls at a certain moment
Words of ZeRO:
    bucket           parameters laid end to end in one flat buffer, filled up with zeros (padding)
    shard            one of the N equal parts of a bucket. Rank r owns shard r
    piece            one parameter's elements inside this rank's shard. The optimizer is handed pieces
Words of communication:
    process group    the ranks that communicate. They all call a **collective** together, and in the same order
    all-gather       every rank gets all shards: `all_gather_single`, before torch 2.13 `all_gather_into_tensor`
    reduce-scatter   rank r gets shard r of the sum: `reduce_scatter_single`, before 2.13 `reduce_scatter_tensor`
    all-reduce       every rank gets the whole sum: a reduce-scatter and an all-gather in one
    work             a collective that was started: it is **in flight** until `work.wait()`. On a CPU Python waits
                     there. On a GPU the kernels queued after it wait, and Python goes on

Ψ is the number of parameters. In float32 each number takes 4 bytes, so a rank holds, in bytes:

    DDP    4Ψ parameters + 4Ψ gradients + 8Ψ optimizer state      (7e9 parameters: 112 GB)
    here   4Ψ parameters + 4Ψ gradients + 8Ψ/N optimizer state    (N = 8: 63 GB)
    peak   8Ψ + 8Ψ/N + one gradient on its way into the buffer; and activations, which forward keeps for backward

(The paper counts mixed precision, 2Ψ + 2Ψ + 12Ψ: the same sum, and ZeRO-1 leaves 4Ψ + 12Ψ/N.) In an all-gather or a
reduce-scatter of Ψ elements a rank sends Ψ (N-1)/N. All chapters leave this (N-1)/N out. DDP sends 2Ψ, an all-reduce.
ZeRO-1 sends 3Ψ here, and 2Ψ in the paper (see step 3).

A training step has parts with the same numbers in all chapters: step 0 partition (once), 1 forward, 2 backward,
3 reduce gradients, 4 update the shard, 5 gather parameters.

Paper: ZeRO (Rajbhandari et al., 2020), sections 5.1 "P_os" (memory) and 7 (traffic).
Article: "AI in Multiple GPUs: ZeRO & FSDP". Run it: ./launch.sh zero1 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function  # gives a step its name in profiles, and computes nothing

# What every stage needs and none teaches: checks, options, and the cases that are hard.
from harness.engine import gradient_hooks, gradients, guard, optimizer, precision, state, units
from harness.engine.interface import Interface
from harness.engine.placement import Placement
from harness.engine.tensor_parallel import local
from harness.engine.waiting import wait


class Bucket:
    """Parameters in one flat buffer, cut into one equal shard per rank.

    A collective has a fixed cost, so many parameters share a bucket, and the cuts fall where they fall. Say N = 4,
    and a to d have 15, 3, 9, 3 elements: `offsets` are 0, 16, 20, 32, multiples of 4; `numel` is 48, `shard_numel` 12:

        element  0         10        20        30        40
        flat     aaaaaaaaaaaaaaa.bbb.ccccccccc...ddd.............     (a dot is padding)
        shard    000000000000111111111111222222222222333333333333     (the rank that owns it)

    Rank 1 has three pieces: the end of a, all of b, and the start of c. Rank 3 owns only padding, and must still take
    part in every collective. Why not whole layers for each rank? Then all ranks would send a layer's gradients to its
    one owner, while the others' links idle. With N shards in each bucket all send and receive the same amount at any
    time. (Two of the articles cut each parameter by itself: `bucket_mb=0`.)
    """

    def __init__(self, named_params: list[tuple[str, nn.Parameter]], rank: int, world_size: int, dtypes=(None, None)):
        self.names, self.params = zip(*named_params)
        self.shapes = [local(param).shape for param in self.params]  # simply `param`, unless tensor parallelism is on
        self.param_dtype, self.reduce_dtype = precision.bucket_dtypes(self.params[0].dtype, *dtypes)  # None: its own
        # Every parameter and every shard starts on a multiple of 16 bytes (256 on a GPU). Unaligned tensors take
        # other kernels, which round differently; aligned, our losses match plain PyTorch's to the bit.
        align = precision.alignment(self.params[0], self.param_dtype)  # in elements
        self.offsets, end = [], 0
        for shape in self.shapes:
            self.offsets.append(end)
            end = round_up(end + shape.numel(), align)
        self.numel = round_up(max(end, 1), align * world_size)  # never 0, even if all parameters are empty
        self.shard_numel = self.numel // world_size
        self.start = rank * self.shard_numel  # where this rank's shard begins

    def flatten(self) -> None:
        """Step 0: move the parameters into one buffer, and make the model's weights views of it."""
        self.flat = local(self.params[0]).new_zeros(self.numel)  # zeros: NCCL's check for NaN looks at padding, too
        for param, view in zip(map(local, self.params), self.views(self.flat)):
            view.copy_(param.detach())
            # It stays the same object. From now on a collective that writes into `flat` writes into the weights.
            # (Autograd refuses saved tensors that were changed. It counts changes, and `param` has its own counter.)
            param.data = view
        self.shard = self.own_part(self.flat)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's place in a whole buffer (numel,), in the parameter's shape."""
        return [flat[start : start + shape.numel()].view(shape) for start, shape in zip(self.offsets, self.shapes)]

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

    def make_pieces(self, placement: Placement) -> None:
        """Step 0: what the optimizer is handed, one piece per parameter, as each may have its own weight decay."""
        placement.adopt(self)  # sets `bucket.placement`; in mixed precision or offload the shard gets its own memory
        trained = self.params[0].requires_grad  # as with all others of this bucket
        # `detach` makes another tensor on the shard's memory: updating a piece updates the shard.
        self.pieces = [(index, part.detach().requires_grad_(trained)) for index, part in self.cut(self.shard)]


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple  # -(-a // b) is a / b, rounded up


def gather_parameters(buckets: list[Bucket], group) -> None:
    """Step 5: every rank sends the shard that it has updated, and receives the others' straight into the weights."""
    works = []
    for bucket in buckets:
        shard = precision.rounded_shard(bucket)  # in float32 simply `bucket.shard`, and `sendable(flat)` simply `flat`
        # async_op: the collective is only started. All are queued before the first is waited for.
        works.append(dist.all_gather_single(precision.sendable(bucket.flat), shard, group=group, async_op=True))
    for bucket, work in zip(buckets, works):
        wait(work, "all-gather", bucket)  # `work.wait()`, and an error that names the bucket


class ZeRO1(Interface):
    """Data-parallel training of `model` with the optimizer state cut into N.

    Step 0, the set-up of all that the other steps use, stands last: `__init__`. `optimizer_cls` takes the list of this
    rank's pieces (1-D float tensors) and returns a `torch.optim.Optimizer` that treats each element by itself, as SGD
    and AdamW do (Muon looks at matrices). `bucket_mb` is a bucket's size in MiB (0: one per parameter), for the others
    see `Interface.prepare`. All ranks start from rank 0's parameters. Several backwards before a step add up, and send
    as much as one. Raises ValueError, TypeError or RuntimeError for what cannot work.
    """

    # The steps.

    def training_step(self, inputs, targets, loss_fn) -> torch.Tensor:
        """One whole step on this rank's batch. Returns this rank's loss, 0-d and detached."""
        with record_function("step 1 forward"):
            loss = loss_fn(self(inputs), targets)  # self(...) calls the model
        with record_function("step 2 backward"):
            loss.backward()  # and inside it autograd calls `on_gradient`, once for each parameter
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

        Every rank receives all averages and uses 1/N of them. That is one article's way: it sends 2Ψ, and 3Ψ with step
        5. The paper claims 2Ψ, which a reduce-scatter here would reach (./launch.sh exercise zero1_2psi). The
        all-reduce begins when backward is over, so nothing hides it. ZeRO-2 sends while backward computes.
        """
        if self.hooks.reduced:
            return  # already done: `clip_grad_norm_` needs the averages and has called this; no gradient came since
        works = []
        for bucket in self.trained_buckets:
            to_sum = precision.before_sum(bucket.flat_gradient, self.world_size)  # no change; float16: by a part of N
            works.append(dist.all_reduce(to_sum, group=self.group, async_op=True))
        for bucket, work in zip(self.trained_buckets, works):
            wait(work, "all-reduce", bucket)
            precision.mean_of_sum(bucket.flat_gradient, self.world_size)  # divided by (the rest of) N, in place
            own = bucket.own_part(bucket.flat_gradient)
            own = self.placement.final_shard(bucket, own)  # unchanged, but for replicas and offload
            for (_, piece), (_, gradient) in zip(bucket.pieces, bucket.cut(own)):
                piece.grad = gradient.to(piece.dtype)  # of the same dtype: a view, no copy
        gradients.require_all(self)  # sets `reduced`; error for a parameter without gradient, unless `find_unused`

    def zero_grad(self) -> None:
        """Drop all gradients, after `step()`. `flat_gradient` stays as it is, and `on_gradient` writes over it."""
        gradients.forget(self)  # `bucket.used`, what has a gradient in this step, is empty from here on

    # The moment at which ZeRO-1 acts inside step 2, and what triggers it.

    def watch_gradients(self) -> None:
        """Set up once: autograd calls a parameter's hook, and that `on_gradient`, whenever its gradient is finished."""
        for bucket in self.trained_buckets:
            for index, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(self.hooks.calling(self.on_gradient, bucket, index))

    def on_gradient(self, bucket: Bucket, index: int) -> None:
        """The gradient of `bucket.params[index]` is final. It moves into `flat_gradient`, so it exists only once."""
        place = bucket.gradient_views[index]
        gradient = guard.take_gradient(bucket.params[index])  # `param.grad`, which is None from now on
        if index in bucket.used:
            place.add_(gradient)  # a later backward of the same step
        else:
            place.copy_(gradient)  # the first one writes over what the step before has left there
            bucket.used.add(index)

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
            for bucket in self.trained_buckets:  # kept between steps: reusing it is cheaper than allocating it again
                bucket.flat_gradient = torch.zeros_like(bucket.flat, dtype=bucket.reduce_dtype)
                bucket.gradient_views = bucket.views(bucket.flat_gradient)
        self.optimizer = optimizer.over_pieces(self, optimizer_cls, param_groups)
        self.hooks = gradient_hooks.Hooks(self)  # calls `on_gradient`, and knows the hard cases
        self.watch_gradients()
        self.zero_grad()

    def _shards_changed(self) -> None:  # `load_full_state_dict` and others that write into shards call it
        gather_parameters(self.buckets, self.group)


def main() -> None:
    from harness.measure import walkthrough

    walkthrough.run(ZeRO1, __doc__)


if __name__ == "__main__":
    main()
