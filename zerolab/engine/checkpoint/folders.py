"""A folder of a checkpoint, which is always either complete or not recognized as a checkpoint.

All ranks write into a folder such as "000007.partial". When all files are on disk, rank 0 writes their SHA-256 into the
folder, and renames it to "000007". A rename is atomic. A crash before the rename leaves a partial folder, which `load`
ignores and the next save deletes.

Each save needs a new folder, because DCP overwrites files in place. After a crash in the middle of such a save, the old
`.metadata` would still match, and the mix of old and new values would load without an error.
"""

import contextlib
import dataclasses
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._pytree import tree_leaves

from zerolab.engine.checkpoint.reader import METADATA, SUMS, Folder, complete, sha256
from zerolab.engine.together import all_succeed, on_all_ranks


def make_folder(folder, keep):
    """Rank 0 only: make a partial folder with the next number in `folder`. Deletes partial folders left by crashes."""
    if keep is not None and (not isinstance(keep, int) or keep < 1):
        raise ValueError(f"keep must be a number of checkpoints, 1 or more, or None for all, got {keep!r}")
    folder = Path(folder)
    if (folder / METADATA).exists():
        raise ValueError(f"{str(folder)!r} is a checkpoint itself: pass the folder that it is in")
    folder.mkdir(parents=True, exist_ok=True)
    for partial in folder.glob("[0-9]*.partial"):
        if partial.stem.isdecimal() and partial.is_dir():  # anything else belongs to the user
            shutil.rmtree(partial, ignore_errors=True)
    delete_old(folder, keep)
    numbers = [int(path.stem) for path in folder.glob("[0-9]*") if path.stem.isdecimal()]
    path = folder / f"{max(numbers, default=0) + 1:06d}.partial"
    path.mkdir()
    return path


class Writer(dcp.FileSystemWriter):
    """DCP's writer. It also records in `.metadata` that there are checksums, so that a reader notices a lost file."""

    def storage_meta(self):
        return dataclasses.replace(super().storage_meta(), modules=[SUMS])


def write(state, path, keep, group):
    """Write this rank's part of `state` into the partial folder, and complete the folder. A collective.

    Returns the number of bytes that this rank has written. If a rank fails, every rank raises the error, and the folder
    is deleted.
    """
    rank = dist.get_rank(group)
    # Without `per_thread_copy_ahead=0` torch creates a stream on GPU 0, even for tensors on the CPU.
    writer = Writer(path, per_thread_copy_ahead=0)
    # Replicas have the same pieces, and the first replica writes them. By default DCP divides them among all replicas.
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True, flatten_sharded_tensors=False)
    try:
        try:
            dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:  # the same on all ranks
            reasons = "; ".join(f"rank {other}: {reason!r}" for other, (reason, _) in error.failures.items())
            more = lack_of_space(state, path.parent, group) + "Earlier checkpoints are unchanged"
            raise RuntimeError(f"no checkpoint {path.stem} ({reasons}). {more}") from None
        files = list(path.glob(f"__{rank}_*"))  # DCP's names for this rank's files
        if rank == 0:
            files.append(path / METADATA)
        nbytes = sum(file.stat().st_size for file in files)
        sums = {}
        for of_rank in on_all_ranks(lambda: {file.name: sha256(file) for file in files}, group):
            sums |= of_rank
        all_succeed(lambda: complete_folder(path, sums, keep) if rank == 0 else None, group)
    except Exception:
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        raise
    return nbytes


def lack_of_space(state, folder, group):
    """A sentence for the error message if the disk is full, else "". A collective.

    torch's own message for a full disk may be "enforce fail at inline_container.cc".
    """
    tensors = [getattr(leaf, "elements", leaf) for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    needed = sum(tensor.nbytes for tensor in tensors)
    of_ranks = on_all_ranks(lambda: (needed, shutil.disk_usage(folder).free), group)
    for rank, (needed, free) in enumerate(of_ranks):
        if free < needed:
            return (
                f"The disk of {str(folder)!r} is full: rank {rank} has {needed / 1e6:.1f} MB to write, and "
                f"{free / 1e6:.1f} MB are free. Make room, or use a different folder. "
            )
    return ""


def complete_folder(path, sums, keep):
    """Rank 0 only, when all files are on disk: rename the folder. Deletes checkpoints that are not kept."""
    with open(path / SUMS, "w") as stream:
        for name, digest in sorted(sums.items()):
            stream.write(f"{digest}  {name}\n")
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(path)
    Folder(path, check=False)  # raises if it cannot be read
    path.rename(path.with_suffix(""))
    sync_folder(path.parent)
    delete_old(path.parent, keep)


def delete_old(folder, keep):
    for old in complete(folder)[: -keep if keep else 0]:
        with contextlib.suppress(OSError):  # then the folder stays, and the next save tries again
            # Renamed first, because a crash during the deletion would leave an incomplete checkpoint.
            shutil.rmtree(old.rename(old.with_suffix(".partial")))


def sync_folder(folder):
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
