"""What was changed behind the engine's back is refused at the next forward or step, with the way out."""

import sys
import weakref
from collections import defaultdict

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from zerolab.engine.hooks import GradientHook, WeakHook, in_backward, not_compiled
from zerolab.engine.options import pipelines
from zerolab.engine.safety.guard import LOST, living
from zerolab.engine.safety.waiting import name_some


class Look:
    """Compares the model with what it was when the engine was built, before every forward.

    Raises RuntimeError for parameters that came, went, moved, were frozen or unfrozen, or written to where it is lost.
    """

    def __init__(self, engine):
        self.handle = engine.model.register_forward_pre_hook(WeakHook(self.compare))
        self._take_in(engine.model)
        about = {}  # id of a parameter -> (name, address)
        for bucket in engine.all_buckets:
            for name, param in zip(bucket.names, bucket.params):
                # ZeRO-3's have no place of their own, and a dry run's no place at all.
                whole = bucket.unit is None and not isinstance(param, FakeTensor)
                about[id(param)] = name, address_of(param) if whole else None
        self._known = []  # (where a module has it, its key there, the parameter, requires_grad, name, address)
        for module in engine.model.modules():
            for key, param in module._parameters.items():
                if param is not None:
                    self._known.append((module._parameters, key, param, param.requires_grad, *about[id(param)]))
        self._trained = [known[4] for known in self._known if known[3]]
        # Whether all trained parameters have requires_grad off, as a GAN's discriminator has for a while.
        self.frozen = False
        # Where shards have memory of their own, what is written into them is gathered with them.
        self._shards = [bucket.shard for bucket in engine.buckets if bucket.unit is None]
        self._told = set()  # names of parameters that were moved, and an error has said so
        self.note_shards()

    def _take_in(self, model: nn.Module) -> None:
        # Lists and not a walk through the model: they are compared before every forward.
        self._modules = [(m._modules, dict(m._modules)) for m in model.modules()]
        self._counts = [(m._parameters, len(m._parameters)) for m in model.modules()]

    def note_shards(self) -> None:
        """The shards are as all ranks have gathered them."""
        self._versions = [shard._version for shard in self._shards]

    def refuse_moved(self) -> None:
        """Raise RuntimeError, once, for parameters that are not in the engine's buffer any more."""
        moved = []
        for _, _, param, _, name, address in self._known:
            if address not in (None, address_of(param)) and name not in self._told:
                moved.append(name)
        self._told.update(moved)
        if moved:
            raise RuntimeError(moved_message(moved))

    def _compare_modules(self, model: nn.Module) -> dict[str, list[str]]:
        """Modules have come, gone or been swapped: right, as long as the parameters are the same ones."""
        known = {id(param): name for _, _, param, _, name, _ in self._known}
        here = {id(param): name for name, param in model.named_parameters()}
        came = [name for key, name in here.items() if key not in known]
        gone = [name for key, name in known.items() if key not in here]
        if not (came or gone):
            self._take_in(model)
        return {"came": came, "replaced": gone}

    def compare(self, model: nn.Module, args) -> None:
        if in_backward():  # activation checkpointing runs it again
            return
        if "torch.distributed.pipelining.stage" in sys.modules:  # to import it takes a second, and few need it
            pipelines.heed()
        changed = defaultdict(list)  # what -> names of parameters
        if any([now != then for now, then in self._modules]) or any([len(now) != then for now, then in self._counts]):
            changed |= self._compare_modules(model)
        if self._versions != [shard._version for shard in self._shards]:
            raise RuntimeError(_WRITTEN)
        with torch._C.DisableTorchFunctionSubclass():  # quick, also for freed parameters
            for home, key, param, requires_grad, name, address in self._known:
                if home.get(key) is not param:
                    changed["replaced"].append(name)
                if param.requires_grad != requires_grad:
                    changed["flags"].append(name)
                if address is not None:
                    if address_of(param) != address:
                        self._told.add(name)
                        changed["moved"].append(name)
                    elif param._version != param.zero_version:
                        if param.zero_apart:
                            changed["lost"].append(name)
                        else:  # a weight may be changed between two steps
                            param.zero_version = param._version
                hooks = param._post_accumulate_grad_hooks
                if hooks is not None and len(hooks) > 1:  # the user's are called first, with the gradient there
                    own = next(key for key, hook in hooks.items() if type(hook) is GradientHook)
                    hooks[own] = hooks.pop(own)  # torch goes by the order of insertion
        self.frozen = changed.get("flags") == self._trained
        if self.frozen:  # a pass through a model that is frozen computes, sends nothing, and trains nothing
            changed.pop("flags")
        for what, names in changed.items():
            if names:
                raise RuntimeError(f"{name_some(list(dict.fromkeys(names)))} {_CHANGED[what]}")


_CHANGED = {
    "came": "came into the model after the engine was built, which does not train it: build the whole model first, "
    "then the engine",
    "replaced": "was replaced after the engine was built (by setattr, a parametrization, weight_norm, functional_call "
    "or load_state_dict(assign=True)). The engine would train a tensor that the model no longer uses. Change the model "
    "first, then build the engine; load by engine.load_full_state_dict()",
    "flags": "had its requires_grad changed after the engine was built, which has buckets, hooks and optimizer state "
    "for the flags as they were. (The whole model may be frozen for a while, and trained again.) Change it back, or "
    "take state = engine.full_state_dict(), build a new model, load the "
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


def address_of(param: torch.Tensor) -> int:
    return getattr(param, "_local_tensor", param).data_ptr()


def moved_message(names: list[str]) -> str:
    return f"{name_some(names)} {_CHANGED['moved']}"


def watch_optimizer(engine, optimizer) -> None:
    """Only `engine.step()` steps, over the groups of the build; what else the optimizer writes is gathered."""
    this = weakref.ref(engine)

    def members():
        return [[id(piece) for piece in group["params"]] for group in optimizer.param_groups]

    built = members()

    @not_compiled
    def before_step(optimizer, args, kwargs):
        engine = living(this)
        if engine is not None and not engine.updating:
            for left in ("grad_scale", "found_inf"):  # by torch's GradScaler
                vars(optimizer).pop(left, None)
            raise RuntimeError(
                "optimizer.step() alone would update this rank's shard with gradients that were not reduced, and leave "
                "the other ranks without it: call engine.step(). A scheduler over engine.optimizer sees that step. "
                "For float16 take zerolab.engine.gradients.GradScaler, with the engine in the optimizer's place"
            )
        if members() != built:
            _refuse_groups()

    @not_compiled
    def after_step(optimizer, args, kwargs):
        if this() is not None:
            this().stepped()

    def gathering(method):
        """`train()` or `eval()` of an optimizer that swaps weights, as schedule-free ones do."""

        def call(*args, **kwargs):
            method(*args, **kwargs)
            if living(this) is not None:
                this().shards_changed()

        return call

    for name in ("train", "eval"):
        if hasattr(optimizer, name):
            setattr(optimizer, name, gathering(getattr(optimizer, name)))
    optimizer.add_param_group = _refuse_groups
    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
    optimizer._step_supports_amp_scaling = True  # so that torch's GradScaler calls `step`, and `before_step` answers
    # The pieces' gradients alone are not all that a stage keeps of a step.
    optimizer.zero_grad = lambda set_to_none=True: this().zero_grad()


def _refuse_groups(*_) -> None:
    raise RuntimeError(
        "the optimizer's groups have other members than at the build. The engine shards, reduces and gathers the "
        "parameters that it was built with: pass them in groups, as param_groups=[...]; for other ones build another "
        "model and engine. Options of a group, such as its learning rate, may change"
    )
