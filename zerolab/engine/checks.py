"""Errors instead of wrong results, for the mistakes that users make in the first week.

At the build, on all ranks and before anything is sent: models and options that cannot work, or that differ between
ranks (`check_build`). In backward: graphs of gradients, and a backward inside another one. At `step()`: a parameter
without a gradient, or one that has left its buffer (`check_gradients`, `check_memory`).

In addition, the engine changes the classes of parameters, which then detect mistakes at any time (parameters.py).
docs/limits.md lists the mistakes that are not detected.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel

from zero1 import check_parameters
from zerolab.engine import parameters, tensor_parallel
from zerolab.engine.life import Gradients
from zerolab.engine.optimizers import as_one
from zerolab.engine.together import on_all_ranks

# At the build.


def check_build(model, optimizers, options, others):
    """Raise an error on all ranks if the model or an option is wrong on one rank, or differs between ranks.

    others   {name: value} of the options that only some stages have
    """

    def check():
        check_model(model)
        check_optimizers(model, optimizers)
        options.whole.check(model, optimizers)
        tensor_parallel.check_split(model, options.group, options.param_dtype)
        check_options(options)
        return description(model, optimizers, options) | {name: str(value) for name, value in others.items()}

    if dist.get_rank(options.all_ranks) < 0:
        raise ValueError("this rank is not in `group`: only the ranks of the group build the engine")
    found = on_all_ranks(check, options.all_ranks)
    different = [rank for rank, other in enumerate(found) if other != found[0]]
    if different:
        raise ValueError(
            f"rank(s) {different} have a different model, optimizer or option from rank 0, and every rank must build "
            f"the same engine. On rank {different[0]}: {differences(found[different[0]], found[0])}"
        )


def description(model, optimizers, options):
    """{what: its value, as text} for everything that must be equal on all ranks."""
    found = {name: str(value) for name, value in options.equal_on_all_ranks().items()}
    found["the optimizer"] = names_of(optimizers)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    group_of = {param: index for index, group in enumerate(groups) for param in group["params"]}
    for name, param in model.named_parameters():
        use = f"trained in group {group_of[param]}" if param.requires_grad else "frozen"
        use += ", whole" if param in options.whole.params else ""
        found[f"parameter {name!r}"] = f"{param.dtype} of shape {tuple(param.shape)}, {use}"
    for name, buffer in model.named_buffers():
        found[f"buffer {name!r}"] = f"{buffer.dtype} of shape {tuple(buffer.shape)}"
    for index, (name, _) in enumerate(model.named_parameters()):
        found[f"the position of {name!r}"] = str(index)
    return found


def differences(there, here):
    """The first four differences between two descriptions, for a message."""
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    texts = [f"{key} is {there.get(key, 'absent')} there and {here.get(key, 'absent')} on rank 0" for key in keys[:4]]
    return "; ".join(texts) + (f"; and {len(keys) - 4} more differences" if len(keys) > 4 else "")


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
    for name, module in model.named_modules():
        if isinstance(module, (nn.parallel.DistributedDataParallel, FullyShardedDataParallel)):
            raise ValueError(
                f"{name or 'the model'!r} is wrapped in {type(module).__name__}, which reduces gradients too: pass the "
                "module inside of it (.module)"
            )
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"{name or 'the model'!r} was passed to fully_shard, which shards it already: build a new model"
            )
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
        if isinstance(param, parameters.FreedParameter) or parameters.bucket_of(param) is not None:
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


def check_optimizers(model, optimizers):
    """Like the chapter's check, but allows several groups, and state that an optimizer's constructor has made."""
    names = {param: name for name, param in model.named_parameters()}
    seen = set()
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"expected an optimizer, such as torch.optim.AdamW(model.parameters()), got {optimizer!r}")
        if type(optimizer).__name__ == "LBFGS":
            raise ValueError("LBFGS looks at all parameters together, and a rank has only its shards: use AdamW or SGD")
        if any(state.get("step", 1) > 0 for state in optimizer.state.values()):
            raise ValueError("the optimizer has made steps already: build a new one, over the model's parameters")
        params = {param for group in optimizer.param_groups for param in group["params"]}
        twice = [names[param] for param in params & seen if param in names]
        if twice:
            raise ValueError(f"{shorten(twice)} in two optimizers: give each parameter to one of them")
        seen |= params
    check_parameters(model, as_one(optimizers))


def names_of(optimizers):
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers)


def check_has_values(model, options):
    """Raise ValueError on all ranks for a model on the meta device. Only ZeRO-3 can give it values unit by unit."""

    def check():
        on_meta = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
        if on_meta:
            raise ValueError(
                f"{shorten(on_meta)} are on the meta device and have no values: call model.to_empty(device=...) and "
                "initialize the model, or build ZeRO3Engine(model, optimizer, init_fn=...), which fills it unit by unit"
            )

    on_all_ranks(check, options.all_ranks)


def check_units(model, units):
    """Raise ValueError if one of ZeRO-3's `units` is not in the model, or if two of them overlap."""
    names = {module: name for name, module in model.named_modules()}
    unit_around = {}
    for unit in units:
        if unit not in names:
            raise ValueError(
                f"{str(unit)[:80]!r} in units is not a module of the model: pass for example list(model.blocks)"
            )
        for module in unit.modules():
            if module in unit_around:
                raise ValueError(
                    f"the units {names[unit_around[module]]!r} and {names[unit]!r} overlap: leave out one of the two"
                )
            unit_around[module] = unit


