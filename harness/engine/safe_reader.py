"""Reading a checkpoint's folder, which may be damaged, and which somebody else may have written.

torch's reader trusts a checkpoint. `.metadata`, the list of what is in it, is a pickle, and so is every value that is
no tensor. Unpickling calls whatever function the file names. So a file can run any code. Here `.metadata` is read by
contents.py, and values by `torch.load(weights_only=True)`, which makes tensors and plain values. And nothing tells
torch that a byte has changed: SHA256SUMS does.
"""

import hashlib
import io
import math
import os
import pickle
from collections import defaultdict
from pathlib import Path

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from harness.engine import contents
from harness.engine.contents import Unsafe
from harness.engine.waiting import name_some

METADATA, SUMS = ".metadata", "SHA256SUMS"
MAX_LIST, MAX_ALONE = 1 << 28, 1 << 16  # bytes: of a list, and of one that no other files stand beside


class Damaged(RuntimeError):
    """A checkpoint lacks a file, or a file is not what was written. An older checkpoint may be good."""


class _Planner(DefaultLoadPlanner):
    """torch's planner, but for one thing: its own `load_bytes` unpickles anything."""

    def __init__(self):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def sha256(file: Path) -> str:
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def complete(folder) -> list[Path]:
    """The checkpoints in `folder`, the oldest first. One that was not finished has another name."""
    found = [path for path in Path(folder).glob("[0-9]*") if path.name.isdigit() and (path / METADATA).is_file()]
    return sorted(found, key=lambda path: int(path.name))


def newest(folder) -> Path:
    """`folder` itself if it is a checkpoint, else the newest one in it. Raises FileNotFoundError if there is none."""
    if (Path(folder) / METADATA).is_file():
        return Path(folder)
    found = complete(folder)
    if not found:
        raise FileNotFoundError(f"no complete checkpoint in {str(folder)!r}")
    return found[-1]


