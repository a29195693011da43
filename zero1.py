"""ZeRO-1: every rank keeps 1/N of the optimizer state.

N processes, called ranks, train one model together. In data-parallel training (DDP) every rank has the whole model and
its own batch. The ranks average their gradients, so all of them make the same update, and all of them keep the same
optimizer state: N copies. Under ZeRO-1 a rank owns 1/N of the parameters. It keeps the optimizer state for this part
only and updates this part only. Then the ranks exchange what they have updated.

                       rank 0       rank 1       rank 2       rank 3
    parameters       [########]   [########]   [########]   [########]
    gradients        [########]   [########]   [########]   [########]
    optimizer state  [##      ]   [  ##    ]   [    ##  ]   [      ##]

One step of two ranks with four weights and plain SGD, learning rate 0.1. Rank 0 owns the first two weights:

                                 rank 0                   rank 1
    0 partition, 1 forward       1.0  2.0  3.0  4.0       1.0  2.0  3.0  4.0      the weights
    2 backward                   2    0    4    2         4    2    0    6        local gradients, of different batches
    3 reduce                     3    1    2    4         3    1    2    4        their mean: one all-reduce
    4 update                     0.7  1.9  3.0  4.0       1.0  2.0  2.8  3.6      the other half is stale
    5 gather                     0.7  1.9  2.8  3.6       0.7  1.9  2.8  3.6      one all-gather

All chapters number the steps like this. Run it: torchrun --nproc-per-node 2 zero1.py
Paper: ZeRO (Rajbhandari et al., 2020), section 5.1. Article: "AI in Multiple GPUs: ZeRO & FSDP", class `ZeRO_1`.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function  # names a step in profiles; computes nothing

# torch 2.13 renamed this collective. Every rank sends one shard and receives all of them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ZeRO1:
    """Train `model` on several ranks, each of which keeps 1/N of the optimizer state.

    optimizer   a torch optimizer over the model's parameters, with one parameter group. From here on it updates this
                rank's shards, which take the parameters' place in its group. Schedulers keep working. (The article
                builds the optimizer over the shards. Here it is yours, so its options can follow the real parameters.)
    bucket_mb   see `group_by_size`
    group       the process group, by default all ranks

    In your own loop: `loss_fn(engine(x), y).backward()`, `engine.step()`, `engine.zero_grad()`, on all ranks. Several
    backwards before a step add up.

    Trains        any model on one device: tied, frozen, recomputed, of several dtypes, with evaluations in between. An
                  unused parameter has a gradient of zero, so AdamW still decays it. Batches must have the same size on
                  all ranks, because the mean over ranks is the mean over samples only then.
    Raises        in `check`, before anything is sent. In `step()`, for a `param.grad` that is no longer the one made
                  here (`model.zero_grad()`, `param.grad = None`, `backward(create_graph=True)`), and after
                  `optimizer.zero_grad()`. In `optimizer.step()`, called by you or by a GradScaler, before the gradients
                  are reduced.
    Not detected  - Weights that are replaced, moved (`model.to`), frozen or unfrozen after the build, or written to by
                    the forward itself (`Embedding(max_norm=...)`, on each rank for its own batch).
                  - A model that differs between ranks, or a rank that does not call `step()`: the others wait.
                  - torch's `clip_grad_norm_`: it clips by the norm of this rank's local gradients.
                  - `optimizer.zero_grad(set_to_none=False)`, which clears a part of the gradients.
                  - After your own `reduce_gradients()`: another backward, which is not reduced any more, and
                    `optimizer.step()`, which does not gather the new weights.
                  - Optimizers that look at whole tensors (LAMB, 8-bit states chosen by size): they see flat shards.
                  - `weight.as_strided(size, stride, offset)`: the offset counts from the start of the bucket.
                  - A second stage over the same model. A copy or a pickle of the stage.
    """

    def __init__(self, model, optimizer, *, bucket_mb=None, group=None):
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.check()
        self.world_size = dist.get_world_size(group)
        self.reduced = False  # True from step 3 to the end of `step()`
        self.cleared = True  # True from `zero_grad()` to step 3
        with record_function("step 0 partition"), torch.no_grad():
            self.buckets = self.partition(bucket_mb)
            self.take_over_optimizer()
        self.zero_grad()

    def check(self):
        """Raise an error for what cannot be trained, on every rank alike and before anything is sent."""
        check_model(self.model, self.group)
        check_optimizer(self.model, self.optimizer)

    def partition(self, bucket_mb):
        """Step 0: decide which rank owns what."""
        self.broadcast_untrained()
        buckets = [self.make_bucket(run) for run in group_by_size(self.model, bucket_mb)]
        for bucket in buckets:
            bucket.make_gradient()
        return buckets

    def broadcast_untrained(self):
        """Step 0: frozen parameters and buffers start as rank 0's and stay whole. No stage changes them later."""
        broadcast_whole(self.model.parameters(), self.group)
        broadcast_whole(self.model.buffers(), self.group)

    def make_bucket(self, named_params):
        return Bucket(named_params, self.group)

    def take_over_optimizer(self):
        """Step 0: the optimizer gets this rank's shards."""
        take_over(self.optimizer, self.buckets)

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def training_step(self, inputs, targets, loss_fn):
        """One whole step on this rank's batch. Returns this rank's loss, 0-d and detached."""
        with record_function("step 1 forward"):
            loss = loss_fn(self(inputs), targets)
        with record_function("step 2 backward"):
            loss.backward()  # autograd adds into `param.grad`, which is a view of the bucket's gradient buffer
        self.step()
        self.zero_grad()
        return loss.detach()

    def step(self):
        """Steps 3 to 5, after `backward()`: from local gradients to updated parameters on every rank."""
        with record_function("step 3 reduce gradients"):
            self.reduce_gradients()
        with record_function("step 4 update the shard"):
            self.optimizer.step()  # now this rank's shard of the weights is new, and the others are stale
        with record_function("step 5 gather parameters"):
            gather_parameters(self.buckets)
        self.reduced = False

    def reduce_gradients(self):
        """Step 3: average the gradients over the ranks, and hand this rank's part to the optimizer.

        As in the article, every rank receives the whole sum and uses 1/N of it. A reduce-scatter would bring only this
        part: ZeRO-2 does that. All buckets are started before the first one is waited for. A communicator runs its
        collectives one after the other in any case. But if each were waited for first, a CPU would queue the next one
        late, and a GPU could not divide one bucket while the next one travels.
        """
        if self.reduced:
            return  # you called it before `step()`, and may have changed the gradients of the shards since then
        self.check_gradients()  # of all buckets, before anything is sent
        works = [self.start_reduce(bucket) for bucket in self.buckets]
        for bucket, work in zip(self.buckets, works):
            work.wait()  # on a CPU Python waits here; on a GPU only the kernels queued after this wait
            self.finish_reduce(bucket)
        self.reduced = True
        self.cleared = False

    def start_reduce(self, bucket):
        return dist.all_reduce(bucket.gradient, group=self.group, async_op=True)

    def finish_reduce(self, bucket):
        bucket.gradient /= self.world_size
        bucket.shard.grad = bucket.gradient[bucket.own]  # a view, no copy

    def check_gradients(self):
        """Raise RuntimeError for a gradient that is not in its bucket any more. It would not be sent."""
        for bucket in self.buckets:
            for name, param, grad in zip(bucket.names, bucket.params, bucket.grads):
                if param.grad is not grad:
                    raise RuntimeError(
                        f"param.grad of {name!r} was replaced, so its gradient is not in the bucket. Change gradients "
                        "in place, clear them with zero_grad() of this stage and not of the model, and call backward() "
                        "without create_graph=True. Call zero_grad() of this stage now, then run forward again"
                    )
            if bucket.shard.grad is None and not self.cleared:
                raise RuntimeError(
                    "optimizer.zero_grad() cleared this rank's shard only, so the gradients of the last step are still "
                    "in the buckets. Call zero_grad() of this stage instead"
                )

    def zero_grad(self):
        """Clear all gradients, after `step()`."""
        self.reduced = False
        self.cleared = True
        for bucket in self.buckets:
            bucket.gradient.zero_()
            bucket.shard.grad = None  # until step 3 there is no mean
            for param, grad in zip(bucket.params, bucket.grads):
                param.grad = grad  # again, in case somebody has replaced it


