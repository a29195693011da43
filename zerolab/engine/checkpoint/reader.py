"""Reading a checkpoint's folder, which may be damaged, and which somebody else may have written.

torch's reader trusts a checkpoint. `.metadata`, the list of what is in it, is a pickle, and so is every value that is
no tensor. Unpickling calls whatever function the file names. So a file can run any code. Here `.metadata` is read by
contents.py, and values by `torch.load(weights_only=True)`, which makes tensors and plain values. And nothing tells
torch that a byte has changed: SHA256SUMS does.
"""

import contextlib
import hashlib
import io
import math
import pickle
import stat
from collections import Counter
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._pytree import tree_leaves, tree_map

from zerolab.engine.checkpoint import contents
from zerolab.engine.checkpoint.contents import Unsafe
from zerolab.engine.checks import some as name_some

METADATA, SUMS = ".metadata", "SHA256SUMS"


class Damaged(RuntimeError):
    """A checkpoint lacks a file, or a file is not what was written. An older checkpoint may be good."""


class _Planner(DefaultLoadPlanner):
    """torch's planner, but for one thing: its own `load_bytes` unpickles anything."""

    def load_bytes(self, read_item, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def sha256(file: Path) -> str:
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def complete(folder) -> list[Path]:
    """The checkpoints in `folder`, the oldest first. One that was not finished has another name."""
    found = [path for path in Path(folder).glob("[0-9]*") if path.name.isdecimal() and (path / METADATA).is_file()]
    return sorted(found, key=lambda path: int(path.name))


def newest(folder) -> Path:
    """`folder` itself if it is a checkpoint, else the newest one in it. Raises FileNotFoundError if there is none."""
    found = [Path(folder)] if (Path(folder) / METADATA).is_file() else complete(folder)
    if not found:
        raise FileNotFoundError(f"no complete checkpoint in {str(folder)!r}")
    return found[-1]


@contextlib.contextmanager
def _reading(path: Path):
    """Whatever is raised while files are read says that the checkpoint is unsafe or damaged."""
    try:
        yield
    except (Unsafe, pickle.UnpicklingError) as error:
        why = str(error).partition("\n")[0]
        raise Unsafe(
            f"{str(path)!r} was not read: it holds something else than tensors and plain values, or is damaged ({why})"
        ) from None
    except Damaged:
        raise
    except Exception as error:  # of a damaged pickle anything may come
        raise Damaged(f"{str(path)!r} cannot be read: {type(error).__name__}: {error}") from error


class Folder:
    """One checkpoint. Its list of contents was read, and its files are all there and as they were written.

    Several ranks share that work: rank r checks every N-th file, so each is read once. `tree` is nested as what was
    saved, with names in the place of values: {"model": {"head.weight": "model.head.weight"}}, for example. Raises
    `Damaged` or `Unsafe`.
    """

    def __init__(self, path, rank: int = 0, world_size: int = 1, check: bool = True):
        self.path = Path(path)
        with _reading(self.path):
            sums = self._sums()
            self._check(METADATA, sums.get(METADATA) if check else None)
            self.metadata = contents.read((self.path / METADATA).read_bytes())
            there, paths = self.metadata.state_dict_metadata, self.metadata.planner_data
            self.tree = unflatten_state_dict({name: name for name in paths if name in there}, paths)
            self.model = self.tree.get("model", {})
            self.tensors = {}  # name -> a tensor of that dtype and shape, without values
            for name, entry in there.items():
                if isinstance(entry, TensorStorageMetadata):
                    self.tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            if SUMS in self.metadata.storage_meta.modules and not sums:
                raise Damaged(f"{str(self.path / SUMS)!r} is missing, so no file can be checked")
            names = {info.relative_path for info in self.metadata.storage_data.values()}
            for number, name in enumerate(sorted(names)):
                mine = check and sums and number % world_size == rank
                self._check(name, sums[name] if mine else None)

    def _sums(self) -> dict[str, str]:
        """{name of a file: its SHA-256}, as `sha256sum` writes them; {} for a checkpoint that torch has written."""
        if not (self.path / SUMS).exists():
            return {}
        self._check(SUMS, None)
        lines = [line.partition("  ") for line in (self.path / SUMS).read_text().splitlines()]
        return {name: digest for digest, _, name in lines}

    def _check(self, name: str, expected: str | None) -> None:
        """A file is in this folder and no link out of it, is no pipe or device, and has the bytes that are expected."""
        file = self.path / name
        if Path(name).name != name or file.resolve().parent != self.path.resolve():
            raise Unsafe(f"it points to {name[:200]!r}, which is no file of this folder")
        if not stat.S_ISREG(file.stat().st_mode):
            raise Unsafe(f"{name!r} is no file")
        if expected is not None and sha256(file) != expected:
            raise Damaged(f"{str(file)!r} is not what was written: its SHA-256 is not the one in {SUMS}")

    def blank(self, name: str) -> torch.Tensor | None:
        """Memory to read the tensor into that is called `name`; None for another value."""
        found = self.tensors.get(name)
        return None if found is None else torch.empty_like(found, device="cpu")

    def model_on_meta(self) -> dict[str, torch.Tensor]:
        """Names, shapes and dtypes of the model's tensors, without values."""
        found = {}
        for key, name in self.model.items():
            if type(name) is str and name in self.tensors:
                found[key] = self.tensors[name]
        return found

    def values(self, names):
        """What stands under `names`, which may be nested in dictionaries, lists and tuples."""
        found = self.read({name: self.blank(name) for name in tree_leaves(names)})
        return tree_map(found.get, names)

    def read(self, wanted: dict) -> dict:
        """Fill `wanted`: {name: tensor or `Cut`, on the CPU; None for a value that is no tensor}.

        Returns the values: of a `Cut` its part.
        """
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader, there = FileSystemReader(self.path), Counter()
        with _reading(self.path):
            planner.set_up_planner(wanted, self.metadata, True)
            reader.set_up_storage_reader(self.metadata, True)
            plan = planner.create_local_plan()
            for item in plan.items:
                there[item.dest_index.fqn] += math.prod(item.lengths)
            tensors = {name: getattr(value, "part", value) for name, value in wanted.items() if value is not None}
            if missing := [name for name, tensor in tensors.items() if there[name] != tensor.numel()]:
                raise Damaged(f"{str(self.path)!r}: elements of {name_some(missing)} are missing")
            reader.read_data(plan, planner)
        return wanted | tensors
