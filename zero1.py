"""ZeRO-1: every rank keeps 1/N of the optimizer state.

In data-parallel training (DDP) N processes train one model together. Each has the whole model and its own batch. They
average their gradients, so all of them make the same update, and all of them keep the same optimizer state: N copies.
Under ZeRO-1 a process owns 1/N of the parameters. It keeps the optimizer state for this part only and updates this part
only. Then the processes exchange what they have updated. This is the first of three stages: ZeRO-2 (zero2.py) divides
the gradients too, and ZeRO-3 (zero3.py) the parameters.

                       rank 0       rank 1       rank 2       rank 3
    parameters       [########]   [########]   [########]   [########]
    gradients        [########]   [########]   [########]   [########]
    optimizer state  [##      ]   [  ##    ]   [    ##  ]   [      ##]

If torch.distributed is new to you: `torchrun --nproc-per-node 2 zero1.py` starts this file twice. In environment
variables it gives each process its number, the number of processes and an address to meet at. Each process is a
**rank** with its own number, its own memory and, if there are enough, its own GPU. `init_process_group` connects them
in a **process group**. A tensor can be cut into N equal **shards**, one for each rank; a tensor that is not cut is
**whole**. Ranks exchange tensors by **collectives**, calls that every rank must make, in the same order:

                     before:  rank 0   rank 1       after:  rank 0   rank 1
    all-reduce                1 2      3 4                  4 6      4 6        every rank gets the whole sum
    reduce-scatter            1 2      3 4                  4        6          each rank gets its shard of the sum
    all-gather                1        2                    1 2      1 2        every rank gets the shards of all ranks
    broadcast                 1 2      3 4                  1 2      1 2        every rank gets what rank 0 has

An all-reduce is a reduce-scatter and then an all-gather of the sum, so it sends twice as much as one of them. With
`async_op=True` a collective only starts, and returns a `work`, so that the rank can compute meanwhile. `work.wait()`
makes its result usable. With gloo, torch's library for CPUs, Python waits there until the data has come. With NCCL, the
one for GPUs, Python continues, and only the GPU waits: the operations that are queued after the wait run after the
collective.

One step of two ranks with four weights and plain SGD, learning rate 0.1. Rank 0 owns the first two weights:

                                 rank 0                   rank 1
    0 partition, 1 forward       1.0  2.0  3.0  4.0       1.0  2.0  3.0  4.0      the weights
    2 backward                   2    0    4    2         4    2    0    6        local gradients, of different batches
    3 reduce                     3    1    2    4         3    1    2    4        their mean: one all-reduce
    4 update                     0.7  1.9  3.0  4.0       1.0  2.0  2.8  3.6      the other half is stale (old)
    5 gather                     0.7  1.9  2.8  3.6       0.7  1.9  2.8  3.6      one all-gather

All chapters number the steps like this. Run it: torchrun --nproc-per-node 2 zero1.py. It trains a small model, and
prints its losses, which are the same in all chapters, and what each rank holds. `--trace` prints what is sent, gathered
and freed in the last step. Paper: ZeRO (Rajbhandari et al., 2020), section 5.1. Article: "AI in Multiple GPUs: ZeRO &
FSDP", class `ZeRO_1`.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.profiler import record_function  # names a part of the step in profiles; computes nothing
from torch.utils._python_dispatch import TorchDispatchMode

# Every rank sends one shard and receives all of them. (torch 2.13 renamed this collective.)
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ZeRO1:
    """Train `model` on several ranks, each of which keeps 1/N of the optimizer state.

    optimizer   a torch optimizer over the model's parameters. From here on it updates this rank's shards, which replace
                the parameters in its `param_groups`. A learning-rate scheduler on it keeps working.
    bucket_mb   parameters are sent in buckets of at most this many MiB. Default: see `group_by_size`
    group       the process group, by default all ranks

    On all ranks: `loss_fn(engine(x), y).backward()`, then `engine.step()`, then `engine.zero_grad()`. Several backwards
    before a step add up.

    To clip, call `engine.reduce_gradients()` after backward. Then every rank has the whole mean in `param.grad`, so
    `torch.nn.utils.clip_grad_norm_` works as usual before `engine.step()`.

    The steps work on buckets (class `Bucket`, below). In a bucket several parameters lie end to end: their weights in
    `flat`, their gradients in `gradient`. `own` is the slice that this rank owns. `shard` is `flat[own]`, and
    `shard.grad` is `gradient[own]`. These are views, that is, the same memory under another name.
    """

    def __init__(self, model, optimizer, *, bucket_mb=None, group=None):
        self.model = model
        self.optimizer = optimizer
        self.group = group
        self.check()
        self.world_size = dist.get_world_size(group)
        with record_function("step 0 partition"), torch.no_grad():  # autograd must not record these copies
            self.buckets = self.partition(bucket_mb)
            self.take_over_optimizer()
        self.zero_grad()

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
        for bucket in self.buckets:
            bucket.shard.grad = None  # not reduced yet: so the next `step()` reduces again

    def reduce_gradients(self):
        """Step 3: average the gradients over the ranks, and hand this rank's part to the optimizer.

        An all-reduce brings the whole mean to every rank, although the optimizer uses only 1/N of it. A reduce-scatter
        would bring only this part, and send half as much: ZeRO-2 does that. In return `param.grad` is afterwards what
        it is under DDP, so all code that reads or clips gradients still works.

        DDP sends its gradients while backward computes the next ones. Here they are sent after backward, because that
        needs no hooks (functions of ours that autograd would call during backward). Chapter 2 has them.
        """
        if self.buckets[0].shard.grad is not None:
            return  # they are reduced: you called this before `step()`, and may have clipped them since
        check_gradients(self.buckets)  # of all buckets, before anything is sent
        # All buckets are started before the first one is waited for. So the network always has the next one to send,
        # also while this rank divides the one that has arrived.
        works = [self.start_reduce(bucket) for bucket in self.buckets]
        for bucket, work in zip(self.buckets, works):
            work.wait()
            self.finish_reduce(bucket)

    def start_reduce(self, bucket):
        with record_function(f"send {bucket.name}"):
            return dist.all_reduce(bucket.gradient, group=self.group, async_op=True)

    def finish_reduce(self, bucket):
        with record_function(f"receive {bucket.name}"):
            bucket.gradient /= self.world_size
            bucket.shard.grad = bucket.gradient[bucket.own]  # a view, no copy

    def zero_grad(self):
        """Clear all gradients, after `step()`."""
        for bucket in self.buckets:
            bucket.gradient.zero_()
            bucket.shard.grad = None  # until step 3 there is no mean
            for param, grad in zip(bucket.params, bucket.grads):
                param.grad = grad  # again, in case somebody has replaced it

    # Step 0, which runs only at the build. Some methods have one line only, so that zerolab/engine, which builds on the
    # chapters, can override them.

    def check(self):
        check_model(self.model, self.group)
        check_optimizer(self.model, self.optimizer)

    def partition(self, bucket_mb):
        """Step 0: decide which rank owns what."""
        self.broadcast_untrained()
        runs = self.make_runs(bucket_mb)
        buckets = [self.make_bucket(f"bucket {index}", run) for index, run in enumerate(runs)]
        for bucket in buckets:
            bucket.make_gradient()
        return buckets

    def broadcast_untrained(self):
        """Step 0: frozen parameters and buffers start as rank 0's and stay whole. No stage changes them later."""
        broadcast_whole(self.model.parameters(), self.group)
        broadcast_whole(self.model.buffers(), self.group)

    def make_runs(self, bucket_mb):
        return group_by_size(self.model, bucket_mb)

    def make_bucket(self, name, named_params):
        return Bucket(name, named_params, self.group)

    def take_over_optimizer(self):
        take_over(self.optimizer, self.buckets)
        self.optimizer.zero_grad = refuse_zero_grad


