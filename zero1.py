"""ZeRO-1: every rank keeps 1/N of the optimizer state.

Several processes, called **ranks**, train one model together, usually each on a GPU of its own. Their number N is the
**world size**. In data-parallel training (torch's is DDP) every rank has the whole model, and data of its own. The
ranks average their gradients, so all make the same update, and all keep the same **optimizer state** (AdamW's is two
numbers for each parameter): N copies of one thing. Under ZeRO-1 a rank owns 1/N of the parameters. It keeps the state
of these alone and updates these alone. Then the ranks give each other what they have updated.

                       rank 0       rank 1       rank 2       rank 3
    parameters       [########]   [########]   [########]   [########]
    gradients        [########]   [########]   [########]   [########]
    optimizer state  [##      ]   [  ##    ]   [    ##  ]   [      ##]     (1/N of every bucket, see below)

One step of two ranks with four weights and plain SGD, learning rate 0.1. Rank 0 owns the first two (no padding here):

                                 rank 0                   rank 1
    weights                      1.0  2.0  3.0  4.0       1.0  2.0  3.0  4.0
    2 backward: own gradients    2    0    4    2         4    2    0    6
    3 reduce:   their mean       3    1    2    4         3    1    2    4
    4 update:   own weights      0.7  1.9  3.0  4.0       1.0  2.0  2.8  3.6     (the other half is old now)
    5 gather:   all weights      0.7  1.9  2.8  3.6       0.7  1.9  2.8  3.6

    view             a tensor on the memory of another one (on its **storage**), perhaps on a part of it
    hook             a function that torch calls at a certain moment
    bucket           parameters laid end to end in one flat buffer, filled up with zeros (padding)
    shard            one of the N equal parts of a bucket. Rank r owns shard r
    piece            one parameter's elements inside this rank's shard. The optimizer is handed pieces
    process group    the ranks that communicate. They all call a **collective** together, and in the same order
    all-gather       every rank gets all shards
    reduce-scatter   rank r gets shard r of the sum
    all-reduce       every rank gets the whole sum: a reduce-scatter and an all-gather in one
    work             a collective that was started: it is **in flight** until `work.wait()`. On a CPU Python waits
                     there. On a GPU the kernels queued after `wait()` wait, and Python goes on

Ψ is the number of parameters. A rank holds, in bytes (float32, AdamW), and sends per step, in elements:

    DDP    4Ψ parameters + 4Ψ gradients + 8Ψ optimizer state      (7e9 parameters: 112 GB)       2Ψ, an all-reduce
    here   4Ψ parameters + 4Ψ gradients + 8Ψ/N optimizer state    (N = 8: 63 GB)     3Ψ (see `reduce_gradients`)
    peak   8Ψ + 8Ψ/N + one gradient on its way into the bucket, and activations, which forward keeps for backward; or
           AdamW's temporary copies in the update (on a GPU some 4Ψ/N), if these are more

What is sent is really (N-1)/N of these numbers: all chapters leave the (N-1)/N out. (gloo, the library for CPUs, sends
more: its reduce-scatter is an all-reduce.) Steps have the same numbers in all chapters. Paper: ZeRO (Rajbhandari et
al., 2020), sections 5.1 "P_os", which counts mixed precision, 4Ψ + 12Ψ/N, and 7. Article: "AI in Multiple GPUs: ZeRO
& FSDP". Run it: ./launch.sh zero1 2
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.profiler import record_function  # gives a step its name in profiles, and computes nothing

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13


class Bucket:
    """Parameters in one flat buffer, cut into one equal shard per rank.

    Say N = 4, all begins at multiples of 4, and a to d have 15, 3, 9, 3 elements. Then `offsets` are 0, 16, 20, 32:

        element  0         10        20        30        40
        flat     aaaaaaaaaaaaaaa.bbb.ccccccccc...ddd.............     (a dot is padding)
        shard    000000000000111111111111222222222222333333333333     (the rank that owns it)

    Rank 1 has three pieces: the end of a, all of b, the start of c. Rank 3 owns padding alone, and takes part in every
    collective. If each rank owned whole layers, some would own more than others, and all would wait for these ranks.
    """

    def __init__(self, named_params, group):
        self.names, self.params = zip(*named_params)  # of one dtype, on one device
        self.group = group
        self.world_size = dist.get_world_size(group)
        align = self.alignment()  # in elements: all offsets, and the shard's size, are multiples of it
        self.offsets = []  # where each parameter begins in the flat buffer
        end = 0
        for param in self.params:
            self.offsets.append(end)
            end += -(-param.numel() // align) * align  # -(-a // b) is a / b, rounded up
        part = -(-end // self.world_size)
        part = max(part, 1)  # never empty, even if all parameters are
        self.shard_numel = -(-part // align) * align
        self.numel = self.shard_numel * self.world_size
        start = dist.get_rank(group) * self.shard_numel
        self.own = slice(start, start + self.shard_numel)  # this rank's part of a whole buffer
        self.cuts = []  # (number of a parameter, where its part begins in this rank's shard, where it ends)
        for index, param in enumerate(self.params):
            first = self.offsets[index] - start
            begin = max(first, 0)
            end = min(first + param.numel(), self.shard_numel)
            if begin < end:
                self.cuts.append((index, begin, end))
        self.flat = self.flatten()  # all parameters, (numel,)
        self.shard = self.flat[self.own]  # this rank's part: a view (shard_numel,)
        self.pieces = self.make_pieces()
        self.gradient = None  # ZeRO-1 alone: all gradients, (numel,), kept for ever
        self.missing = set()  # numbers of the parameters whose gradient has still to come

    def alignment(self):
        """16 bytes, on a GPU 256, in elements. Unaligned tensors take other kernels, which round differently."""
        param = self.params[0]
        nbytes = 256 if param.is_cuda else 16
        return nbytes // param.element_size()

    def flatten(self):
        """Step 0: move the parameters into one buffer, and make the model's weights views of it."""
        flat = self.params[0].new_zeros(self.numel)
        for index, param in enumerate(self.params):
            place = self.place(flat, index)
            place.copy_(param)
            param.data = place  # the same object as before, but who writes into `flat` now writes into the weights
        dist.broadcast(flat, group_src=0, group=self.group)  # all ranks start from rank 0's weights
        return flat

    def place(self, flat, index):
        """The place of one parameter in a whole buffer (numel,): a view in the parameter's shape."""
        begin = self.offsets[index]
        param = self.params[index]
        end = begin + param.numel()
        return flat[begin:end].view(param.shape)

    def cut(self, shard):
        """This rank's part of each parameter, where it has one: 1-D views of a shard (shard_numel,)."""
        return [shard[begin:end] for _, begin, end in self.cuts]

    def make_pieces(self):
        """A piece is a slice of the shard, which is a slice of `flat` (in ZeRO-3 a copy), which is the weights."""
        pieces = []
        for part in self.cut(self.shard):
            piece = part.detach()  # autograd does not see what the optimizer writes
            pieces.append(piece.requires_grad_())  # as optimizers expect of a parameter
        return pieces

    def gather(self):
        """Step 5: start to bring all shards into `flat`, and so into the weights. Returns the work."""
        return all_gather(
            self.flat,  # receives all shards
            self.shard,  # is sent; in ZeRO-1 and -2 from its own place in `flat`
            group=self.group,
            async_op=True,  # only start it: the caller waits
        )

    def watch(self, on_gradient):
        """Have autograd call `on_gradient(bucket, index, param)` whenever it has finished a `param.grad`."""
        for index, param in enumerate(self.params):
            hook = partial(on_gradient, self, index)
            param.register_post_accumulate_grad_hook(hook)

    def drop_gradients(self):
        for tensor in (*self.params, *self.pieces):
            tensor.grad = None

    def take_gradient(self, index):
        """`param.grad` of one parameter, which is None from now on."""
        param = self.params[index]
        gradient = param.grad
        param.grad = None
        if gradient.is_sparse:
            raise RuntimeError(f"sparse gradient of {self.names[index]!r}: build its embedding with sparse=False")
        return gradient

    def require_gradients(self):
        names = [self.names[index] for index in sorted(self.missing)]
        if names:
            raise RuntimeError(f"no gradient for {names}: use it in each backward, or freeze it before the build")


