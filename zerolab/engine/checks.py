"""Errors in place of wrong results: everything that a user meets in the first week.

At the build, on all ranks and before anything is sent: models and options that cannot work, or that differ between
ranks (`check_build`). At `step()`: a parameter without a gradient, or one that has left its buffer (`check_gradients`,
`check_memory`). In between: a freed weight that somebody reads, and a `param.grad` that has moved into the shard.

The last two need the parameters' help. While an engine has a parameter, the object is the same, and its class is
`EngineParameter`; while its unit is freed, it is `FreedParameter`. What is not detected is in docs/limits.md.
"""

import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from zero1 import check_parameters
from zerolab.engine import tensor_parallel
from zerolab.engine.together import on_all_ranks

get_grad = torch._C.TensorBase.grad.__get__  # `param.grad` and `param.grad = ...`, without the checks below
set_grad = torch._C.TensorBase.grad.__set__
without_checks = torch._C.DisableTorchFunctionSubclass  # saves the call of __torch_function__ for freed parameters


class EngineParameter(nn.Parameter):
    """A parameter whose gradient moves into the shard. Without this, torch's clipping would find no gradient at all."""

    # A weak reference to the bucket that has it. With a strong one a loss that the model keeps would keep the model
    # alive forever, through autograd's graph, the parameter and the unit.
    bucket = None

    @property
    def grad(self):
        gradient = get_grad(self)
        if gradient is None:
            self._check_moved()
        return gradient

    @grad.setter
    def grad(self, value):
        self._check_moved()
        set_grad(self, value)

    def _check_moved(self):
        bucket = bucket_of(self)
        if bucket is not None and bucket.moved:
            raise RuntimeError(
                f"the gradient of {name_of(self)!r} has moved into the engine's shards. Use engine.clip_grad_norm_(), "
                "engine.step() and engine.zero_grad(). To read or change gradients, call "
                "engine.reduce_gradients(): they are in the parameters of the optimizer then"
            )


class FreedParameter(EngineParameter):
    """A parameter whose storage has no bytes. Reading it would crash the process or return garbage."""

    def __repr__(self):
        """For messages and debuggers, which print a parameter. Its values are not here."""
        name = "of an engine that is gone" if bucket_of(self) is None else repr(name_of(self))
        return f"FreedParameter({name}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if not reads_values(function):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        freed = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, FreedParameter)]
        if bucket_of(freed[0]) is None:
            raise RuntimeError(
                f"a parameter of shape {tuple(freed[0].shape)} has no values any more, because its engine is gone and "
                "had them. Call engine.full_state_dict() before you drop an engine, and load the state into a new model"
            )
        raise RuntimeError(
            f"parameter {name_of(freed[0])!r} is freed: its values are sharded over the ranks. They are whole only "
            "inside the model's forward and backward. Call engine(inputs) and not a part of the model; read weights "
            "with engine.full_state_dict(), and write them with engine.load_full_state_dict()"
        )


VALUES = {"data", "real", "imag", "T", "H", "mT", "mH"}  # properties that give access to the values
METADATA = {  # methods that do not give access to them
    "size", "numel", "nelement", "dim", "element_size", "stride", "storage_offset", "is_contiguous", "is_complex",
    "is_floating_point", "get_device", "untyped_storage", "requires_grad_", "register_hook", "__len__", "__hash__",
    "register_post_accumulate_grad_hook", "_is_view", "is_same_size", "is_shared", "is_inference", "empty_like",
    "zeros_like",
}  # fmt: skip


def reads_values(function):
    """Whether a function reads the values of its parameter. For a property, `function` is the getter."""
    name = function.__name__
    if name in ("__get__", "__set__", "__delete__"):
        return function.__self__.__name__ in VALUES
    return name not in METADATA


def bucket_of(param):
    """The bucket of a live engine that has `param`, or None. A copy of a parameter has none."""
    if not isinstance(param, EngineParameter) or param.bucket is None:
        return None
    return param.bucket()


def name_of(param):
    bucket = bucket_of(param)
    return next(name for name, each in zip(bucket.names, bucket.params) if each is param)


def adopt(buckets):
    """Give the parameters their class, except for DTensors, other subclasses and fake tensors, which have no values."""
    for bucket in buckets:
        for param in bucket.params:
            if type(param) in (nn.Parameter, EngineParameter):  # the latter if an earlier engine was dropped
                param.__class__ = EngineParameter
                param.bucket = weakref.ref(bucket)