class Bucket:
    """Parameters laid end to end in one flat buffer, which is cut into N equal shards. Rank r owns shard r.

    An example: N = 4, and parameters a to d with 15, 3, 9 and 3 elements. Everything begins at a multiple of 16 bytes,
    which are 4 elements in float32 (see `alignment`). So `offsets` are 0, 16, 20 and 32:

        element  0         10        20        30        40
        flat     aaaaaaaaaaaaaaa.bbb.ccccccccc...ddd.............     (a dot is padding, zeros)
        shard    000000000000111111111111222222222222333333333333     (the rank that owns it)

    Cuts fall inside parameters, and a shard may be all padding. If each rank owned whole layers, some ranks would own
    more than others, and all would wait for them. The optimizer gets the shard as one flat tensor. So it must treat
    each element by itself, as SGD and AdamW do.

    tensor      shape           memory                                       lives
    flat        (numel,)        its own; every weight is a view of it        always
    shard       (shard_numel,)  a view of `flat`                             always
    gradient    (numel,)        its own; every `param.grad` is a view of it  always. ZeRO-2 and -3 do not have it
    shard.grad  (shard_numel,)  a view of `gradient`                         from step 3 to the end of `step()`
    """

    def __init__(self, name, named_params, group):
        self.name = name  # for profiles
        self.names, self.params = zip(*named_params)  # all of one dtype
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.assign_places()
        start = dist.get_rank(group) * self.shard_numel
        self.own = slice(start, start + self.shard_numel)  # this rank's part of a whole buffer
        self.flat = self.flatten()
        self.shard = self.make_shard()
        self.gradient = None  # ZeRO-2 and -3 do not have this buffer; see `make_gradient`

    def assign_places(self):
        """Step 0: where each parameter begins in `flat`, and how large `flat` and its shards are, in elements."""
        align = self.alignment()
        self.offsets = []
        end = 0
        for param in self.params:
            self.offsets.append(end)
            end += round_up(param.numel(), align)
        shard = round_up(max(end, 1), self.world_size) // self.world_size  # at least one element
        self.shard_numel = round_up(shard, align)
        self.numel = self.shard_numel * self.world_size

    def alignment(self):
        """In elements: 16 bytes, on a GPU 256. An operation may round differently on memory that is not aligned.

        With aligned weights the losses on two ranks equal DDP's to the bit.
        """
        param = self.params[0]
        nbytes = 256 if param.is_cuda else 16
        return max(1, nbytes // param.element_size())

    def flatten(self):
        """Step 0: move the parameters into one buffer, and make the model's weights views of it."""
        flat = self.lay_out(self.params, self.params[0].dtype)
        for index, param in enumerate(self.params):
            # The same Parameter as before, in other memory: from here on, writing to `flat` writes to the weight.
            # Autograd does not notice such writes; see `gather_parameters`.
            param.data = self.place(flat, index)
        broadcast_whole([flat], self.group)  # all ranks start with rank 0's weights
        return flat

    def lay_out(self, tensors, dtype):
        """A new whole buffer (numel,): the given tensors, one per parameter, in their places, and zeros as padding."""
        flat = torch.empty(self.numel, dtype=dtype, device=self.params[0].device)
        next_offsets = [*self.offsets[1:], self.numel]
        for index, tensor in enumerate(tensors):
            self.place(flat, index).copy_(tensor)
            flat[self.offsets[index] + tensor.numel() : next_offsets[index]].zero_()
        return flat

    def make_shard(self):
        """Step 0: this rank's part of `flat`, which the optimizer updates."""
        return self.flat[self.own]

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
        # `flat` receives all shards. In ZeRO-1 and -2 `shard` is a view of it, so it is sent and received in one place.
        return all_gather(self.flat, self.shard, group=self.group, async_op=True)


def gather_parameters(buckets):
    """Step 5: all buckets are started before the first one is waited for."""
    works = []
    for bucket in buckets:
        with record_function(f"gather {bucket.name}"):
            works.append(bucket.gather())
    for bucket, work in zip(buckets, works):
        work.wait()
        # A tensor has a version, a number that autograd compares in backward, to detect a weight that was changed after
        # forward. Writing to `flat` does not raise the version of a parameter, so it is raised here. Then a backward
        # through a graph that was built before this step raises an error, as in plain PyTorch, and does not mix old and
        # new weights.
        increment_version(bucket.params)


def group_by_size(model, bucket_mb):
    """All trained parameters in runs, one for each bucket: lists of (name, parameter) with at most `bucket_mb` MiB.

    A parameter that is larger has its own run.

    A collective has a fixed cost, so parameters share buckets. From ZeRO-2 on, a bucket is sent while backward computes
    the next one, so there must be several. The default is 1/6 of the model's bytes, at least 1 MiB and at most 25 MiB.
    With 0 every parameter has its own bucket.
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


def broadcast_whole(tensors, group):
    """Step 0: every rank gets rank 0's values of these tensors, except those that require a gradient.

    The trained parameters are skipped because they are sent later, bucket by bucket, as `flat`.
    """
    for tensor in tensors:
        if not tensor.requires_grad and tensor.layout is torch.strided:  # each rank keeps its own sparse buffers
            whole = tensor.contiguous()  # a collective needs memory without gaps
            as_bytes = whole.reshape(-1).view(torch.uint8)  # gloo and NCCL do not know every dtype
            dist.broadcast(as_bytes, group_src=0, group=group)
            if whole is not tensor:
                # Not in place, because the elements of an expanded tensor share memory and cannot be written.
                tensor.data = torch.empty_like(tensor).copy_(whole)


def take_over(optimizer, buckets):
    """Step 0: the shards take the parameters' place in the optimizer's group. All options of the group stay."""
    (param_group,) = optimizer.param_groups
    param_group["params"][:] = [bucket.shard for bucket in buckets]
    param_group.pop("param_names", None)  # there if the optimizer was built over named_parameters()
    optimizer.register_step_pre_hook(refuse_early_step)


def round_up(number, multiple):
    return -(-number // multiple) * multiple


# The demo, the same for all three chapters. It is not part of ZeRO, and can be skipped.


class Model(nn.Module):
    """Reads 16 bytes of text, and scores each of the 256 values as the next byte: (batch, 16) -> (batch, 256)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.norm = nn.LayerNorm(256)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256, bias=False), nn.GELU()) for _ in range(6))
        self.head = nn.Linear(256, 256, bias=False)

    def forward(self, characters):
        x = self.norm(self.embedding(characters).flatten(1))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Meter(TorchDispatchMode):
    """Measures the memory: while it is active, torch runs every operation through `__torch_dispatch__`."""

    def __init__(self, engine, trace):
        super().__init__()
        self.engine = engine
        self.trace = trace
        self.labels = []  # (open `record_function` label, bytes of whole parameters and gradients at its beginning)
        self.most_parameters = self.most_gradients = 0  # bytes of whole ones, at any operation so far
        self.at_update = {}  # the bytes that this rank holds when step 4 has updated its shards

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        params = list(self.engine.model.parameters())
        sent = getattr(self.engine, "in_flight", None)  # from ZeRO-2 on: whole gradients that are being sent
        parameters = held(params)
        gradients = held([*(param.grad for param in params), sent and sent.gradient])
        self.most_parameters = max(self.most_parameters, parameters)
        self.most_gradients = max(self.most_gradients, gradients)
        if function is torch.ops.profiler._record_function_enter_new.default:
            self.labels.append((args[0], parameters, gradients))
            if self.trace and args[0].startswith("step") and len(self.labels) == 1:
                print(args[0])
        if function is torch.ops.profiler._record_function_exit._RecordFunction and self.labels:
            label, parameters_before, gradients_before = self.labels.pop()
            if self.trace and label.startswith(("send", "receive", "gather", "free")):
                print(
                    f"    {label:20} whole parameters {parameters_before:9,} -> {parameters:9,} B, "
                    f"whole gradients {gradients_before:9,} -> {gradients:9,} B"
                )
            if label == "step 4 update the shard":
                tensors = params + self.engine.optimizer.param_groups[0]["params"]
                state = [value for values in self.engine.optimizer.state.values() for value in values.values()]
                self.at_update["parameters"] = held(tensors)
                self.at_update["gradients"] = held(tensor.grad for tensor in tensors)
                self.at_update["optimizer state"] = held(state)
        return result