def by_size(model, bucket_mb):
    """All trained (name, parameter), in runs of at most `bucket_mb` MiB, or one that is larger. A run becomes a bucket.

    A collective has a fixed cost, so parameters share buckets. From ZeRO-2 on one is sent while backward computes the
    next, so there are several: the default is a sixth of the model, between 1 and 25 MiB. 0: one per parameter.
    """
    trained = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    if bucket_mb is None:
        model_mb = sum(param.nbytes for _, param in trained) / 2**20
        bucket_mb = min(25, max(1, model_mb / 6))
    runs = []
    room = 0
    dtype = None
    for name, param in reversed(trained):  # backward reaches the last ones first: they come first
        if param.nbytes > room or param.dtype != dtype:
            runs.append([])
            room = bucket_mb * 2**20
            dtype = param.dtype  # a buffer has one
        runs[-1].append((name, param))
        room -= param.nbytes
    return runs


def share_the_rest(model, group):
    """Step 0: frozen parameters and buffers start as rank 0's, stay whole, and are left alone (DDP sends buffers)."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.requires_grad:
            whole = tensor.contiguous()  # a collective reads memory from end to end, without gaps
            dist.broadcast(whole, group_src=0, group=group)
            tensor.copy_(whole)


def gather_parameters(buckets):
    """Step 5: all buckets are started before the first is waited for."""
    works = [bucket.gather() for bucket in buckets]
    for work in works:
        work.wait()


def over_pieces(optimizer_cls, buckets):
    """The optimizer of this rank. One that owns only padding has no piece; torch refuses an empty list."""
    pieces = []
    for bucket in buckets:
        pieces += bucket.pieces
    return optimizer_cls(pieces or [torch.zeros(0)])


class ZeRO1:
    """Data-parallel training of `model` with the optimizer state cut into N.

    `optimizer_cls` takes the list of this rank's pieces (1-D tensors) and returns a `torch.optim.Optimizer` that treats
    each element by itself, as SGD and AdamW do. `group`: the ranks (default: all). In a loop of your own:
    `loss_fn(engine(x), y).backward()`, `engine.step()`, `engine.zero_grad()`. Several backwards before a step add up.

    It trains any model, on one device, in which a backward gives each trained parameter one gradient, on all ranks
    alike. It does not see weights that are replaced, moved, frozen or unfrozen later, a `step()` between a forward and
    its backward, `optimizer.zero_grad()`, torch's clipping (which finds no `param.grad`), and optimizers that look at
    whole tensors (LAMB). The model's hooks keep it alive. `ZeRO1Engine` (harness/engine/stages.py) sees all that.
    """

    def __init__(self, model, optimizer_cls, *, bucket_mb=None, group=None):
        self.model = model
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.buckets = self.partition(bucket_mb)
        self.optimizer = over_pieces(optimizer_cls, self.buckets)
        self.watch_gradients()
        self.zero_grad()

    def partition(self, bucket_mb):
        """Step 0: who owns what."""
        with record_function("step 0 partition"), torch.no_grad():
            share_the_rest(self.model, self.group)
            buckets = [Bucket(run, self.group) for run in by_size(self.model, bucket_mb)]
            for bucket in buckets:
                bucket.gradient = torch.zeros_like(bucket.flat)  # reused in every step, which is cheaper than a new one
            return buckets

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def training_step(self, inputs, targets, loss_fn):
        """One whole step on this rank's batch. Returns this rank's loss, 0-d and detached."""
        with record_function("step 1 forward"):
            loss = loss_fn(self(inputs), targets)
        with record_function("step 2 backward"):
            loss.backward()  # inside it autograd calls `on_gradient`, once for each parameter
        self.step()
        self.zero_grad()
        return loss.detach()

    def step(self):
        """Steps 3 to 5, after `backward()`: from this rank's gradients to updated parameters on every rank."""
        with record_function("step 3 reduce gradients"):
            self.reduce_gradients()
        with record_function("step 4 update the shard"):
            self.optimizer.step()  # now this rank's shard of the weights is new, and the others' are old
        with record_function("step 5 gather parameters"):
            gather_parameters(self.buckets)

    def reduce_gradients(self):
        """Step 3: average the gradients over the ranks, and hand this rank's part to the optimizer.

        Every rank receives all sums and uses 1/N of them, as in the article. The paper claims 2Ψ with step 5: that
        takes a reduce-scatter (./launch.sh exercise zero1_2psi). Backward is over: nothing is computed meanwhile.
        """
        for bucket in self.buckets:
            bucket.require_gradients()  # of all, before anything is sent
        works = [dist.all_reduce(bucket.gradient, group=self.group, async_op=True) for bucket in self.buckets]
        for bucket, work in zip(self.buckets, works):
            work.wait()
            bucket.gradient /= bucket.world_size
            parts = bucket.cut(bucket.gradient[bucket.own])
            for piece, part in zip(bucket.pieces, parts):
                piece.grad = part  # a view, no copy

    def zero_grad(self):
        """Drop all gradients, after `step()`. The next backward writes over `bucket.gradient`."""
        for bucket in self.buckets:
            bucket.missing = set(range(len(bucket.params)))
            bucket.drop_gradients()

    def watch_gradients(self):
        """Set up once: autograd calls `on_gradient` whenever it has finished a `param.grad`."""
        for bucket in self.buckets:
            bucket.watch(self.on_gradient)

    def on_gradient(self, bucket, index, param):
        """Inside step 2: `param.grad` is finished. It moves into the bucket, so it exists only once."""
        gradient = bucket.take_gradient(index)  # were `param.grad` this place, `model.zero_grad()` would drop it
        place = bucket.place(bucket.gradient, index)
        if index in bucket.missing:
            place.copy_(gradient)  # over what the step before has left there
            bucket.missing.remove(index)
        else:
            place.add_(gradient)  # a later backward of the same step


# Without step 5 each rank goes on with N-1 old shards: nothing complains, it learns worse. Without `work.wait()` the
# optimizer reads gradients, and forward weights, that are still being written. Without `async_op` each collective waits
# for the one before. Without `missing` a parameter that got no gradient is updated with that of the step before.


def main():
    from harness.measure import walkthrough

    walkthrough.run(ZeRO1, __doc__)


if __name__ == "__main__":
    main()
