"""A run's folder belongs to one run: what it may hold, and the lock that keeps a second start out.

The lock is the system's, on the file `.lock`. It is gone with the process that holds it, however that ends.
"""

import contextlib
from pathlib import Path

from filelock import FileLock, Timeout

from harness.run.journal import NAME


def refuse_others(folder: Path) -> None:
    """Raises ValueError if `folder` holds files, and no run. A new or an empty folder is right; so is a run's."""
    if not folder.is_dir():
        return
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if names and NAME not in names and not any(name.isdigit() for name in names):
        what = f"--folder {str(folder)!r} holds other things ({names[0]}) and no run"
        raise ValueError(f"{what}: take a new or an empty folder")


def lock(folder: Path, seconds: float) -> FileLock:
    """Hold `folder` as long as the returned lock is kept. Raises ValueError if it is in use.

    For so many seconds it is asked for again: the holder may be about to leave.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = FileLock(folder / ".lock")
    try:
        held.acquire(timeout=seconds)
    except Timeout:
        used = f"--folder {str(folder)!r} is in use by a run"
        raise ValueError(f"{used}: stop it first, or take another --folder") from None
    return held


def unfinished(folder: Path) -> int:
    """The bytes of the checkpoint that the ranks are writing in `folder`."""
    nbytes = 0
    with contextlib.suppress(FileNotFoundError):  # it was finished while this has looked
        for file in folder.glob("*.partial/*"):
            nbytes += file.stat().st_size
    return nbytes
