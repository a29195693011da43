"""A clear error in place of a crash, for whoever touches a weight while it is sharded.

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
}  # fmt: skip


class ShardedParameter(nn.Parameter):
    """What a parameter is while it is freed: the same object, of this class, with the error below."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        # A property arrives as its getter, whose __self__ carries the property's name.
        name = getattr(getattr(func, "__self__", None), "__name__", None) or getattr(func, "__name__", "")
        if name in _METADATA or getattr(func, "__name__", "") in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        freed = next(arg for arg in _flatten((args, kwargs or {})) if isinstance(arg, cls))
        raise RuntimeError(
            f"parameter {freed.zero_name!r} is sharded over the ranks and not gathered now (asked for: {name}). Whole "
            "weights exist only inside the model's forward and backward: call engine(inputs) and not a submodule "
            "alone, and read weights with engine.full_state_dict(). If the model's own forward got here, it uses "
            "this weight outside the module it belongs to: choose other units"
        )


def _flatten(arguments):
    for arg in arguments.values() if isinstance(arguments, dict) else arguments:
        if isinstance(arg, (list, tuple, dict)):
            yield from _flatten(arg)
        else:
            yield arg


def name_parameter(param: nn.Parameter, name: str) -> None:
    """Give `param` the name that an error shows."""
    param.zero_name = name


def close(params: list[nn.Parameter]) -> None:
    """From here on, using the values of these parameters raises RuntimeError."""
    for param in params:
        if type(param) is nn.Parameter:  # not the fake tensors of a dry run, which have no values anyway
            param.__class__ = ShardedParameter


def open(params: list[nn.Parameter]) -> None:
    """These parameters are whole again."""
    for param in params:
        if type(param) is ShardedParameter:
            param.__class__ = nn.Parameter
