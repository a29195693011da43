"""What was changed behind the engine's back is refused at the next forward, with the way out."""

import torch
from torch import nn

from harness.engine import pipelines, precision
from harness.engine.hooks import GradientHook, WeakHook, backward_now
from harness.engine.tensor_parallel import local
from harness.engine.units import default_units
from harness.engine.waiting import name_some


def watch_forward(engine, look: "Look") -> list:
    """Look at the model before every forward, and cast its inputs in mixed precision. Returns the hooks' handles.

    The first handle is that of the look, which lives as long as the engine.
    """
    handles = [engine.model.register_forward_pre_hook(WeakHook(look.compare))]
    if engine.dtypes[0] is not None:
        for module in engine.model.modules():
            handles.append(module.register_load_state_dict_pre_hook(refuse_loading))
        units = getattr(engine, "units", None)
        modules = default_units(engine.model) if units is None else [unit.module for unit in units]
        cast = precision.Cast(engine.dtypes[0])
        handles += [module.register_forward_pre_hook(cast, with_kwargs=True) for module in [engine.model, *modules]]
    return handles


class Look:
    """Compares the model with what it was when the engine was built.

    Raises RuntimeError for parameters that came, went, moved, were frozen or unfrozen, or written to where it is lost.
    """

    def __init__(self, engine):
        # Lists and not a walk through the model: this runs before every forward.
        self._counts = [
            (m._parameters, len(m._parameters), m._modules, len(m._modules)) for m in engine.model.modules()
        ]
        homes = {}  # id of a parameter -> where the model has it
        for module in engine.model.modules():
            for key, param in module._parameters.items():
                if param is not None:
                    homes.setdefault(id(param), []).append((module._parameters, key))
        # ZeRO-3 looks itself at what was written into its weights, which come and go.
        self._whole = not hasattr(engine, "units")
        self._known = []  # (name, parameter, where the model has it, requires_grad, memory, offset, is it rounded)
        for bucket in engine.buckets:
            rounded = bucket.flat.dtype != bucket.shard.dtype
            memory = bucket.flat.untyped_storage()  # of which Python makes one object, as long as somebody has it
            for name, param, offset in zip(bucket.names, bucket.params, bucket.offsets):
                self._known.append((name, param, homes[id(param)], param.requires_grad, memory, offset, rounded))

    def compare(self, model: nn.Module, args) -> None:
        if backward_now() is not None:  # activation checkpointing runs it again
            return
        pipelines.heed()
        came, replaced, flags, moved, lost = [], [], [], [], []
        if any(len(params) != p or len(modules) != m for params, p, modules, m in self._counts):
            known = {id(param) for _, param, *_ in self._known}
            came = [name for name, param in model.named_parameters() if id(param) not in known]
        with torch._C.DisableTorchFunctionSubclass():  # quick, also for freed parameters
            for name, param, homes, requires_grad, memory, offset, rounded in self._known:
                for params, key in homes:
                    if params.get(key) is not param:
                        replaced.append(name)
                if param.requires_grad != requires_grad:
                    flags.append(name)
                here = local(param)
                if here.untyped_storage() is not memory or here.storage_offset() != offset:  # also of a freed one
                    moved.append(name)
                elif self._whole and param._version != param.zero_version:
                    lost += [name] * rounded
                    param.zero_version = param._version  # in float32 a weight may be changed between two steps
                hooks = param._post_accumulate_grad_hooks
                if hooks is not None and len(hooks) > 1:  # the user's are called first, with the gradient there
                    own = next(key for key, hook in hooks.items() if type(hook) is GradientHook)
                    hooks[own] = hooks.pop(own)  # torch goes by the order of insertion
        if came or replaced or flags or moved or lost:
            raise RuntimeError(_what_changed(came, replaced, flags, moved, lost))


def _what_changed(came, replaced, flags, moved, lost) -> str:
    if came:
        return (
            f"{name_some(came)} came into the model after the engine was built, which does not train it: build the "
            "whole model first, then the engine"
        )
    if replaced:
        return (
            f"{name_some(replaced)} was replaced after the engine was built (by setattr, a parametrization, "
            "weight_norm, functional_call or load_state_dict(assign=True)). The engine would train a tensor that the "
            "model no longer uses. Change the model first, then build the engine; load by engine.load_full_state_dict()"
        )
    if flags:
        return (
            f"requires_grad of {name_some(flags)} was changed after the engine was built, which has buckets, "
            "hooks and optimizer state for the flags as they were. Change it back, or take state = "
            "engine.full_state_dict(), build a new model, load the state into it, set the flags, and build a new "
            "engine (its optimizer starts afresh). A parameter that only rests for some steps can be left out of "
            "the loss with find_unused=True"
        )
    if moved:
        return (
            f"{name_some(moved)} was moved out of the engine's buffer (by model.to(), half(), double(), cuda(), an "
            "RNN's flatten_parameters(), or param.data = ...), so the engine would train values that the model no "
            "longer uses. Move the model first, then build the engine; param_dtype= computes in another dtype"
        )
    return (
        f"{name_some(lost)} was written to after the engine was built. In mixed precision the engine's values are the "
        "shards, and what is written into the rounded weights is lost with the next step. Change weights by the "
        "optimizer, or by engine.load_full_state_dict()"
    )


def refuse_loading(module, *args) -> None:
    raise RuntimeError(
        "model.load_state_dict() would change the rounded weights and not the float32 ones that the optimizer "
        "updates, and be undone by the next step: call engine.load_full_state_dict(state)"
    )