def mark_freed(params):
    for param in params:
        if type(param) is EngineParameter:
            param.__class__ = FreedParameter


def mark_gathered(params):
    for param in params:
        if type(param) is FreedParameter:
            param.__class__ = EngineParameter


# At the build.


def check_build(model, optimizer, options, **others):
    """Raise an error on all ranks if the model or an option is wrong on one rank, or differs between ranks."""

    def check():
        check_model(model)
        check_optimizer(model, optimizer)
        tensor_parallel.check_split(model, options.group, options.param_dtype)
        check_options(options)
        params = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()]
        buffers = [(name, tuple(b.shape), b.dtype) for name, b in model.named_buffers()]
        return repr((params, buffers, options.equal_on_all_ranks(), type(optimizer), others))

    if dist.get_rank(options.everyone) < 0:
        raise ValueError("this rank is not in `group`: only the ranks of the group build the engine")
    everyone = on_all_ranks(check, options.everyone)
    different = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    if different:
        raise ValueError(
            f"rank(s) {different} have a different model (names, shapes, dtypes, requires_grad), optimizer or option "
            "than rank 0: every rank must build the same engine"
        )


def check_options(options):
    """Raise ValueError for an option that cannot work with any model."""
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(options, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"{name} must be a floating point dtype such as torch.bfloat16, got {dtype!r}")
    policy = options.offload_policy
    if policy is not None and not isinstance(policy, CPUOffloadPolicy):
        raise ValueError(f"offload_policy must be torch.distributed.fsdp.CPUOffloadPolicy() or None, got {policy!r}")


def check_model(model):
    if torch.is_inference_mode_enabled():
        raise RuntimeError("built inside torch.inference_mode(), where nothing can be trained: build it outside")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("the model is wrapped in DistributedDataParallel, which reduces gradients too: pass .module")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"{name or 'the model'!r} is scripted and does not support hooks: pass the plain module")
        if getattr(module, "max_norm", None) is not None:
            raise ValueError(
                f"{name!r} has max_norm: its forward changes its weights, on each rank for a different batch, so the "
                "ranks' weights would diverge. Build the embedding without it"
            )
    devices = {param.device for param in model.parameters() if not param.is_meta}
    if len(devices) > 1:
        raise ValueError(f"the parameters are on {sorted(map(str, devices))}: move the model to one device first")
    owner = {}  # storage -> the parameter in it
    for name, param in model.named_parameters():
        if isinstance(param, FreedParameter) or bucket_of(param) is not None:
            raise ValueError(f"parameter {name!r} belongs to another engine already: build a new model")
        if param.numel() and not param.is_meta:
            local = tensor_parallel.local(param)
            first = owner.setdefault((local.untyped_storage()._cdata, local.storage_offset()), name)
            if first != name:
                raise ValueError(
                    f"{first!r} and {name!r} share memory, and would no longer share it after the build. To tie two "
                    "weights, use one parameter for both (a.weight = b.weight)"
                )
    storages = {storage: name for (storage, _), name in owner.items()}
    for name, buffer in model.named_buffers():
        if buffer.layout is torch.strided and not buffer.is_meta and buffer.numel():
            other = storages.get(buffer.untyped_storage()._cdata)
            if other is not None:
                raise ValueError(
                    f"the buffer {name!r} shares memory with {other!r}, and would become stale after the build. "
                    "Register a copy of it, or compute it in forward"
                )


def check_optimizer(model, optimizer):
    """Like the chapter's, but with any number of groups, and with state that the optimizer's constructor makes."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected an optimizer, such as torch.optim.AdamW(model.parameters()), got {optimizer!r}")
    if type(optimizer).__name__ in ("LBFGS", "Muon", "Adafactor"):
        raise ValueError(f"{type(optimizer).__name__} looks at whole tensors, and a shard is flat: use AdamW or SGD")
    check_parameters(model, optimizer)
    if any(state.get("step", 1) > 0 for state in optimizer.state.values()):
        raise ValueError("the optimizer has made steps already: build a new one, over the model's parameters")


def check_has_values(model):
    """Raise ValueError for a model on the meta device. Only ZeRO-3 can give it values unit by unit."""
    on_meta = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if on_meta:
        raise ValueError(
            f"{shorten(on_meta)} are on the meta device and have no values: call model.to_empty(device=...) and "
            "initialize the model, or build ZeRO3Engine(model, optimizer, init_fn=...), which fills it unit by unit"
        )


def check_units(model, units):
    """Raise ValueError for ZeRO-3's `units` that are not in the model, or overlap."""
    names = {module: name for name, module in model.named_modules()}
    unit_around = {}
    for unit in units:
        if unit not in names:
            raise ValueError(f"{str(unit)[:80]!r} in units is not a module of the model: pass list(model.blocks), say")
        for module in unit.modules():
            if module in unit_around:
                raise ValueError(
                    f"the units {names[unit_around[module]]!r} and {names[unit]!r} overlap: drop one of the two"
                )
            unit_around[module] = unit


