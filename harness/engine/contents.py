"""The list of what is in a checkpoint, `.metadata`, read without letting it do anything.

torch writes the list as a pickle: a program of small steps ("take this text", "make a tuple of the last two", "call
that class"). Python's reader runs it with the classes that it names, and a stranger's list can change these. Here a
named class is a function that notes the call. The list is then built anew from the notes, and every value must be what
torch writes at its place. Tuples are short and not deep, so that comparing, hashing or printing one takes no time.
"""

import dataclasses
import io
import pickle

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

MAX_PARTS = 64  # of a name in nested dictionaries, or of a shape


class Unsafe(RuntimeError):
    """A checkpoint holds something else than tensors and plain values. It was not unpickled."""


def _a(kind: type, value):
    """`value`, which must be of `kind`, and not of a class derived from it: True is no number."""
    if type(value) is not kind:
        raise Unsafe(f"it has a {type(value).__name__} where a {kind.__name__} was expected")
    return value


def _number(value) -> int:
    if not 0 <= _a(int, value) < 1 << 62:
        raise Unsafe("a number in it is negative, or too large")
    return value


def _size(numbers=()) -> torch.Size:
    return torch.Size([_number(number) for number in _a(tuple, numbers)])


class _Arguments(tuple):
    """A tuple in which there is another one, as in a call with a shape. It must not be in a third."""


@dataclasses.dataclass(eq=False, repr=False)  # a call is equal to itself alone
class _Call:
    """The class `of` was called; then the fields of the new object were set, once, to `state`."""

    of: str
    state: object = None


class _Steps(dict):
    def __missing__(self, step: int):
        raise Unsafe(f"{chr(step)!r} is no step that makes a list of tensors")


_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_CLASSES = {
    "torch.serialization._get_layout",
    "__builtin__.object",
    "builtins.object",
    f"{_StorageInfo.__module__}._StorageInfo",
}
_CLASSES |= {f"{metadata.__name__}.{name}" for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")}
_NEEDED = """PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 UNICODE BINUNICODE
    SHORT_BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT
    SETITEM SETITEMS GLOBAL STACK_GLOBAL REDUCE MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET"""
_NEEDED = {getattr(pickle, name)[0] for name in _NEEDED.split()}


def _short(step):
    """The `step` that makes a tuple, and a look at that tuple."""

    def load(reader) -> None:
        step(reader)
        made = reader.stack[-1]
        kinds = set(map(type, made))
        if len(made) > MAX_PARTS or _Arguments in kinds:
            raise Unsafe(f"a name or a shape in it has {len(made):,} parts, or parts of parts")
        if tuple in kinds:
            reader.stack[-1] = _Arguments(made)

    return load


class _Reader(pickle._Unpickler):  # the reader that is written in Python, as one can choose its steps
    def find_class(self, module: str, name: str):
        full = f"{module}.{name}"
        if full in ("copy_reg._reconstructor", "copyreg._reconstructor"):
            return lambda call, *_: call()  # how old pickles make an object
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return lambda *_: None  # where the list was written
        if full in _CLASSES:
            return lambda *_: _Call(name)
        if full != "torch.Size" and full not in _DTYPES:
            raise Unsafe(f"it asks for {full[:200]}, which is no part of a list of tensors")
        return _DTYPES.get(full, _size)

    def load_build(self):
        state = self.stack.pop()
        if _a(_Call, self.stack[-1]).state is not None:
            raise Unsafe("it sets the fields of an object twice")
        self.stack[-1].state = state

    dispatch = _Steps({code: step for code, step in pickle._Unpickler.dispatch.items() if code in _NEEDED})
    dispatch[pickle.NEWOBJ[0]] = pickle._Unpickler.load_reduce  # an object is made by a call as well
    dispatch[pickle.BUILD[0]] = load_build
    for _tuple in (pickle.TUPLE[0], pickle.TUPLE1[0], pickle.TUPLE2[0], pickle.TUPLE3[0]):
        dispatch[_tuple] = _short(dispatch[_tuple])


def _fields(value, of: str) -> dict:
    """{name of a field: value} of what must be a call of the class `of`."""
    if _a(_Call, value).of != of:
        raise Unsafe(f"it has a {value.of} where a {of} was expected")
    return _a(dict, {} if value.state is None else value.state)


def _tensor(entry):
    if _a(_Call, entry).of == "BytesStorageMetadata":
        return metadata.BytesStorageMetadata()
    there = _fields(entry, "TensorStorageMetadata")
    dtype = _a(torch.dtype, _a(tuple, _a(_Call, there["properties"]).state)[0])
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in _a(list, there["chunks"])]
    chunks = [metadata.ChunkStorageMetadata(*(_a(torch.Size, c[k]) for k in ("offsets", "sizes"))) for c in chunks]
    return metadata.TensorStorageMetadata(metadata.TensorProperties(dtype), _a(torch.Size, there["size"]), chunks)


def _index(key) -> metadata.MetadataIndex:
    there = _fields(key, "MetadataIndex")
    offset, index = there.get("offset"), there.get("index")
    offset, index = offset and _a(torch.Size, offset), index and _number(index)
    return metadata.MetadataIndex(_a(str, there["fqn"]), offset, index)


def _place(value) -> _StorageInfo:
    there = _fields(value, "_StorageInfo")
    if there.get("transform_descriptors"):
        raise Unsafe("its files are compressed")
    return _StorageInfo(_a(str, there["relative_path"]), _number(there["offset"]), _number(there["length"]))


def read(content: bytes) -> metadata.Metadata:
    """The list in `content`. Raises `Unsafe` for what is no part of a list, and any error for what was cut off."""
    there = _fields(_Reader(io.BytesIO(content)).load(), "Metadata")
    about = there.get("storage_meta")
    modules = _a(list, _fields(about, "StorageMeta").get("modules", []) if about else [])
    paths = {name: _a(tuple, path) for name, path in _a(dict, there.get("planner_data") or {}).items()}
    return metadata.Metadata(
        {_a(str, name): _tensor(entry) for name, entry in _a(dict, there["state_dict_metadata"]).items()},
        {_a(str, name): tuple(_a(str if type(p) is str else int, p) for p in path) for name, path in paths.items()},
        {_index(key): _place(info) for key, info in _a(dict, there["storage_data"]).items()},
        metadata.StorageMeta(modules=[_a(str, name) for name in modules]),
    )
