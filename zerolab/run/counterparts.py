"""The engines that the stages are compared with: PyTorch's, built as users build them, and variants of the chapters."""

import inspect

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function
from torch.utils._python_dispatch import _disable_current_modes

from zero1 import ZeRO1
from zero2 import reduce_scatter
from zero3 import default_units
from zerolab.engine import ZeRO1Engine
from zerolab.run.micro_batches import Looped


class MixedModule(nn.Module):
    """Plain PyTorch's way to compute in a low precision with float32 weights: a cast that autograd knows.

    Weights are cast once per forward. Their gradients arrive in float32, and DDP reduces these. One process and DDP
    use it in place of FSDP2's policy, with the same numbers.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, *inputs):
        low = {name: param.to(self.dtype) for name, param in self.model.named_parameters()}
        return torch.func.functional_call(self.model, low, inputs, tie_weights=True)


def mixed(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    return model if dtype is None else MixedModule(model, dtype)


class PlainStep(Looped):
    """A model and an optimizer over its parameters, trained by a plain loop: the counterparts' training step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model = model
        self.optimizer = optimizer

    def __call__(self, *inputs, **named):
        return self.model(*inputs, **named)

    def step(self) -> None:
        with record_function("step 4 update the shard"):
            self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def single(model: nn.Module, optimizer, device: torch.device, dtype=None) -> PlainStep:
    return PlainStep(mixed(model, dtype), optimizer)


def ddp(model: nn.Module, optimizer, device: torch.device, dtype=None, bucket_mb=None, **more) -> PlainStep:
    """DDP, with gradients that are views of its buckets; `bucket_mb` is in MiB (default: torch's)."""
    if isinstance(next(model.parameters()), FakeTensor):
        return DDPStandIn(mixed(model, dtype), optimizer, bucket_mb or 25)
    ids = None if device.type == "cpu" else [device]
    more |= {} if bucket_mb is None else {"bucket_cap_mb": bucket_mb}
    model = DistributedDataParallel(mixed(model, dtype), device_ids=ids, gradient_as_bucket_view=True, **more)
    return PlainStep(model, optimizer)


def zero_redundancy_optimizer(model: nn.Module, optimizer, device: torch.device, dtype=None) -> PlainStep:
    """DDP whose optimizer keeps a share of its state on each rank.

    ZeroRedundancyOptimizer builds its optimizer itself, so it gets the class and the options of the given one.
    """
    accepted = inspect.signature(type(optimizer)).parameters  # AdamW's defaults have more than it accepts
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    sharded = ZeroRedundancyOptimizer(optimizer.param_groups, type(optimizer), **defaults)
    return ddp(model, sharded, device, dtype)


class DDPStandIn(PlainStep):
    """What `DistributedDataParallel(gradient_as_bucket_view=True)` keeps alive and sends, where it cannot be built.

    DDP's reducer is C++ and refuses fake tensors. This has its buckets (torch's own function cuts them: the last
    parameters first, 1 MiB and then 25 MiB each), into which every gradient is copied once autograd has it, and its
    all-reduce per bucket, for which it waits when backward is over. With `sends = False` a backward adds to the
    gradients and sends nothing (`no_sync`). A test compares it with the real one, byte for byte.

    With `low`, a dtype, it is DDP with low-precision weights, as in Megatron and nanotron: the optimizer has float32
    copies of them, and the buckets are float32 sums, to which each gradient is added when it is ready. The referee's
    DDP instead casts float32 weights at the start of each forward. Then all gradients arrive at the end, and DDP
    overlaps nothing.
    """

    def __init__(self, model: nn.Module, optimizer, bucket_mb: float, low: torch.dtype | None = None):
        super().__init__(model, optimizer)
        self.sends, self._works, self._flats = True, [], []
        self._copies = {}  # {low-precision parameter: the optimizer's float32 copy}
        self._sums = {}  # {low-precision parameter: its float32 gradient, a view of the bucket}
        params = [param for param in model.parameters() if param.requires_grad][::-1]
        limits = [int(min(bucket_mb, 1) * 2**20), int(bucket_mb * 2**20)]
        for numbers in dist._compute_bucket_assignment_by_size(params, limits)[0]:
            self._add_bucket([params[number] for number in numbers])
        if low is not None:
            self._copies = {param: nn.Parameter(param.detach().clone()) for param in model.parameters()}
            replace_parameters(optimizer, self._copies)
            for param in model.parameters():
                param.data = param.data.to(low)

    def _add_bucket(self, params: list[nn.Parameter]) -> None:
        flat = params[0].new_zeros(sum(param.numel() for param in params))
        parts = flat.split([param.numel() for param in params])
        views = {param: part.view(param.shape) for param, part in zip(params, parts)}
        missing = set(params)
        self._flats.append(flat)

        def on_gradient(param):
            self._take(param, views[param])
            missing.discard(param)
            if not missing:
                missing.update(params)
                if self.sends:
                    self._send(flat)

        for param in params:
            param.register_post_accumulate_grad_hook(on_gradient)

    def _take(self, param: nn.Parameter, view: torch.Tensor) -> None:
        """The gradient of `param` has arrived, and goes to its place in the bucket."""
        if self._copies:
            view.add_(param.grad)
            param.grad, self._sums[param] = None, view
        elif param.grad is not view:
            view.copy_(param.grad)
            param.grad = view

    def _send(self, flat: torch.Tensor) -> None:
        if not self._works:
            torch.autograd.Variable._execution_engine.queue_callback(self._receive)
        flat.div_(dist.get_world_size())
        self._works.append(dist.all_reduce(flat, async_op=True))

    def _receive(self) -> None:
        while self._works:
            self._works.pop(0).wait()

    def step(self) -> None:
        if not self._copies:
            return super().step()
        for param, copy in self._copies.items():
            copy.grad = self._sums[param]
        with record_function("step 4 update the shard"), torch.no_grad():
            self.optimizer.step()
            torch._foreach_copy_([*self._copies], [*self._copies.values()])
            torch._foreach_zero_(self._flats)

    def zero_grad(self) -> None:
        if not self._copies:  # else the step has cleared the sums
            super().zero_grad()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """A GPT's blocks; of another model ZeRO-3's units."""
    return [*getattr(model, "blocks", ())] or default_units(model)


