"""What every stage offers beside its steps. None of it is the lesson, and no step is hidden here."""

import contextlib
import functools

from harness.engine import gradients, state


class Interface:
    """A stage is called like its model, clips gradients, gives and takes whole weights, and can be closed."""

    def __init_subclass__(cls):
        # `optimizer.step()` outside of the stage's own `step()` is refused (engine/optimizer.py). So `step` has to say
        # that it runs.
        if "step" in vars(cls):
            cls.step = _updating(cls.step)

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def no_sync(self):
        """`with engine.no_sync():` around all but the last of several backwards before a step.

        Gradients then add up on this rank, whole, and nothing is sent.
        """
        return self.moments.no_sync()

    clip_grad_norm_ = gradients.clip_grad_norm_
    clip_grad_value_ = gradients.clip_grad_value_
    full_state_dict = state.full_state_dict
    load_full_state_dict = state.load_full_state_dict
    close = state.close

    def train(self, mode: bool = True):
        """`model.train(mode)`; returns the engine, as the model's returns the model."""
        self.model.train(mode)
        return self

    def eval(self):
        """`model.eval()`; returns the engine."""
        return self.train(False)

    @property
    def training(self) -> bool:
        return self.model.training

    def parameters(self, recurse: bool = True):
        """The model's own parameters. Their values are for the model's forward, their gradients are in the pieces."""
        return self.model.parameters(recurse)

    def named_parameters(self, *args, **kwargs):
        return self.model.named_parameters(*args, **kwargs)

    def buffers(self, recurse: bool = True):
        return self.model.buffers(recurse)

    def named_buffers(self, *args, **kwargs):
        return self.model.named_buffers(*args, **kwargs)

    def modules(self):
        return self.model.modules()

    def named_modules(self, *args, **kwargs):
        return self.model.named_modules(*args, **kwargs)

    def __getattr__(self, name: str):
        if "model" not in vars(self) and vars(self).keys() <= {"updating"}:
            raise AttributeError(f"this {type(self).__name__} was closed: build another engine on the model")
        if name in _INSTEAD:
            raise AttributeError(f"{type(self).__name__} has no {name}(): {_INSTEAD[name]}")
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}"
            + (f"; its model has: engine.model.{name}" if "model" in vars(self) and hasattr(self.model, name) else "")
        )


_INSTEAD = {
    "state_dict": "whole weights are engine.full_state_dict(), a collective of all ranks; the optimizer's state of "
    "this rank is engine.optimizer.state_dict()",
    "load_state_dict": "call engine.load_full_state_dict(state) on every rank; the optimizer's state of this rank goes "
    "into engine.optimizer.load_state_dict()",
    "backward": "call loss.backward()",
    "to": "move the model first, then build the engine",
    "cuda": "move the model first, then build the engine",
    "cpu": "move the model first, then build the engine",
    "half": "build the engine with param_dtype=torch.float16",
    "bfloat16": "build the engine with param_dtype=torch.bfloat16",
    "float": "move the model first, then build the engine",
    "double": "move the model first, then build the engine",
    "requires_grad_": "set requires_grad on the model's parameters before building the engine",
}


def _updating(step):
    @functools.wraps(step)
    def updating_step(self, *closure):
        if closure:
            raise TypeError("engine.step() takes no closure: call loss.backward(), then engine.step()")
        with updating(self):
            return step(self)

    return updating_step


@contextlib.contextmanager
def updating(engine):
    before, engine.updating = vars(engine).get("updating", False), True
    try:
        yield
    finally:
        engine.updating = before