def held(tensors):
    """Bytes of the storages under these tensors, each counted once. A freed storage has 0."""
    storages = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def main(stage, **options):
    """Train a small model to predict the next character of zero1.py. Print its losses and what each rank holds.

    stage     the class of the chapter
    options   its arguments, with their defaults here. Each can be changed on the command line.
    """
    chapter = f"{stage.__name__.lower()}.py"
    parser = argparse.ArgumentParser(usage=f"torchrun --nproc-per-node 2 {chapter} [options]")
    parser.add_argument("--trace", action="store_true", help="print the events of the last step of rank 0, in order")
    for name, default in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help="see the class")
    arguments = vars(parser.parse_args())
    if "RANK" not in os.environ:
        raise SystemExit(f"started without torchrun. Run: torchrun --nproc-per-node 2 {chapter}")
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
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = stage(model, optimizer, **{name: arguments[name] for name in options})
    draws = torch.Generator().manual_seed(rank)  # every rank has its own batches

    def train_one_step():
        starts = torch.randint(len(text) - 16, (64,), generator=draws).to(device)
        windows = text[starts[:, None] + torch.arange(17, device=device)]  # 16 characters and the next one
        return engine.training_step(windows[:, :16], windows[:, 16], nn.functional.cross_entropy)

    for step in range(1, 200):
        loss = train_one_step()
        if rank == 0 and step in (1, 10, 50, 100, 150):
            print(f"training step {step:3}: loss {loss.item():.3f} on the batch of rank 0")

    with Meter(engine, trace=arguments["trace"] and rank == 0) as meter:
        loss = train_one_step()
    if rank == 0:
        print(f"training step 200: loss {loss.item():.3f} on the batch of rank 0", flush=True)
    whole = sum(param.nbytes for param in model.parameters())
    under_ddp = {"parameters": whole, "gradients": whole, "optimizer state": 2 * whole}  # AdamW keeps two per weight
    for turn in range(engine.world_size):  # one rank after the other, so that the lines do not mix
        dist.barrier()
        if turn == rank:
            print(f"{stage.__name__}, rank {rank} of {engine.world_size}")
            for name, nbytes in meter.at_update.items():
                print(f"    held at the update: {nbytes / 1e6:.2f} MB of {name} (DDP: {under_ddp[name] / 1e6:.2f} MB)")
            print(
                f"    most that is whole at any moment: {meter.most_parameters / 1e6:.2f} MB of parameters, "
                f"{meter.most_gradients / 1e6:.2f} MB of gradients (shards not counted)",
                flush=True,
            )
    dist.barrier()  # else a rank that leaves early can abort the others
    dist.destroy_process_group()


