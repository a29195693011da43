"""What was changed behind the engine's back is refused at the next forward, with the way out."""

import weakref

from torch import nn

from harness.engine import precision
from harness.engine.autograd import backward_now
from harness.engine.units import default_units
from harness.engine.waiting import name_some


def watch_forward(engine) -> list:
    """Look at the model before every forward, and cast its inputs in mixed precision. Returns the hooks' handles.

    The first handle is that of the look. It raises RuntimeError for parameters that came, or were frozen or unfrozen,
    since the engine was built.
    """
    look = Look(engine)
    handles = [engine.model.register_forward_pre_hook(look)]
    if engine.dtypes[0] is not None:
        for module in engine.model.modules():
            handles.append(module.register_load_state_dict_pre_hook(refuse_loading))
        units = getattr(engine, "units", None)
        modules = default_units(engine.model) if units is None else [unit.module for unit in units]
        handles += precision.cast_inputs([engine.model, *modules], engine.dtypes[0])
    return handles


class Look:
    """What the parameters were when the engine was built, compared with what they are."""

    def __init__(self, engine):
        self._engine = weakref.ref(engine)
        self._flags = [[param.requires_grad for param in bucket.params] for bucket in engine.buckets]
        self._known = {id(param) for bucket in engine.buckets for param in bucket.params}

    def __call__(self, model: nn.Module, args) -> None:
        engine = self._engine()
        if engine is None or backward_now() is not None:  # gone; or activation checkpointing runs the model again
            return
        new = [name for name, param in model.named_parameters() if id(param) not in self._known]
        if new:
            raise RuntimeError(
                f"{name_some(new)} came into the model after the engine was built, which does not train it: build the "
                "whole model first, then the engine"
            )
        changed = []
        for bucket, was in zip(engine.buckets, self._flags):
            for name, param, before in zip(bucket.names, bucket.params, was):
                if param.requires_grad != before:
                    changed.append(name)
        if changed:
            raise RuntimeError(
                f"requires_grad of {name_some(changed)} was changed after the engine was built, which has buckets, "
                "hooks and optimizer state for the flags as they were. Change it back, or take state = "
                "engine.full_state_dict(), build a new model, load the state into it, set the flags, and build a new "
                "engine (its optimizer starts afresh). A parameter that only rests for some steps can be left out of "
                "the loss with find_unused=True"
            )


def refuse_loading(module, *args) -> None:
    raise RuntimeError(
        "model.load_state_dict() would change the rounded weights and not the float32 ones that the optimizer "
        "updates, and be undone by the next step: call engine.load_full_state_dict(state)"
    )
