"""A clear error where a parameter would give a wrong answer, or end the process.

While an engine has a parameter, the object is the same and its class is another, made here:

- An *engine's* parameter has no gradient after backward, because it has moved into this rank's pieces. Whoever takes
  that for "there is no gradient" (torch's clipping, an optimizer over the model's parameters) gets an error.
- A *freed* parameter's storage has zero bytes. Most operations on it, `model.state_dict()`, `copy.deepcopy`, printing
  or calling a submodule by itself, would read memory that is not there and kill the process. They get an error.
"""

import functools
import sys
import weakref

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._pytree import tree_leaves

from zerolab.engine.hooks import not_compiled
from zerolab.engine.options.tensor_parallel import local_gradient
from zerolab.engine.safety.waiting import name_some

# What may be asked of a freed parameter: everything that does not look at its values. First its properties but these,
_VALUES = {"data", "real", "imag", "T", "H", "mT", "mH"}
# and then methods.
_METADATA = {
    "requires_grad_", "size", "numel", "nelement", "dim", "element_size", "stride", "storage_offset", "is_contiguous",
    "__len__", "is_floating_point", "is_complex", "get_device", "register_post_accumulate_grad_hook", "register_hook",
    "untyped_storage", "data_ptr", "is_shared", "is_inference", "empty_like", "_is_view", "is_same_size", "__hash__",
    "_has_compatible_shallow_copy_type",
}  # fmt: skip
# Moves that may change nothing, as `model.float()` of a float32 model: they answer with the parameter itself.
_MOVES = {"to", "float", "double", "half", "bfloat16", "cpu", "cuda", "type"}
# Who would take a gradient of None for "this parameter has no gradient".
_TAKERS = ("torch.nn.utils.clip_grad", "torch.optim.", "torch.amp.", "torch.nn.modules.module")

_grad, _data = torch._C.TensorBase.grad, torch._C.TensorBase.data


class EngineParameter(nn.Parameter):
    """A parameter that an engine has: its gradient moves away while backward runs."""

    zero_name, zero_moved = "", False  # what an error calls it; whether its gradient has moved since `zero_grad()`
    zero_apart = False  # whether its shards have memory of their own: then what is written into it is lost

    @property
    def data(self):
        # Writes through `.data` count nowhere. `detach` gives the same memory, and shares the parameter's counter.
        return super().detach() if self.zero_apart else _data.__get__(self)

    data = data.setter(_data.__set__)  # torch's own

    @property
    def grad(self):
        gradient = _grad.__get__(self)
        if gradient is None and self.zero_moved:
            taker = sys._getframe(1).f_globals.get("__name__", "")
            if taker.startswith(_TAKERS):
                raise RuntimeError(
                    f"the gradient of {self.zero_name!r} has moved into the engine's pieces: {taker} would see none. "
                    "Call engine.clip_grad_norm_(max_norm) and not torch's, engine.step() and not an optimizer over "
                    "model.parameters(), engine.zero_grad() and not model.zero_grad()"
                )
        return gradient

    grad = grad.setter(_grad.__set__).deleter(_grad.__delete__)

    def __deepcopy__(self, memo):  # a copy belongs to no engine; `copy.deepcopy` notes it in `memo`
        return self.zero_plain_class(self.data.clone(), self.requires_grad)

    def __reduce_ex__(self, protocol):
        return self.zero_plain_class(self.data, self.requires_grad).__reduce_ex__(protocol)


def living(reference):
    """The engine that a weak reference is of; None if it is gone, or was closed."""
    engine = reference()
    return engine if engine is not None and vars(engine) else None


class Piece(torch.Tensor):
    """A piece looks like a plain tensor, but torch's clipping finds no gradient in it before step 3 is over.

    What is reduced is not there yet, or not all of it, and the norm of one rank's shard is not the model's.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # results are plain tensors

    @property
    def data(self):
        return self.detach()  # writes through torch's own `data` count nowhere

    data = data.setter(_data.__set__)

    @property
    def grad(self):
        if sys._getframe(1).f_globals.get("__name__") == "torch.nn.utils.clip_grad":
            engine = living(self.zero_engine)
            if engine is not None and not engine.gradients_are_reduced:
                raise RuntimeError(
                    "torch's clipping over the optimizer's pieces would miss gradients that are not reduced yet, and "
                    "see this rank's shard alone: call engine.clip_grad_norm_(max_norm) or "
                    "engine.clip_grad_value_(clip_value) on every rank, between backward and engine.step()"
                )
        return _grad.__get__(self)

    grad = grad.setter(_grad.__set__)


# torch's optimizers work on all tensors at once (foreach, fused) if they know their class. DTensor adds itself, too.
_foreach_supported_types.append(Piece)


class Freed:
    """What a parameter's class is mixed with while it is freed."""

    zero_touched = staticmethod(lambda param: False)  # see `watch`

    @classmethod
    @not_compiled
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        # A property arrives as its getter, whose __self__ carries the property's name.
        kwargs = kwargs or {}
        own = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", None) or own
        a_property = own in ("__get__", "__set__", "__delete__") and name not in _VALUES
        if a_property or own in _METADATA or (name == "type" and len(args) == 1 and not kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        freed = next(arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, Freed))
        if name in _MOVES and _changes_nothing(func, freed, args[1:], kwargs):
            return freed  # it is moved to where it is
        if freed.zero_touched(freed):  # it is gathered now: the model uses it outside its module, or runs a part again
            return func(*args, **kwargs)
        raise RuntimeError(message(freed, name))

    @property
    def data(self):
        """Something that knows the shape, and whose values nobody can read."""
        with torch._C.DisableTorchFunctionSubclass():
            data = torch.Tensor.detach(self)
        data.__class__ = FreedData
        data.zero_name = self.zero_name
        return data

    @data.setter
    def data(self, value):
        if value is not self:  # `module._apply` puts back what did not change
            raise RuntimeError(message(self, "data"))