# A first reading ends here. What follows is for reference: what a stage refuses, what it does not detect, what goes
# wrong if you delete a line, and what it costs.


# What a stage refuses.


def check_model(model, group):
    """Raise an error if a stage cannot train the model here. Called on all ranks, before anything is sent."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError("built inside torch.inference_mode(), where nothing can be trained: build it outside")
    if dist.get_rank(group) < 0:
        raise ValueError("this rank is not in `group`: only the ranks of the group build the stage")
    for module in model.modules():
        if type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            wrapper = type(module).__name__
            raise TypeError(f"the model is wrapped in {wrapper}, which reduces gradients too: pass the plain model")
    for name, param in model.named_parameters():
        if hasattr(param, "placements"):  # a DTensor, as `fully_shard` and tensor parallelism make them
            raise TypeError(f"parameter {name!r} is a DTensor, so it is sharded already: pass the plain model")
    devices = {param.device for param in model.parameters()}
    if len(devices) > 1 or any(device.type == "meta" for device in devices):
        raise ValueError(f"the parameters are on {sorted(map(str, devices))}: move the model to one device first")


def check_optimizer(model, optimizer):
    """Raise an error if the optimizer does not fit the model, or cannot work on flat shards."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected an optimizer, such as torch.optim.AdamW(model.parameters()), got {optimizer!r}")
    if type(optimizer).__name__ in ("LBFGS", "Muon", "Adafactor"):
        raise ValueError(f"{type(optimizer).__name__} looks at whole tensors, and a shard is flat: use AdamW or SGD")
    if len(optimizer.param_groups) > 1:
        raise ValueError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, and a chapter supports one: use "
            "zerolab.engine"
        )
    if optimizer.state:
        raise ValueError(
            f"the {type(optimizer).__name__} has state for whole parameters already. If it has made steps, build a new "
            "one over the model's parameters. If its constructor makes the state, as Adagrad's does, use zerolab.engine"
        )
    check_parameters(model, optimizer)


