"""A folder for all ranks of a group, for as long as it is needed."""

import contextlib
import shutil
import tempfile
from pathlib import Path

import torch.distributed as dist

from zerolab.engine.all_or_none import all_or_none


@contextlib.contextmanager
def shared_folder(group=None):
    """The path of an empty folder, the same one on all ranks of this machine. A collective, also at its end."""
    first = dist.get_rank(group) == 0
    path = all_or_none(lambda: tempfile.mkdtemp() if first else None, group)[0]
    try:
        yield Path(path)
        dist.barrier(group)  # nobody is reading any more
    finally:
        if first:
            shutil.rmtree(path, ignore_errors=True)