class Bucket:
    """Parameters laid end to end in one flat buffer, which is cut into N equal shards. Rank r owns shard r.

    Say N = 4, everything begins at multiples of 4, and a to d have 15, 3, 9 and 3 elements. Then `offsets` are 0, 16,
    20 and 32:

        element  0         10        20        30        40
        flat     aaaaaaaaaaaaaaa.bbb.ccccccccc...ddd.............     (a dot is padding, zeros)
        shard    000000000000111111111111222222222222333333333333     (the rank that owns it)

    Cuts fall inside parameters, and a shard may be all padding. If each rank owned whole layers, some ranks would own
    more than others, and all would wait for them. The optimizer gets the shard as one flat tensor. So it must treat
    each element by itself, as SGD and AdamW do.

    tensor      shape           memory                                             lives
    flat        (numel,)        its own; every weight is a view of it              always (in ZeRO-3: while gathered)
    shard       (shard_numel,)  a view of `flat` (in ZeRO-3: its own)              always
    gradient    (numel,)        its own; every `param.grad` is a view of it        always, in ZeRO-1 only
    shard.grad  (shard_numel,)  a view of `gradient` (in ZeRO-2 and -3: its own)   from step 3 to `zero_grad()`
    """

    def __init__(self, named_params, group):
        self.names, self.params = zip(*named_params)  # all of one dtype
        self.group = group
        self.world_size = dist.get_world_size(group)
        align = self.alignment()
        self.offsets = []  # where each parameter begins in `flat`
        end = 0
        for param in self.params:
            self.offsets.append(end)
            end += round_up(param.numel(), align)
        largest = -(-max(end, 1) // self.world_size)  # end / N, rounded up, and never empty
        self.shard_numel = round_up(largest, align)
        self.numel = self.shard_numel * self.world_size
        start = dist.get_rank(group) * self.shard_numel
        self.own = slice(start, start + self.shard_numel)  # this rank's part of a whole buffer
        self.flat = self.flatten()
        self.shard = self.make_shard().requires_grad_(self.params[0].requires_grad)
        self.gradient = None  # ZeRO-1: see `make_gradient`
        self.missing = set()  # ZeRO-2 and -3: parameters whose gradient this backward has not produced yet

    def alignment(self):
        """16 bytes, on a GPU 256, in elements. Kernels may round differently on memory that is not aligned.

        With aligned weights the losses equal DDP's to the bit.
        """
        param = self.params[0]
        nbytes = 256 if param.is_cuda else 16
        return max(1, nbytes // param.element_size())

    def flatten(self):
        """Step 0: move the parameters into one buffer, and make the model's weights views of it."""
        flat = self.lay_out(self.params, self.params[0].dtype)
        for index, param in enumerate(self.params):
            # The same Parameter as before, in other memory: writing to `flat` now writes to the weights. Autograd does
            # not notice these writes, because `param.data = ...` keeps the parameter's own version counter.
            param.data = self.place(flat, index)
        broadcast_whole([flat], self.group)  # all ranks start with rank 0's weights
        return flat

    def lay_out(self, tensors, dtype):
        """A new whole buffer (numel,): the given tensors, one per parameter, in their places, and zeros between."""
        flat = torch.zeros(self.numel, dtype=dtype, device=self.params[0].device)
        for index, tensor in enumerate(tensors):
            self.place(flat, index).copy_(tensor)
        return flat

    def make_shard(self):
        """This rank's part of `flat`, which the optimizer updates. It is a leaf, because optimizers require leaves."""
        return self.flat[self.own].detach()

    def place(self, flat, index):
        """The place of one parameter in a whole buffer (numel,): a view in the parameter's shape."""
        begin = self.offsets[index]
        param = self.params[index]
        return flat[begin : begin + param.numel()].view(param.shape)

    def make_gradient(self):
        """Step 0 of ZeRO-1: a buffer for the gradients. Zeros, so that autograd can add to it and padding stays zero.

        Every `param.grad` is a view of it, made here once. So a gradient exists only once, and needs no hook to get
        into the bucket.
        """
        self.gradient = torch.zeros_like(self.flat)
        self.grads = [self.place(self.gradient, index) for index in range(len(self.params))]

    def gather(self):
        """Step 5: start to bring all shards into `flat`, and so into the weights. Returns the work, to wait for."""
        return all_gather(
            self.flat,  # receives all shards
            self.shard.detach(),  # is sent; in ZeRO-1 and -2 from its own place in `flat`
            group=self.group,
            async_op=True,
        )


def check_model(model, group):
    """Raise an error if a stage cannot train the model here."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("built inside torch.inference_mode(), where nothing can be trained: build it outside")
    if dist.get_rank(group) < 0:
        raise ValueError("this rank is not in `group`: only the ranks of the group build the stage")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError("the model is wrapped in DistributedDataParallel, which averages gradients, too: remove DDP")
    devices = {param.device for param in model.parameters()}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        raise ValueError(f"the parameters are on {sorted(map(str, devices))}: move the model to one device first")


def check_optimizer(model, optimizer, several_groups=False):
    """Raise an error if the optimizer does not fit the model, or cannot work on flat shards."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected an optimizer, such as torch.optim.AdamW(model.parameters()), got {optimizer!r}")
    if type(optimizer).__name__ in ("LBFGS", "Muon", "Adafactor"):
        raise ValueError(f"{type(optimizer).__name__} looks at whole tensors, and a shard is flat: use AdamW or SGD")
    if len(optimizer.param_groups) > 1 and not several_groups:
        raise ValueError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, a chapter supports one: use an engine"
        )
    in_optimizer = {param for param_group in optimizer.param_groups for param in param_group["params"]}
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if not trained:
        raise ValueError("no parameter requires a gradient: nothing to train. A frozen model needs no stage around it")
    left_out = [name for name, param in trained.items() if param not in in_optimizer]
    if left_out:
        raise ValueError(f"not in the optimizer: {left_out}. Give it model.parameters(), or freeze these parameters")
    foreign = in_optimizer - set(model.parameters())
    if foreign:
        raise ValueError(f"{len(foreign)} of the optimizer's parameters are not the model's: use model.parameters()")
    if any(state.get("step", 1) > 0 for state in optimizer.state.values()):
        raise ValueError("the optimizer has made steps already: build a new one, over the model's parameters")