def fsdp2(model: nn.Module, optimizer, device: torch.device, dtype=None, mesh=None, **options) -> PlainStep:
    """FSDP2 around every block of the model, and around the rest.

    Users of FSDP2 build the optimizer after it, because `fully_shard` replaces the model's parameters. Here the
    optimizer was built before, so its groups get the new parameters.
    """
    whole = dict(model.named_parameters())
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if mesh is None:
        # By default the mesh is of whatever accelerator there is, also when the model is to stay on the CPU. And
        # `init_device_mesh` may choose a GPU by itself, and add an NCCL group, which ranks on one GPU cannot have.
        with _disable_current_modes():  # a mesh needs the values of its ranks, which fake tensors do not have
            mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    sharded = dict(model.named_parameters())
    replace_parameters(optimizer, {param: sharded[name] for name, param in whole.items()})
    return PlainStep(model, optimizer)


def fsdp2_no_reshard(model: nn.Module, optimizer, device: torch.device, **options) -> PlainStep:
    return fsdp2(model, optimizer, device, reshard_after_forward=False, **options)


def replace_parameters(optimizer: torch.optim.Optimizer, new: dict[nn.Parameter, nn.Parameter]) -> None:
    """Let the optimizer update other parameters, before its first step."""
    if optimizer.state:  # Adagrad makes its state in its constructor, in the parameters' whole shape
        raise ValueError(f"{type(optimizer).__name__} has state already: build it over the sharded parameters")
    for group in optimizer.param_groups:
        group["params"][:] = [new[param] for param in group["params"]]


ARTICLE_MIN_NUM_PARAMS = 10_000  # as in the article's snippet


def fsdp1(model: nn.Module, optimizer, device: torch.device, dtype=None, **options) -> PlainStep:
    """FSDP1 around the blocks."""
    return _fsdp1(model, optimizer, device, dtype, ModuleWrapPolicy({*map(type, blocks_of(model))}), **options)


def fsdp1_article(model: nn.Module, optimizer, device: torch.device, dtype=None, **options) -> PlainStep:
    """FSDP1 as in the article "Scaling LLM Training: Deep Dive into ZeRO and FSDP", around all large modules.

    The article's snippet wraps every module from 10,000 parameters on (`_large`) and offloads the parameters to the
    CPU. This does not offload, because FSDP1 raises an error for offloading without an accelerator.
    """
    return _fsdp1(model, optimizer, device, dtype, _large(model), **options)


def _fsdp1(model: nn.Module, optimizer, device: torch.device, dtype, wrap, **options) -> PlainStep:
    policy = None if dtype is None else MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
    options = {"device_id": device, "mixed_precision": policy, "use_orig_params": True, **options}
    model = FullyShardedDataParallel(model, auto_wrap_policy=wrap, **options)
    if not options["use_orig_params"]:  # else the model's parameters stay the same objects
        (group,) = optimizer.param_groups
        group["params"][:] = model.parameters()
    return PlainStep(model, optimizer)


def _large(model: nn.Module):
    """The article's policy, but for modules that share a weight: those stay with the model around them.

    Wrapped by themselves, embedding and head would each get a separate flat parameter, and their one weight would
    become two, which learn different things. With `use_orig_params` FSDP1 stops with an error instead.
    """
    owners = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, []).append(module)
    tied = {module for modules in owners.values() if len(modules) > 1 for module in modules}

    def wrap(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if module in tied and not recurse:
            return False
        return size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, ARTICLE_MIN_NUM_PARAMS)

    return wrap


class ZeRO1By2Psi(ZeRO1):
    """Step 3 of ZeRO-1 by the reduce-scatter of the paper. A rank sends 2Ψ, where the chapter sends 3Ψ.

    A reduce-scatter writes to its own shard, so `shard.grad` is no view of the bucket's gradient buffer here: each rank
    holds 4Ψ/N bytes more.
    """

    def start_reduce(self, bucket):
        bucket.shard.grad = torch.empty_like(bucket.shard)
        return reduce_scatter(bucket.shard.grad, bucket.gradient, group=self.group, async_op=True)

    def finish_reduce(self, bucket):
        bucket.shard.grad /= self.world_size


class ZeRO1EngineBy2Psi(ZeRO1Engine):
    """The same, with the engine's options."""

    def __init__(self, *args, **options):
        self.received = {}  # bucket -> the sum that it receives
        super().__init__(*args, **options)

    def start_reduce(self, bucket):
        if bucket.divide_first > 1:
            bucket.gradient /= bucket.divide_first
        self.received[bucket] = bucket.gradient.new_empty(bucket.shard_numel)
        return reduce_scatter(self.received[bucket], bucket.gradient, group=self.group, async_op=True)

    def finish_reduce(self, bucket):
        own = self.received.pop(bucket)
        own /= bucket.divide_last
        self.deliver(bucket, own)
