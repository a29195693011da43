"""A run's folder belongs to one run: what the folder may hold, and the lock that keeps a second start out.

The lock is the system's (`flock` on the file `.lock`). It is gone with the process that holds it, however that ends.
Rank 0 holds it. After `kill -9` of the launcher the same line can start again at once: the old ranks notice it within a
second and leave, and a lock that is held is asked for again and again for some seconds.
"""

import contextlib
import fcntl
import os
import socket
import sys
import time
from pathlib import Path

from harness.engine.together import together
from harness.run import process_group
from harness.run.ending import NotAgain

LOCK = ".lock"
PATIENCE = 0.8  # of the time for which the other ranks wait for rank 0


def refuse_others(folder: Path) -> None:
    """Raises ValueError if `folder` holds files, and no run. A new or an empty folder is right; so is a run's."""
    if not folder.is_dir():
        return
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if names and "losses.jsonl" not in names and not any(name.isdigit() for name in names):
        shown = ", ".join(names[:1]) + (", ..." if len(names) > 1 else "")
        what = f"--folder {str(folder)!r} holds other things ({shown}) and no run"
        raise ValueError(f"{what}: take a new or an empty folder")


def unfinished(folder: Path) -> int:
    """The bytes of the checkpoint that the ranks are writing in `folder`."""
    nbytes = 0
    for file in Path(folder).glob("*.partial/*"):
        with contextlib.suppress(FileNotFoundError):  # it was finished, or deleted
            nbytes += file.stat().st_size
    return nbytes


def lock(folder: Path, seconds: float):
    """Hold `folder` as long as the returned file is open. Raises NotAgain, which names the holder, if it is in use.

    For so many seconds it is asked for again: the holder may be about to leave.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / LOCK, "a+")  # noqa: SIM115  until the process ends
    used, until = f"--folder {str(folder)!r} is in use by a run", time.monotonic() + seconds
    taken = _taken(file)
    if not taken:
        print(f"{used}: waiting for its end, at most {seconds:g} s", file=sys.stderr, flush=True)
    while not taken:
        if time.monotonic() > until:
            file.seek(0)
            raise NotAgain(f"{used}: stop it first ({file.read().strip()}), or take another --folder")
        time.sleep(0.1)
        taken = _taken(file)
    file.truncate(0)
    file.write(f"kill -INT {os.getppid()} on {socket.gethostname()}")  # a rank's parent is its launcher
    file.flush()
    return file


def _taken(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # not every network's file system has locks
        print(f"{file.name} cannot be locked ({error.strerror}): nothing keeps a second start out", file=sys.stderr)
    return True


def hold(folder: Path, me: process_group.Rank):
    """Rank 0 holds the lock until the returned file is closed. If it is in use, all ranks raise NotAgain.

    It waits long: in a network's file system the lock of a machine that has died may last for some 90 seconds.
    """
    held = problem = None
    if me.rank == 0:
        try:
            held = lock(folder, PATIENCE * process_group.timeout())
        except NotAgain as error:
            problem = error
    if refusal := together(lambda: problem, None)[0]:
        raise refusal
    return held