def broadcast_whole(tensors, group):
    """Send rank 0's values of tensors that are not trained to all ranks."""
    for tensor in tensors:
        if not tensor.requires_grad and tensor.layout is torch.strided:  # each rank keeps its own sparse buffers
            whole = tensor.contiguous()  # a collective needs memory without gaps
            as_bytes = whole.reshape(-1).view(torch.uint8)  # gloo and NCCL do not know every dtype
            dist.broadcast(as_bytes, group_src=0, group=group)
            if whole is not tensor:
                tensor.data = torch.empty_like(tensor).copy_(whole)  # an expanded tensor could not be written to


def group_by_size(model, bucket_mb):
    """All trained (name, parameter), in runs of at most `bucket_mb` MiB, or one larger parameter. A run fills a bucket.

    A collective has a fixed cost, so parameters share buckets. From ZeRO-2 on, a bucket is sent while backward computes
    the next one, so there are several: the default is a sixth of the model, between 1 and 25 MiB. With 0 every
    parameter has its own bucket.
    """
    trained = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    if bucket_mb is None:
        model_mb = sum(param.nbytes for _, param in trained) / 2**20
        bucket_mb = min(25, max(1, model_mb / 6))
    runs = []
    room = 0
    dtype = None
    for name, param in reversed(trained):  # backward usually reaches the last ones first
        if param.nbytes > room or param.dtype != dtype:  # a buffer has one dtype
            runs.append([])
            room = bucket_mb * 2**20
            dtype = param.dtype
        runs[-1].append((name, param))
        room -= param.nbytes
    return runs


