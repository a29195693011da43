"""What every stage offers beside its steps. None of it is the lesson, and no step is hidden here."""

import functools
from collections.abc import Iterable

import torch.distributed as dist

from harness.engine import gradients, refusals, state
from harness.engine.placement import Placement


def _of_the_model(name: str):
    return lambda engine, *args, **kwargs: getattr(engine.model, name)(*args, **kwargs)


class Interface:
    """A stage is called like its model, clips gradients, gives and takes whole weights, and can be closed."""

    def __init_subclass__(cls):
        # `optimizer.step()` outside of the stage's own `step()` is refused (engine/optimizer.py). So `step` has to say
        # that it runs.
        if "step" not in vars(cls):
            return
        step = cls.step

        @functools.wraps(step)
        def updating_step(self, *closure):
            if closure:
                raise TypeError("engine.step() takes no closure: call loss.backward(), then engine.step()")
            before, self.updating = vars(self).get("updating", False), True
            try:
                return step(self)
            finally:
                self.updating = before

        cls.step = updating_step

    def prepare(self, model, optimizer_cls, param_groups, own: dict, source=None, *, group=None, param_dtype=None,
                reduce_dtype=None, find_unused=False, offload_policy=None) -> None:  # fmt: skip
        """The beginning of step 0. Every stage has these options, and `own` ones.

        `group` is the process group or DeviceMesh to shard over (default: all ranks). A mesh of two dimensions has
        replicas along the first. `offload_policy` moves shards to the host (both: engine/placement.py). `param_groups`
        are a torch optimizer's, over the model's parameters. `param_dtype` is that of weights and computation,
        `reduce_dtype` (default: the same) that of gradients when they are sent; shards keep the model's.
        `find_unused=True` lets a step leave parameters without a gradient. `source`: see `refusals.check`.
        """
        if isinstance(own.get("units"), Iterable):
            own["units"] = list(own["units"])
        placement, dtypes = Placement(group, offload_policy), (param_dtype, reduce_dtype)
        refusals.check(model, optimizer_cls, param_groups, placement, dtypes, find_unused, source, **own)
        self.model, self.group, self.placement = model, placement.group, placement
        self.dtypes, self.find_unused = dtypes, find_unused
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def __reduce_ex__(self, protocol):
        way = "checkpoint.save(engine, folder) keeps it, and engine.full_state_dict() has whole weights"
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: {way}")

    def no_sync(self):
        """`with engine.no_sync():` around all but the last of several backwards before a step.

        Gradients then add up on this rank, whole, and nothing is sent.
        """
        return self.hooks.no_sync()

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

    # The model's own. Parameters' values are for the model's forward, and their gradients are in the pieces.
    parameters, named_parameters = _of_the_model("parameters"), _of_the_model("named_parameters")
    buffers, named_buffers = _of_the_model("buffers"), _of_the_model("named_buffers")
    modules, named_modules = _of_the_model("modules"), _of_the_model("named_modules")

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
    **dict.fromkeys(("to", "cuda", "cpu", "float", "double"), "move the model first, then build the engine"),
    "half": "build the engine with param_dtype=torch.float16",
    "bfloat16": "build the engine with param_dtype=torch.bfloat16",
    "requires_grad_": "set requires_grad on the model's parameters before building the engine",
}
