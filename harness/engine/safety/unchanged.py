"""What was changed behind the engine's back is refused at the next forward, with the way out."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from harness.engine.hooks import GradientHook, WeakHook, backward_now
from harness.engine.options import pipelines, precision
from harness.engine.options.tensor_parallel import local
from harness.engine.safety.guard import LOST
from harness.engine.safety.waiting import name_some
from harness.engine.units import default_units


def watch_forward(engine, look: "Look") -> list:
    """Look at the model before every forward, and cast its inputs in mixed precision. Returns the hooks' handles.

    The first handle is that of the look, which lives as long as the engine.
    """
    handles = [engine.model.register_forward_pre_hook(WeakHook(look.compare))]
    if engine.dtypes[0] is not None or engine.placement.offload is not None:
        for module in engine.model.modules():
            handles.append(module.register_load_state_dict_pre_hook(refuse_loading))
    if engine.dtypes[0] is not None:
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
        self._take_in(engine.model)
        homes = {}  # id of a parameter -> where the model has it
        for module in engine.model.modules():
            for key, param in module._parameters.items():
                if param is not None:
                    homes.setdefault(id(param), []).append((module._parameters, key))
        self._known = []  # (name, parameter, where the model has it, requires_grad, address)
        for bucket in engine.all_buckets:
            for name, param in zip(bucket.names, bucket.params):
                whole = not hasattr(engine, "units") and not isinstance(param, FakeTensor)
                address = local(param).data_ptr() if whole else None
                self._known.append((name, param, homes[id(param)], param.requires_grad, address))
        sharded = hasattr(engine, "units")  # then what is written into shards is gathered with them
        self._shards = [] if sharded else [bucket.shard for bucket in engine.buckets]
        self.note_shards()

    def _take_in(self, model: nn.Module) -> None:
        # Lists and not a walk through the model: they are compared before every forward.
        self._modules = [(m._modules, dict(m._modules)) for m in model.modules()]
        self._counts = [(m._parameters, len(m._parameters)) for m in model.modules()]

    def note_shards(self) -> None:
        """The shards are as all ranks have gathered them."""
        self._versions = [shard._version for shard in self._shards]

    def _compare_modules(self, model: nn.Module, changed: dict) -> None:
        """Modules have come, gone or been swapped: right, as long as the parameters are the same ones."""
        known = {id(param): name for name, param, *_ in self._known}
        here = {id(param): name for name, param in model.named_parameters()}
        changed["came"] = [name for key, name in here.items() if key not in known]
        changed["replaced"] = [name for key, name in known.items() if key not in here]
        if not (changed["came"] or changed["replaced"]):
            self._take_in(model)

    def compare(self, model: nn.Module, args) -> None:
        if backward_now() is not None:  # activation checkpointing runs it again
            return
        pipelines.heed()
        changed = {what: [] for what in _CHANGED}  # names of parameters
        if any(now != then for now, then in self._modules) or any(len(now) != then for now, then in self._counts):
            self._compare_modules(model, changed)
        if self._versions != [shard._version for shard in self._shards]:
            raise RuntimeError(_WRITTEN)
        with torch._C.DisableTorchFunctionSubclass():  # quick, also for freed parameters
            for name, param, homes, requires_grad, address in self._known:
                if any(params.get(key) is not param for params, key in homes) and name not in changed["replaced"]:
                    changed["replaced"].append(name)
                if param.requires_grad != requires_grad:
                    changed["flags"].append(name)
                if address is not None:  # ZeRO-3's have no place of their own, and a dry run's no place at all
                    if local(param).data_ptr() != address:
                        changed["moved"].append(name)
                    elif param._version != param.zero_version:
                        if param.zero_apart:  # else a weight may be changed between two steps
                            changed["lost"].append(name)
                        param.zero_version = param._version
                hooks = param._post_accumulate_grad_hooks
                if hooks is not None and len(hooks) > 1:  # the user's are called first, with the gradient there
                    own = next(key for key, hook in hooks.items() if type(hook) is GradientHook)
                    hooks[own] = hooks.pop(own)  # torch goes by the order of insertion
        for what, names in changed.items():
            if names:
                raise RuntimeError(f"{name_some(names)} {_CHANGED[what]}")


_CHANGED = {
    "came": "came into the model after the engine was built, which does not train it: build the whole model first, "
    "then the engine",
    "replaced": "was replaced after the engine was built (by setattr, a parametrization, weight_norm, functional_call "
    "or load_state_dict(assign=True)). The engine would train a tensor that the model no longer uses. Change the model "
    "first, then build the engine; load by engine.load_full_state_dict()",
    "flags": "had its requires_grad changed after the engine was built, which has buckets, hooks and optimizer state "
    "for the flags as they were. Change it back, or take state = engine.full_state_dict(), build a new model, load the "
    "state into it, set the flags, and build a new engine (its optimizer starts afresh). A parameter that only rests "
    "for some steps can be left out of the loss with find_unused=True",
    "moved": "was moved out of the engine's buffer (by model.to(), half(), double(), cuda(), an RNN's "
    "flatten_parameters(), or param.data = ...), so the engine would train values that the model no longer uses. "
    "Move the model first, then build the engine; param_dtype= computes in another dtype",
    "lost": LOST,
}
_WRITTEN = (
    "the optimizer's pieces were written to outside of engine.step(), and the other ranks do not have what was "
    "written. Do it between backward and engine.step(), which gathers it, or in the optimizer's own step(), train() "
    "or eval()"
)


def moved_message(names: list[str]) -> str:
    return f"{name_some(names)} {_CHANGED['moved']}"


def refuse_loading(module, *args) -> None:
    raise RuntimeError(
        "model.load_state_dict() would change the weights and not the shards that the optimizer updates, which have "
        "memory of their own here, and be undone by the next step: call engine.load_full_state_dict(state)"
    )