# In backward.


def check_plain(gradient):
    """Raise RuntimeError for a gradient that has its own graph, which would be reduced and grow in every step."""
    if gradient.requires_grad:
        raise RuntimeError(
            "backward(create_graph=True) is not supported, because gradients move into the engine's shards. For a "
            "gradient penalty call torch.autograd.grad(..., create_graph=True), and then backward() without it"
        )


def check_first_order():
    """Raise RuntimeError in ZeRO-3's backward under `create_graph=True`. Its graph would hold freed weights."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True is not supported by ZeRO-3, whose weights are freed when backward has used them: use "
            "ZeRO1Engine or ZeRO2Engine for gradient penalties. Call engine.zero_grad() before the next step"
        )


def check_one_backward(engine):
    """Raise RuntimeError if a backward begins inside another one. ZeRO-3 would treat the outer one as finished."""
    if engine.backward_id not in (None, torch._C._current_graph_task_id()):
        raise RuntimeError(
            "a backward began inside another one, as reentrant checkpoints do: pass use_reentrant=False to "
            "torch.utils.checkpoint.checkpoint. If the last backward raised an error, call engine.zero_grad() first"
        )


# At `step()`.


def check_gradients(buckets, find_unused):
    """Raise RuntimeError for a parameter without a gradient, or with one that was not reduced."""
    missing, kept, set_by_hand = [], [], []
    for bucket in buckets:
        for name, param in zip(bucket.names, bucket.params):
            if param in bucket.kept:
                kept.append(name)
            elif param not in bucket.used and bucket.gradient is None and get_grad(param) is not None:
                set_by_hand.append(name)
            elif param not in bucket.used:
                missing.append(name)
    if kept:
        raise RuntimeError(f"gradients of {shorten(kept)} were kept by no_sync(): the last backward must run outside")
    if set_by_hand:
        raise RuntimeError(
            f"param.grad of {shorten(set_by_hand)} was set by hand, and only gradients of a backward are reduced. Call "
            "engine.reduce_gradients() after backward, and change the gradients in optimizer.param_groups"
        )
    if missing and not find_unused:
        raise RuntimeError(
            f"no gradient for {shorten(missing)}: use every trained parameter in every step, freeze it before the "
            "build, or build the engine with find_unused=True"
        )


def check_cleared(buckets):
    """Raise RuntimeError after `optimizer.zero_grad()`, which clears the pieces but not the engine's buffers."""
    for bucket in buckets:
        if bucket.handed_out and bucket.pieces and all(piece.grad is None for piece in bucket.pieces.values()):
            raise RuntimeError("optimizer.zero_grad() was called: call engine.zero_grad(), which clears all gradients")


def check_memory(buckets):
    """Raise RuntimeError if a parameter has left its buffer, for example after `model.to(...)`.

    Checks one parameter per bucket.
    """
    for bucket in buckets:
        for name, param in zip(bucket.names, bucket.params):
            storage = tensor_parallel.local(param).untyped_storage()
            if storage._cdata != bucket.flat.untyped_storage()._cdata:
                raise RuntimeError(
                    f"parameter {name!r} has left the engine's buffer: something replaced its memory, as model.to() "
                    "and `param.data = ...` do. Move and change the model before the engine is built"
                )
            break


def check_step(engine):
    """Raise RuntimeError for `optimizer.step()` outside of `engine.step()`: gradients may not be reduced."""
    if not engine.updating:
        raise RuntimeError("optimizer.step() was called by itself, and gradients may not be reduced: use engine.step()")


def shorten(names):
    """The first 8 names and the number of the others, for a message."""
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