def check_parameters(model, optimizer):
    """Raise ValueError unless the optimizer has all trained parameters of the model, and no other ones."""
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


def check_gradients(buckets):
    """Raise RuntimeError for a gradient that is not in its bucket any more, because it would not be sent."""
    for bucket in buckets:
        for name, param, grad in zip(bucket.names, bucket.params, bucket.grads):
            if param.grad is not grad:
                raise RuntimeError(
                    f"param.grad of {name!r} was replaced, so its gradient is not in the bucket. Change gradients in "
                    "place, clear them with zero_grad() of this stage and not of the model, and call backward() "
                    "without create_graph=True. Call zero_grad() of this stage now, then run forward again"
                )


def refuse_early_step(optimizer, args, kwargs):
    """torch calls this before each `optimizer.step()`, which would skip shards that have no gradient yet."""
    for param_group in optimizer.param_groups:
        if any(shard.grad is None for shard in param_group["params"]):
            raise RuntimeError("optimizer.step() was called before the gradients were reduced: call engine.step()")


def refuse_zero_grad(set_to_none=True):
    """Takes the place of ZeRO-1's `optimizer.zero_grad()`, which would clear the shard and leave `param.grad`."""
    raise RuntimeError(
        "optimizer.zero_grad() would clear this rank's shard only, and the gradients of all steps would add up: call "
        "zero_grad() of this stage"
    )


