"""Reading a checkpoint's folder, which may be damaged, or written by somebody you do not trust.

DCP's own reader trusts a checkpoint. `.metadata`, the list of its contents, is a pickle, and so is every value that is
not a tensor. Unpickling calls any function that the file names, so a file can run any code. Here metadata.py reads
`.metadata`, and `torch.load(weights_only=True)`, which creates only tensors and plain values, reads the values.

DCP also loads a changed byte without an error. Here the file SHA256SUMS has a checksum of each file. To check them,
every file is read once more, and each rank checks 1/N of the files.
"""

import contextlib
import hashlib
import math
import pickle
import stat
from collections import Counter
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict  # torch's inverse of how it names leaves
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import tree_leaves, tree_map

from zerolab.engine.checkpoint.metadata import Unsafe, read_metadata
from zerolab.engine.checks import shorten

METADATA, SUMS = ".metadata", "SHA256SUMS"


class Damaged(RuntimeError):
    """A checkpoint lacks a file, or a file has changed since it was written. An older checkpoint may be intact."""


def complete(folder):
    """The paths of the complete checkpoints in `folder`, the oldest first."""
    found = [path for path in Path(folder).glob("[0-9]*") if path.name.isdecimal() and (path / METADATA).is_file()]
    return sorted(found, key=lambda path: int(path.name))


def newest(folder):
    """`folder` itself if it is a checkpoint, else the newest checkpoint in it. Raises FileNotFoundError without one."""
    if (Path(folder) / METADATA).is_file():
        return Path(folder)
    found = complete(folder)
    if not found:
        raise FileNotFoundError(f"no complete checkpoint in {str(folder)!r}")
    return found[-1]


def sha256(file):
    with open(file, "rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class SafePlanner(DefaultLoadPlanner):
    """DCP's planner, whose own `load_bytes` unpickles anything."""

    def load_bytes(self, read_item, value):
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


class Folder:
    """One checkpoint. Raises `Damaged` if a file is missing or has changed, and `Unsafe` for a pickle of objects.

    tensors   {name: a tensor on meta, of the same shape and dtype}
    tree      the names of all values, nested as the values were: {"model": {"head.weight": "model.head.weight"}, ...}
    model     the part of `tree` that is the model's `state_dict()`

    rank, world_size   select the files that this rank checks. With `check=False` it checks none
    """

    def __init__(self, path, rank=0, world_size=1, check=True):
        self.path = Path(path)
        with self.explain_errors():
            sums = self.read_sums() if check else {}
            self.check_file(METADATA, sums.get(METADATA, "") if sums else None)
            self.metadata = read_metadata((self.path / METADATA).read_bytes())
            entries = self.metadata.state_dict_metadata
            paths = {name: path for name, path in self.metadata.planner_data.items() if name in entries}
            self.tree = unflatten_state_dict({name: name for name in paths}, paths)
            self.model = self.tree.get("model", {})
            self.tensors = {}
            for name, entry in entries.items():
                if isinstance(entry, TensorStorageMetadata):
                    self.tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            if check and not sums and SUMS in self.metadata.storage_meta.modules:
                raise Damaged(f"{str(self.path / SUMS)!r} is missing, so no file can be checked")
            files = {info.relative_path for info in self.metadata.storage_data.values()}
            for index, name in enumerate(sorted(files)):
                is_mine = index % world_size == rank
                self.check_file(name, sums.get(name, "") if sums and is_mine else None)

    @contextlib.contextmanager
    def explain_errors(self):
        """Convert any error inside to `Unsafe` or `Damaged`, because a damaged pickle can raise any error."""
        try:
            yield
        except (Unsafe, pickle.UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise Unsafe(
                f"{str(self.path)!r} was not loaded: it contains something other than tensors and plain values, or is "
                f"damaged ({reason})"
            ) from None
        except Damaged:
            raise
        except Exception as error:
            raise Damaged(f"{str(self.path)!r} cannot be read: {type(error).__name__}: {error}") from error

    def read_sums(self):
        """{name of a file: its SHA-256}, in the format of `sha256sum -c`. {} if DCP wrote the checkpoint."""
        if not (self.path / SUMS).exists():
            return {}
        self.check_file(SUMS, None)
        lines = [line.partition("  ") for line in (self.path / SUMS).read_text().splitlines()]
        return {name: digest for digest, _, name in lines}

    def check_file(self, name, expected_sum):
        """Raise an error unless `name` is an unchanged regular file in this folder, and no link, pipe or device."""
        file = self.path / name
        if Path(name).name != name or file.resolve().parent != self.path.resolve():
            raise Unsafe(f"it points to {name[:200]!r}, which is not in this folder")
        if not stat.S_ISREG(file.stat().st_mode):
            raise Unsafe(f"{name!r} is not a regular file")
        if expected_sum is not None and sha256(file) != expected_sum:
            raise Damaged(f"{str(file)!r} is not what was written: its SHA-256 is not the one in {SUMS}")

    def model_on_meta(self):
        """{name: tensor on meta} of the model's tensors, without extra states."""
        return {
            key: self.tensors[name]
            for key, name in self.model.items()
            if isinstance(name, str) and name in self.tensors
        }

    def empty(self, name):
        """Memory to read the tensor `name` into, or None for a value that is not a tensor."""
        tensor = self.tensors.get(name)
        return None if tensor is None else torch.empty_like(tensor, device="cpu")

    def values(self, names):
        """The values under `names`, which may be nested in dictionaries, lists and tuples."""
        found = self.read({name: self.empty(name) for name in tree_leaves(names)})
        return tree_map(found.get, names)

    def read(self, wanted):
        """Fill `wanted`: {name: a tensor or a `Piece` on the CPU, or None for a value that is not a tensor}.

        Returns {name: value}; the value of a `Piece` is its `elements`.
        """
        tensors = {name: getattr(value, "elements", value) for name, value in wanted.items() if value is not None}
        planner = SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = FileSystemReader(self.path)
        with self.explain_errors():
            planner.set_up_planner(wanted, self.metadata, is_coordinator=True)
            reader.set_up_storage_reader(self.metadata, is_coordinator=True)
            plan = planner.create_local_plan()
            counts = Counter()
            for item in plan.items:
                counts[item.dest_index.fqn] += math.prod(item.lengths)
            missing = [name for name, tensor in tensors.items() if counts[name] != tensor.numel()]
            if missing:  # DCP would leave these elements of `wanted` unchanged
                raise Damaged(f"{str(self.path)!r}: elements of {shorten(missing)} are missing")
            reader.read_data(plan, planner)
        return wanted | tensors