# In backward.


def refuse_graph():
    """Raise RuntimeError for a gradient with its own graph, which would be kept, and would grow in every step."""
    raise RuntimeError(
        "backward(create_graph=True) is not supported, because gradients move into the engine's shards. For a "
        "gradient penalty call torch.autograd.grad(..., create_graph=True), and then backward() without it"
    )


def check_first_order():
    """Raise RuntimeError in ZeRO-3's backward with `create_graph=True`, because the graph would hold freed weights."""
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


def check_gradients(engine):
    """Raise RuntimeError for a parameter without a gradient, or with one that was not reduced."""
    missing, kept, replaced, set_by_hand = [], [], [], []
    for bucket in engine.buckets:
        for name, param in zip(bucket.names, bucket.params):
            if param in bucket.kept:
                kept.append((name, param in bucket.missing or not bucket.missing))
            if bucket.gradient is not None and parameters.get_grad(param) is not bucket.grad_of[param]:
                replaced.append(name)
            elif param not in bucket.used and bucket.gradient is None and parameters.get_grad(param) is not None:
                set_by_hand.append(name)
            elif param not in bucket.used:
                missing.append(name)
    if engine.gradients is Gradients.KEPT:
        names = shorten([name for name, _ in kept])
        raise RuntimeError(
            f"gradients of {names or 'all parameters'} were kept by no_sync(): the last backward must run outside"
        )
    if replaced:
        raise RuntimeError(
            f"param.grad of {shorten(replaced)} was replaced, so it is not in the engine's buffer, and would not be "
            "reduced. Change gradients in place, clear them with engine.zero_grad(), and call backward() without "
            "create_graph=True. Call engine.zero_grad() now, then run forward again"
        )
    if set_by_hand:
        raise RuntimeError(
            f"param.grad of {shorten(set_by_hand)} was set by hand, and only gradients of a backward are reduced. Call "
            "engine.reduce_gradients() after backward, and change the gradients in optimizer.param_groups"
        )
    if missing and not engine.options.find_unused:
        raise RuntimeError(
            f"no gradient for {shorten(missing)}: use every trained parameter in every step, freeze it before the "
            "build, or build the engine with find_unused=True"
        )
    lacking = [name for name, is_missing in kept if is_missing]
    if lacking:
        raise RuntimeError(
            f"no gradient for {shorten(lacking)} in the last backward, which ran outside of no_sync() and sends the "
            "gradients of all: use every trained parameter in it, or build the engine with find_unused=True"
        )


def check_cleared(buckets):
    """Raise RuntimeError after `optimizer.zero_grad()`, which clears the pieces but not the engine's buffers."""
    used = [piece for bucket in buckets for param, piece in bucket.pieces.items() if param in bucket.used]
    if used and all(piece.grad is None for piece in used):
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


def check_update(engine):
    """Raise RuntimeError for `optimizer.step()` outside of `engine.step()`: gradients may not be reduced."""
    if engine.gradients is not Gradients.UPDATING:
        raise RuntimeError("optimizer.step() was called by itself, and gradients may not be reduced: use engine.step()")


def shorten(names):
    """The first 8 names and the number of the others, for a message."""
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
