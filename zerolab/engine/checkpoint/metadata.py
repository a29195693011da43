"""Reading `.metadata`, the list of a checkpoint's contents, without running code from the file.

DCP writes the list as a pickle. A pickle may call any function that it names and set the fields of any class that it
names. So the unpickler here returns no functions and no real classes. It accepts the few names that such a list needs,
and returns a placeholder for each class, which only stores arguments and fields. DCP's own objects are made afterwards
from these plain values.
"""

import io
import pickle

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo  # the class of entries in a list of contents


class Unsafe(RuntimeError):
    """A checkpoint contains something other than tensors and plain values. It was not unpickled."""


class Placeholder:
    """Replaces an object of a class that the list names."""

    arguments, fields = (), {}

    def __init__(self, *arguments):
        self.arguments = arguments

    def __setstate__(self, fields):
        self.fields = fields


DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
REBUILT = {name: getattr(metadata, name) for name in metadata.__all__} | {"_StorageInfo": _StorageInfo}
DROPPED = ("_get_layout", "_MEM_FORMAT_ENCODING")  # properties of a tensor that do not matter to a reader
MODULES = (metadata.__name__, _StorageInfo.__module__, "torch.serialization")


class RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if f"{module}.{name}" in DTYPES:
            return DTYPES[f"{module}.{name}"]
        is_path = module.split(".")[0] == "pathlib" and name.endswith("Path")  # the folder that was written to
        is_size = (module, name) == ("torch", "Size")
        if is_path or is_size or (module in MODULES and name in (*REBUILT, *DROPPED)):
            return type(name, (Placeholder,), {})
        raise Unsafe(f"it asks for {module[:100]}.{name[:100]}, which is not part of a list of tensors")


def rebuild(value):
    """Convert `value` to DCP's own classes. Raises TypeError or another error for wrong fields."""
    if isinstance(value, dict):
        return {rebuild(key): rebuild(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(rebuild, value))
    if not isinstance(value, Placeholder):
        return value
    kind = type(value).__name__
    if kind == "Size":
        return torch.Size(*value.arguments)
    if kind == "TensorProperties":
        return metadata.TensorProperties(dtype=value.fields[0])
    return REBUILT[kind](**rebuild(value.fields)) if kind in REBUILT else None


def read_metadata(content):
    """The list in the bytes `content`. Raises `Unsafe` if it names anything else, and any error for damaged bytes."""
    return rebuild(RestrictedUnpickler(io.BytesIO(content)).load())