# To save, after `step()`: the model is whole on every rank, so rank 0 saves `model.state_dict()`. Each rank saves its
# own `optimizer.state_dict()`, which fits only the same number of ranks and the same buckets. (The checkpoints of
# zerolab/engine have no such limit.)
#
# What ZeRO-1 trains
#
# - Any model on one device: tied, frozen, recomputed, of several dtypes, with evaluations in between.
# - Parameters that are not used: their gradient is zero, so AdamW still decays them.
# - Batches of the same size on all ranks, because only then the mean over ranks is the mean over samples.
#
# What it raises
#
# - At the build, on all ranks and before anything is sent: what `check_model` and `check_optimizer` refuse.
# - In `step()`: a `param.grad` that is not the one made here any more. `model.zero_grad()`, `param.grad = None` and
#   `backward(create_graph=True)` replace it.
# - In `optimizer.step()`, called by you or by a GradScaler: gradients that are not reduced yet.
# - In `optimizer.zero_grad()`: use `zero_grad()` of the stage.
# - In backward: a graph built before the last `step()`, as in plain PyTorch ("modified by an inplace operation").
#
# What it does not detect
#
# - Weights that are replaced, moved (`model.to`), frozen or unfrozen after the build: they are no longer trained.
# - A forward that writes to weights, such as `Embedding(max_norm=...)`: each rank writes for its own batch, and the
#   next step 5 overwrites what is not in this rank's shard.
# - A model that differs between ranks, or a rank that does not call `step()`: the others wait for it.
# - torch's `clip_grad_norm_` before `reduce_gradients()`: it clips by the norm of this rank's local gradients.
# - A backward after your own `reduce_gradients()`: it is no longer reduced.
# - `optimizer.step()` after your own `reduce_gradients()`: it does not gather the new weights.
# - A backward that raised an error, and is called again without `zero_grad()`: its first gradients count twice.
# - Optimizers that look at whole tensors under other names (LAMB, 8-bit states): they see flat shards.
# - An optimizer that exchanges weights itself (`optimizer.eval()` of a schedule-free one): only the shard changes.
# - `weight.as_strided(size, stride, offset)`: the offset counts from the start of the bucket.
# - A second stage over the same model. A copy or a pickle of the stage.
#
# What goes wrong if you delete a line. A test deletes each of them, and checks what is said here.
#
# - `work.wait()` in `ZeRO1.reduce_gradients`: silently wrong. The optimizer reads gradients that the collective is
#   still writing.
# - `check_gradients(self.buckets)` in `ZeRO1.reduce_gradients`: silently wrong after `model.zero_grad()`. Autograd
#   makes new gradients outside of the bucket. None of them is ever sent, and the mean of the first step is used
#   forever.
# - `bucket.gradient /= self.world_size` in `ZeRO1.finish_reduce`: silently wrong. Gradients are N times too large.
#   AdamW hides this, because it divides a gradient by its usual size; SGD does not.
# - `bucket.shard.grad = None` in `ZeRO1.step`: nothing, as long as you call `zero_grad()`. If you add up two steps
#   without it, the gradients of the second are not reduced.
# - `gather_parameters(self.buckets)` in `ZeRO1.step`: silently wrong. Each rank continues with N-1 stale shards.
# - `bucket.gradient.zero_()` in `ZeRO1.zero_grad`: silently wrong. The gradients of all steps add up.
# - `param.grad = grad` in `ZeRO1.zero_grad`: an error in the first `step()`, "param.grad of ... was replaced".
# - `self.broadcast_untrained()` in `ZeRO1.partition`: silently wrong, if ranks begin with different buffers or frozen
#   weights. They stay different.
# - `param.data = self.place(flat, index)` in `Bucket.flatten`: silently wrong. The buffer is trained, and the model is
#   not.
# - `broadcast_whole([flat], self.group)` in `Bucket.flatten`: silently wrong, if ranks begin with different weights.
#   The first step computes with them. Then step 5 makes one model out of pieces of all.
# - `work.wait()` in `gather_parameters`: silently wrong. Forward reads weights that the collective is still writing.
# - `increment_version(bucket.params)` in `gather_parameters`: silently wrong, if a backward uses a graph built before
#   the last step. It multiplies by the new weights.
#
# The cost. Ψ is the number of parameters; memory is in bytes (float32 and AdamW), traffic in elements.
#
#     held, DDP     4Ψ parameters + 4Ψ gradients + 8Ψ optimizer state        7e9 parameters: 112 GB
#     held, here    4Ψ parameters + 4Ψ gradients + 8Ψ/N optimizer state      N = 8: 63 GB
#     peak          8Ψ + 8Ψ/N + the largest gradient, on its way into the bucket, without activations
#     sent          2Ψ all-reduce + Ψ all-gather = 3Ψ per rank and step. DDP sends 2Ψ
#
# *Held* is what a rank has at step 4, when the activations and the buffers of backward are gone. The demo measures it
# when the shards have just been updated. The peak leaves out the activations, which forward keeps for backward, and the
# optimizer's temporary tensors. On a CPU AdamW makes three as large as the largest bucket's shard (2% of the demo's
# peak on two ranks). On a GPU its default (`foreach`) makes one as large as all shards together. With `fused=True`
# there are none. Then the formula is exact to 1% for the demo on 2, 4 and 8 ranks, with a batch of one.
#
# Everything that is sent has a factor (N-1)/N, which all chapters leave out. An all-reduce sends 2Ψ, because it is a
# reduce-scatter and an all-gather. The paper claims 2Ψ in all for this stage (section 7), which is possible only with a
# reduce-scatter in place of the all-reduce. Its memory, 4Ψ + 12Ψ/N (section 5.1), is of mixed precision: 2Ψ weights and
# 2Ψ gradients in half precision, and 12Ψ/N for float32 weights and the two states of Adam.


if __name__ == "__main__":
    main(ZeRO1, bucket_mb=0.25)
