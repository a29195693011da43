"""The list of what is in a checkpoint, `.metadata`, read without running anybody's code.

torch writes the list as a pickle. A pickle may call whatever function it names, and set the fields of whatever class
it names. So the unpickler here hands out no function and none of the process's classes. It takes the names of an
allow-list alone. For a class it hands out a stand-in, which only keeps what it is given. The list in torch's own
classes is made afterwards, from plain values.
"""

import io
import pickle

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo


class Unsafe(RuntimeError):
    """A checkpoint holds something else than tensors and plain values. It was not unpickled."""


class _StandIn:
    """An object of a class that the list names. The class itself takes no fields: `__setstate__` wants an object."""

    arguments, fields = (), {}

    def __init__(self, *arguments):
        self.arguments = arguments

    def __setstate__(self, fields):
        self.fields = fields


_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_MADE_ANEW = {name: getattr(metadata, name) for name in metadata.__all__} | {"_StorageInfo": _StorageInfo}
_LEFT_OUT = ("_get_layout", "_MEM_FORMAT_ENCODING")  # of a tensor, and no matter to who reads its values
_MODULES = (metadata.__name__, _StorageInfo.__module__, "torch.serialization")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if f"{module}.{name}" in _DTYPES:
            return _DTYPES[f"{module}.{name}"]
        a_path = module.split(".")[0] == "pathlib" and name.endswith("Path")  # where the list was written
        if a_path or (module, name) == ("torch", "Size") or module in _MODULES and name in (*_MADE_ANEW, *_LEFT_OUT):
            return type(name, (_StandIn,), {})
        raise Unsafe(f"it asks for {module[:100]}.{name[:100]}, which is no part of a list of tensors")


def _made_anew(value):
    """`value` in torch's own classes. Of wrong fields they raise TypeError."""
    if isinstance(value, dict):
        return {_made_anew(key): _made_anew(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_made_anew, value))
    if not isinstance(value, _StandIn):
        return value
    kind = type(value).__name__
    if kind == "Size":
        return torch.Size(*value.arguments)
    if kind == "TensorProperties":
        return metadata.TensorProperties(dtype=value.fields[0])
    return _MADE_ANEW[kind](**_made_anew(value.fields)) if kind in _MADE_ANEW else None


def read(content: bytes) -> metadata.Metadata:
    """The list in `content`. Raises `Unsafe` for a foreign name, and any error for what is damaged."""
    return _made_anew(_Unpickler(io.BytesIO(content)).load())