def take_over(optimizer, buckets):
    """Step 0: the shards take the parameters' place in the optimizer's group."""
    (param_group,) = optimizer.param_groups
    before = dict(optimizer.state)  # empty, except for Adagrad, which creates its state in its constructor
    optimizer.state.clear()  # else the state of whole parameters would stay alive
    for bucket in buckets:
        for key in before.get(bucket.params[0], {}):
            values = [before[param][key] for param in bucket.params]
            if key != "step":  # one value per element, so it is laid out and cut like the parameters
                optimizer.state[bucket.shard][key] = bucket.lay_out(values, values[0].dtype)[bucket.own].clone()
            else:
                optimizer.state[bucket.shard][key] = values[0]
    param_group["params"][:] = [bucket.shard for bucket in buckets]
    param_group.pop("param_names", None)  # there if the optimizer was built over named_parameters()
    optimizer.register_step_pre_hook(refuse_early_step)


def refuse_early_step(optimizer, args, kwargs):
    """torch calls this before each `optimizer.step()`, which would skip shards that have no gradient yet."""
    for param_group in optimizer.param_groups:
        if any(shard.grad is None for shard in param_group["params"]):
            raise RuntimeError("optimizer.step() was called before the gradients were reduced: call engine.step()")


def gather_parameters(buckets):
    """Step 5: all buckets are started before the first one is waited for."""
    works = [bucket.gather() for bucket in buckets]
    for work in works:
        work.wait()