class FreedData(Freed, torch.Tensor):
    """`param.data` of a freed parameter."""


def _changes_nothing(func, freed, args, kwargs) -> bool:
    empty = torch.empty(0, dtype=freed.dtype, device=freed.device)
    try:
        return func(empty, *args, **kwargs) is empty
    except (RuntimeError, TypeError, ValueError):
        return False


def message(param: nn.Parameter, asked_for: str) -> str:
    return (
        f"parameter {param.zero_name!r} is freed: its values are sharded over the ranks (asked for: {asked_for}). They "
        "are gathered only inside the model's forward and backward: call engine(inputs) and not a submodule alone, "
        "read weights with engine.full_state_dict(), and write them with engine.load_full_state_dict()"
    )


LOST = (
    "was written to outside of a step. Here shards have memory of their own (mixed precision, offload, ZeRO-3), and "
    "what is written into the weights beside them is lost. Change weights by the optimizer, or by "
    "engine.load_full_state_dict(), with what engine.full_state_dict() has given before"
)


@functools.cache
def _engine_class(cls: type) -> type:
    """The class of an engine's parameter that was of class `cls`. It knows `cls`, and what it becomes while freed."""
    gathered = EngineParameter if cls is nn.Parameter else type(f"Engine{cls.__name__}", (EngineParameter, cls), {})
    gathered.zero_plain_class, gathered.zero_gathered_class = cls, gathered
    gathered.zero_freed_class = type(f"Freed{gathered.__name__}", (Freed, gathered), {})
    return gathered


def adopt(bucket, engine) -> None:
    """The bucket's parameters are `engine`'s from here on.

    Fake tensors of a dry run keep their class, for they have no values. So do DTensors, as torch looks at theirs.
    """
    apart = bucket.shard.untyped_storage()._cdata != bucket.flat.untyped_storage()._cdata
    for name, param in zip(bucket.names, bucket.params):
        if not isinstance(param, (FakeTensor, DTensor, EngineParameter)):
            param.__class__ = _engine_class(type(param))
        param.zero_name, param.zero_version, param.zero_moved = name, param._version, False
        param.zero_engine, param.zero_apart = weakref.ref(engine), apart


def release(params) -> None:
    """These parameters have no engine any more, and nothing is an error."""
    for param in params:
        if isinstance(param, EngineParameter):
            param.__class__ = param.zero_plain_class
        for key in [key for key in vars(param) if key.startswith("zero_")]:
            delattr(param, key)


gradient_of = _grad.__get__  # `param.grad`, without asking who wants to know


def take_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """`param.grad`, which is None from now on."""
    gradient = _grad.__get__(param)
    _grad.__set__(param, None)
    return local_gradient(gradient) if isinstance(gradient, DTensor) else gradient


def drop_gradients(params) -> None:
    """No parameter has a gradient, and none has moved."""
    with torch._C.DisableTorchFunctionSubclass():  # quick, also for freed parameters
        for param in params:
            _grad.__set__(param, None)
            param.zero_moved = False


def with_gradient(params) -> list[int]:
    """The numbers of the parameters that have a gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        return [index for index, param in enumerate(params) if _grad.__get__(param) is not None]


def written(bucket) -> list[str]:
    """Names of the parameters that were written to since they were gathered, or since `stepped`.

    It is told once where the next gather puts that right. Whole weights beside shards stay wrong, so it is told again.
    """
    params = [param for param in bucket.params if isinstance(param, EngineParameter)]
    found = [param for param in params if param._version != param.zero_version]
    for param in found:
        if bucket.unit is not None or not param.zero_apart:
            param.zero_version = param._version
    return [param.zero_name for param in found]


def refuse_lost(buckets) -> None:
    """Raise RuntimeError if somebody has written into weights, and shards that have memory of their own lack it."""
    lost = []
    for bucket in buckets:
        if any(param.zero_apart for param in bucket.params):
            lost += written(bucket)
    if lost:
        raise RuntimeError(f"{name_some(lost)} {LOST}")


def stepped(params) -> None:
    """The parameters' values are other ones from here on. A backward of an earlier forward is an error, as in torch."""
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.graph.increment_version(params)
        for param in params:
            param.zero_version = param._version


def watch(params: list[nn.Parameter], touched) -> None:
    """Have `touched(param)` called before a freed parameter raises; if it returns True the parameter is gathered."""
    for param in params:
        param.zero_touched = touched


def close(params: list[nn.Parameter]) -> None:
    """From here on, using the values of these parameters raises RuntimeError. So does having written to them before."""
    lost = []
    for param in params:
        if isinstance(param, EngineParameter):
            if param._version != param.zero_version:
                lost.append(param.zero_name)
                param.zero_version = param._version  # the next gather puts that right
            param.__class__ = param.zero_freed_class
    if lost:
        raise RuntimeError(
            f"{name_some(lost)} was written to while it was gathered. The engine's values are the shards: what is "
            "written into gathered weights is lost. Change weights by the optimizer or engine.load_full_state_dict(). "
            "An embedding's max_norm, and other forwards that write into their weights, cannot be used here"
        )


def open(params: list[nn.Parameter]) -> None:
    """These parameters are gathered again."""
    for param in params:
        if isinstance(param, Freed):
            param.__class__ = param.zero_gathered_class
