"""A clear error in place of a crash, for whoever touches a weight while it is freed.

A freed parameter's storage has zero bytes. Most operations on it, `model.state_dict()`, `copy.deepcopy`,
printing or calling a submodule by itself, would read memory that is not there and kill the process.
"""

from torch import nn

# What may be asked of a freed parameter: everything that does not look at its values.
_METADATA = {
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "requires_grad_", "is_leaf", "grad", "grad_fn",
    "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "itemsize", "nbytes", "names", "_backward_hooks",
    "size", "numel", "nelement", "dim", "element_size", "stride", "storage_offset", "is_contiguous",
    "is_floating_point", "is_complex", "get_device", "register_post_accumulate_grad_hook", "register_hook",
    "_post_accumulate_grad_hooks", "untyped_storage", "data_ptr",
}  # fmt: skip


class FreedParameter(nn.Parameter):
    """What a parameter is while it is freed: the same object, of this class, with the error below."""

    zero_touched = staticmethod(lambda param: False)  # see `watch`

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        # A property arrives as its getter, whose __self__ carries the property's name.
        name = getattr(getattr(func, "__self__", None), "__name__", None) or getattr(func, "__name__", "")
        if name in _METADATA or getattr(func, "__name__", "") in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        freed = next(arg for arg in _flatten((args, kwargs or {})) if isinstance(arg, cls))
        if freed.zero_touched(freed):  # it is gathered now: backward runs a part of its unit again
            return func(*args, **(kwargs or {}))
        raise RuntimeError(message(freed, name))


def message(param: nn.Parameter, asked_for: str) -> str:
    return (
        f"parameter {param.zero_name!r} is freed: its values are sharded over the ranks (asked for: {asked_for}). They "
        "are gathered only inside the model's forward and backward: call engine(inputs) and not a submodule alone, and "
        "read weights with engine.full_state_dict(). If the model's own forward got here, it uses this weight outside "
        "the module it belongs to: choose other units"
    )


def _flatten(arguments):
    for arg in arguments.values() if isinstance(arguments, dict) else arguments:
        if isinstance(arg, (list, tuple, dict)):
            yield from _flatten(arg)
        else:
            yield arg


def name_parameters(bucket) -> None:
    """Give the parameters of `bucket` the names that an error shows."""
    for name, param in zip(bucket.names, bucket.params):
        param.zero_name = name


def watch(params: list[nn.Parameter], touched) -> None:
    """Have `touched(param)` called before a freed parameter raises; if it returns True the parameter is gathered."""
    for param in params:
        param.zero_touched = touched


def close(params: list[nn.Parameter]) -> None:
    """From here on, using the values of these parameters raises RuntimeError."""
    for param in params:
        if type(param) is nn.Parameter:  # not the fake tensors of a dry run, which have no values anyway
            param.__class__ = FreedParameter


def open(params: list[nn.Parameter]) -> None:
    """These parameters are gathered again."""
    for param in params:
        if type(param) is FreedParameter:
            param.__class__ = nn.Parameter