def round_up(number, multiple):
    return -(-number // multiple) * multiple


def held(tensors):
    """Bytes of the storages under these tensors, each counted once. A freed storage has 0."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def main(stage):
    """Train a small model to predict the next character of zero1.py, and print what each rank holds."""
    if "RANK" not in os.environ:
        raise SystemExit(f"started without torchrun. Run: torchrun --nproc-per-node 2 {stage.__name__.lower()}.py")
    local_rank = int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count()
    backend = "nccl" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo"  # over gloo ranks can share a GPU
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    rank = dist.get_rank()

    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
    model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), *hidden, nn.Linear(256, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = stage(model, optimizer)
    draws = torch.Generator().manual_seed(rank)  # every rank has its own batches
    for step in range(1, 201):
        starts = torch.randint(len(text) - 16, (64,), generator=draws).to(device)
        windows = text[starts[:, None] + torch.arange(17, device=device)]  # 16 characters and the next one
        loss = nn.functional.cross_entropy(engine(windows[:, :16]), windows[:, 16])
        loss.backward()
        engine.step()
        shards = optimizer.param_groups[0]["params"]
        parameters = held([*model.parameters(), *shards])
        gradients = held(tensor.grad for tensor in [*model.parameters(), *shards])
        engine.zero_grad()
        if rank == 0 and step in (1, 10, 50, 100, 150, 200):
            print(f"step {step:3}: loss {loss.item():.3f} on the batch of rank 0")
    state = held(value for values in optimizer.state.values() for value in values.values())
    print(
        f"{stage.__name__}, rank {rank} of {engine.world_size}: holds {parameters / 1e6:.2f} MB of parameters, "
        f"{gradients / 1e6:.2f} MB of gradients, {state / 1e6:.2f} MB of optimizer state"
    )
    dist.barrier()  # else a rank that leaves early can abort the others
    dist.destroy_process_group()


# Without this line, that happens
#
# `gather_parameters` in `step`   each rank goes on with N-1 stale shards; nothing complains, it learns worse
# `work.wait()`                   the optimizer reads gradients, and forward weights, that are still being written
# `bucket.gradient /= ...`        gradients are N times too large, which AdamW hides and SGD does not
# `bucket.gradient.zero_()`       the gradients of all steps add up
# `check_gradients`               after `model.zero_grad()` autograd makes new gradients, and none is ever sent
# `broadcast_whole` in `flatten`  each rank trains its own model, with the mean of gradients of different models
#
# The cost. Ψ is the number of parameters; memory is in bytes (float32 and AdamW), traffic in elements.
#
#     held, DDP     4Ψ parameters + 4Ψ gradients + 8Ψ optimizer state        7e9 parameters: 112 GB
#     held, here    4Ψ parameters + 4Ψ gradients + 8Ψ/N optimizer state      N = 8: 63 GB
#     peak          8Ψ + 8Ψ/N + activations, which forward keeps for backward + one gradient on its way to the bucket
#     sent          2Ψ all-reduce + Ψ all-gather = 3Ψ per rank and step. DDP sends 2Ψ
#
# Everything that is sent has a factor (N-1)/N, which all chapters leave out. The paper claims 2Ψ for this stage
# (section 7); that takes a reduce-scatter in place of the all-reduce. Its memory, 4Ψ + 12Ψ/N (section 5.1), counts
# mixed precision. gloo, the library for CPUs, sends more, because its reduce-scatter is an all-reduce.


if __name__ == "__main__":
    main(ZeRO1)
