"""How a checkpoint's files are written, so that at every moment either all of it is there under its name, or nothing.

All ranks write into a folder "000007.partial". When all files are on disk, rank 0 adds their SHA-256 and renames the
folder to "000007". Renaming is one act of the file system: it happens or it does not. A rank that dies before that
leaves a folder that nobody takes for a checkpoint.
"""

import contextlib
import dataclasses
import os
import shutil
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from zerolab.engine.all_or_none import all_or_none, on_all
from zerolab.engine.checkpoint.reader import METADATA, SUMS, Folder, complete, sha256
from zerolab.engine.layout import name_of


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self):
        return dataclasses.replace(super().storage_meta(), modules=[SUMS])  # so that a reader misses the file


class _Planner(dcp.DefaultSavePlanner):
    """torch's planner, which need not find out what stays in one piece: it is given {path of a value: the value}."""

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False) -> None:
        super().set_up_planner({}, storage_meta, is_coordinator)
        for path, value in state_dict.items():
            name = name_of(path)
            self.state_dict[name] = value
            self.mappings[name] = path


def new_folder(folder, keep) -> Path:
    """Rank 0 alone: an empty folder with a new number. What a run that died has left unfinished goes."""
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep must be a number of checkpoints, 1 or more, or None for all, got {keep!r}")
    folder = Path(folder)
    if (folder / METADATA).exists():
        raise ValueError(f"{str(folder)!r} is a checkpoint itself: pass the folder that it is in")
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("[0-9]*.partial"):
        if left.stem.isdecimal() and left.is_dir():  # else it is the user's
            shutil.rmtree(left, ignore_errors=True)
    _delete_old(folder, keep)  # of runs that died before they did it
    taken = [int(path.stem) for path in folder.glob("[0-9]*") if path.stem.isdecimal()]
    path = folder / f"{max(taken, default=0) + 1:06d}.partial"
    path.mkdir()
    return path


def write(state: dict[tuple, object], path: Path, keep, rank: int, group) -> int:
    """Write this rank's part of the checkpoint, and make it complete together. Returns this rank's bytes."""
    # Copied ahead: nothing. Else torch asks for a stream of GPU 0, also in a run on the CPU.
    writer, planner = _Writer(path, per_thread_copy_ahead=0), _Planner(dedup_save_to_lowest_rank=True)
    try:
        try:
            dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:  # the same one on all ranks, with what each has met
            met = "; ".join(f"rank {other}: {found[0]!r}" for other, found in error.failures.items())
            raise RuntimeError(f"no checkpoint {path.stem} ({met}); the earlier ones are as they were") from None
        own = list(path.glob(f"__{rank}_*"))  # the files that this rank has written
        if rank == 0:
            own.append(path / METADATA)
        nbytes = sum(file.stat().st_size for file in own)
        everyone = all_or_none(lambda: {file.name: sha256(file) for file in own}, group)
        on_all(lambda: _finish(path, everyone, keep) if rank == 0 else None, group)
    except Exception:
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        raise
    return nbytes


def _finish(path: Path, everyone: list[dict], keep) -> None:
    """Rank 0 alone, when all files are on disk: the checkpoint gets its name, and old ones go."""
    digests = {}
    for written in everyone:
        digests |= written
    with open(path / SUMS, "w") as stream:
        for name, digest in sorted(digests.items()):
            stream.write(f"{digest}  {name}\n")
        stream.flush()
        os.fsync(stream.fileno())
    _sync(path)
    Folder(path, check=False)  # it can be read
    path.rename(path.with_suffix(""))
    _sync(path.parent)
    _delete_old(path.parent, keep)


def _delete_old(folder: Path, keep) -> None:
    for old in complete(folder)[: -keep if keep else 0]:
        with contextlib.suppress(OSError):  # what cannot be deleted stays
            shutil.rmtree(old.rename(old.with_suffix(".partial")))  # first its name, so that half of it is not taken


def _sync(folder: Path) -> None:
    """New names in a folder are on disk as well."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
