"""The classes that an engine gives to parameters, so that a mistake is an error and not a wrong result.

An engine keeps the parameter objects, but changes their class to `EngineParameter`, and to `FreedParameter` while their
unit is freed. These classes detect three mistakes, which would otherwise have these consequences:

    reading a gradient that has moved into the shards      torch's clipping, for example, would find no gradients
    replacing a gradient, so that it is not reduced        `model.zero_grad()` would have no effect, or a wrong one
    reading a freed weight                                 the process would crash, or the values would be garbage

DTensors, other subclasses of Parameter and fake tensors keep their class, so nothing is detected there.
"""

import weakref

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zero3 import in_backward

get_grad = torch._C.TensorBase.grad.__get__  # `param.grad` and `param.grad = ...`, without the checks below
set_grad = torch._C.TensorBase.grad.__set__
without_checks = torch._C.DisableTorchFunctionSubclass  # saves the call of __torch_function__ for freed parameters


class EngineParameter(nn.Parameter):
    """A parameter whose gradient moves into the shard. Without this, torch's clipping would find no gradient at all."""

    # A weak reference to the parameter's bucket. With a strong one, a loss that the model keeps would keep the model
    # alive forever, through autograd's graph, the parameter and the unit.
    bucket = None

    @property
    def grad(self):
        gradient = get_grad(self)
        if gradient is None:
            check_moved(self)
        return gradient

    @grad.setter
    def grad(self, value):
        check_replaced(self, value)
        set_grad(self, value)

    def __reduce_ex__(self, protocol):
        """A pickled parameter is an ordinary one."""
        plain = nn.Parameter(self.detach(), self.requires_grad)
        plain.__dict__.update({name: value for name, value in vars(self).items() if name != "bucket"})
        return plain.__reduce_ex__(protocol)


def check_moved(param):
    """Raise RuntimeError if `param` has got a gradient that is in the engine now."""
    bucket = bucket_of(param)
    if bucket is not None and param in bucket.used:
        raise RuntimeError(
            f"the gradient of {name_of(param)!r} has moved into the engine's shards. Use engine.clip_grad_norm_(), "
            "engine.step() and engine.zero_grad(). To read or change gradients, call engine.reduce_gradients(): they "
            "are in the parameters of the optimizer then. If another optimizer over the model's parameters raised "
            "this: only the one that was passed to the engine works. If a hook on the parameter did: register it "
            "before the engine is built"
        )


def check_replaced(param, value):
    """Raise RuntimeError if `value` must not become `param.grad`."""
    bucket = bucket_of(param)
    if bucket is None or bucket.gradient is None:
        check_moved(param)
    elif value is not bucket.grad_of[param]:
        raise RuntimeError(
            f"param.grad of {name_of(param)!r} must not be replaced, because it is a part of the engine's buffer: the "
            "new gradient would not be reduced. Change it in place. To clear gradients, call engine.zero_grad(), and "
            "not zero_grad() of the model or of another optimizer over the model's parameters"
        )


class FreedParameter(EngineParameter):
    """A parameter whose storage has no bytes. Reading it would crash the process or return garbage."""

    def __repr__(self):
        """For messages and debuggers, which print parameters. The values cannot be printed, because they are freed."""
        name = "of an engine that is gone" if bucket_of(self) is None else repr(name_of(self))
        return f"FreedParameter({name}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if not reads_values(function):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        freed = [each for each in tree_leaves((args, kwargs)) if isinstance(each, FreedParameter)]
        if bucket_of(freed[0]) is None:
            raise RuntimeError(
                f"a parameter of shape {tuple(freed[0].shape)} has no values any more, because its engine is gone and "
                "had them. Call engine.full_state_dict() before you drop an engine, and load the state into a new model"
            )
        if in_backward() and torch.is_grad_enabled():  # a checkpoint runs a part of the forward again
            for param in freed:
                bucket_of(param).on_recomputation()  # gathers
            return function(*args, **(kwargs or {}))
        raise RuntimeError(
            f"parameter {name_of(freed[0])!r} is freed: its values are sharded over the ranks. They are whole only "
            "inside the model's forward and backward. Call engine(inputs) and not a part of the model; read weights "
            "with engine.full_state_dict(), and write them with engine.load_full_state_dict()"
        )


VALUES = {"data", "real", "imag", "T", "H", "mT", "mH"}  # properties that give access to the values
METADATA = {  # methods that do not give access to the values
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
    """Change the class of the parameters, except for DTensors, fake tensors and other subclasses."""
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