class Folder:
    """One checkpoint. Its list of contents was read, and its files are all there and as they were written.

    Several ranks share that work: rank r checks every N-th file, so each is read once. `entries` are {path: name},
    ("model", "head.weight") for example: "model.head.weight". Raises `Damaged` or `Unsafe`.
    """

    def __init__(self, path, rank: int = 0, world_size: int = 1, check: bool = True):
        self.path = Path(path)
        sums = self._sums()
        try:
            content = self._content(METADATA)
            if check and sums and hashlib.sha256(content).hexdigest() != sums.get(METADATA):
                raise ValueError("it is not what was written")
            self.metadata = contents.read(content)
            self.tensors = self.metadata.state_dict_metadata
            paths = self.metadata.planner_data
            self.entries = {path: name for name, path in paths.items() if path and name in self.tensors}
            ends = self._files()
        except Unsafe as error:
            raise Unsafe(f"{str(self.path)!r} was not read: {error}") from None
        except Exception as error:  # of a damaged pickle anything may come
            raise Damaged(f"the list of contents {str(self.path / METADATA)!r} is damaged: {error!r}") from error
        if SUMS in self.metadata.storage_meta.modules and not sums:
            raise Damaged(f"{str(self.path / SUMS)!r} is missing, so no file can be checked")
        if sums and ends.keys() - sums.keys():
            raise Damaged(f"{str(self.path / SUMS)!r} does not list {name_some(sorted(ends.keys() - sums.keys()))}")
        for number, (name, end) in enumerate(sorted(ends.items())):
            self._check(self.path / name, end, sums.get(name) if check and number % world_size == rank else None)

    def _sums(self) -> dict[str, str]:
        """{name of a file: its SHA-256}, as `sha256sum` writes them; {} for a checkpoint that torch has written."""
        try:
            lines = self._content(SUMS).decode().splitlines()
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise Damaged(f"{str(self.path / SUMS)!r} cannot be read: {error}") from error
        return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}

    def _content(self, name: str) -> bytes:
        """What a list holds. torch writes a kB and more for each value, so a list that is longer is made to be long."""
        size = (self.path / name).stat().st_size
        others = sum(file.lstat().st_size for file in self.path.iterdir() if file.name != name)
        if size > min(others + MAX_ALONE, MAX_LIST):
            raise ValueError(f"{name} has {size:,} bytes, all other files {others:,}")
        if not (self.path / name).is_file():
            raise ValueError(f"{name} is no file")
        return (self.path / name).read_bytes()

    def _own(self, name: str) -> bool:
        """Whether the file is in the folder, and no link out of it; nor a device, whose reading may never end."""
        file = (self.path / name).resolve()
        inside = Path(name).name == name and file.parent == self.path.resolve()
        return inside and (file.is_file() or not file.exists())

    def _files(self) -> dict[str, int]:
        """{name of a file: the bytes that it must have}. Each value has bytes of its own there, and enough of them."""
        ends, taken, held = {}, defaultdict(int), defaultdict(int)
        for index, info in self.metadata.storage_data.items():
            name = info.relative_path
            if name not in ends and not self._own(name):
                raise Unsafe(f"it points to {name[:200]!r}, which is no file of this folder")
            taken[name] += info.length
            held[index.fqn] += info.length
            ends[name] = max(ends.get(name, 0), info.offset + info.length, taken[name])
        for name, entry in self.tensors.items():
            if isinstance(entry, TensorStorageMetadata):
                nbytes = math.prod(entry.size) * entry.properties.dtype.itemsize
                if nbytes > held[name]:
                    raise ValueError(f"{name[:200]!r} is said to have {nbytes:,} bytes, and files have {held[name]:,}")
        return ends

    def _check(self, file: Path, end: int, expected: str | None) -> None:
        try:
            found = file.stat().st_size
            if found < end:
                raise Damaged(f"{str(file)!r} was cut off: it has {found:,} bytes of {end:,} or more")
            if expected is None:
                return
            digest = sha256(file)
        except OSError as error:
            raise Damaged(f"{str(file)!r} cannot be read: {error}") from error
        if digest != expected:
            raise Damaged(f"{str(file)!r} is not what was written: its SHA-256 is not the one in {SUMS}")

    def under(self, *start) -> dict[tuple, str]:
        """{rest of the path: name} of what has a path that begins like that."""
        length = len(start)
        return {path[length:]: name for path, name in self.entries.items() if path[:length] == start < path}

    def blank(self, name: str, device: str = "cpu") -> torch.Tensor | None:
        """A tensor of the shape and dtype of the one that is called `name`, to read into; None for another value."""
        entry = self.tensors[name]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)

    def model_on_meta(self) -> dict[str, torch.Tensor]:
        """Names, shapes and dtypes of the model's tensors, without values."""
        found = {path[0]: self.blank(name, "meta") for path, name in self.under("model").items() if len(path) == 1}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def of_model(self, name: str) -> torch.Tensor:
        """The values of the model's tensor `name`."""
        place = self.entries["model", name]
        return self.read({place: self.blank(place)})[place]

    def read(self, wanted: dict) -> dict:
        """Fill `wanted`: {name: tensor or `Cut`, on the CPU; None for a value that is no tensor}. Returns it."""
        planner, reader = _Planner(), FileSystemReader(self.path)
        missing = dict.fromkeys(wanted, 0)  # elements that no file holds
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor):
                boxes = getattr(value, "boxes", {(): value})
                missing[name] = sum(box.numel() for box in boxes.values())
        try:
            planner.set_up_planner(wanted, self.metadata, True)
            reader.set_up_storage_reader(self.metadata, True)
            plan = planner.create_local_plan()
            for item in plan.items:
                if wanted[item.dest_index.fqn] is not None:
                    missing[item.dest_index.fqn] -= math.prod(item.lengths)
            if any(missing.values()):
                raise ValueError(f"elements of {name_some([name for name in missing if missing[name]])} are missing")
            reader.read_data(plan, planner)
        except pickle.UnpicklingError as error:
            raise Unsafe(
                f"{str(self.path)!r} was not read: it holds something else than tensors and plain values, "
                f"or is damaged ({str(error).splitlines()[0]})"
            ) from None
        except Exception as error:
            raise Damaged(f"{str(self.path)!r} cannot be read: {error!r}") from error
        return wanted


def is_folder(state) -> bool:
    """Whether `state`, which a user has passed as a model's values, names a checkpoint's folder."""
    return isinstance(state, (str, os.PathLike))
