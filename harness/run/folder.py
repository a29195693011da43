"""A run's folder belongs to one run: what the folder may hold, and the lock that keeps a second start out.

The lock is the system's (`flock` on the file `.lock`). It is gone with the process that holds it, however that ends.
Only the launcher holds it. So after `kill -9` of the launcher the same line can start again at once. The old ranks
notice it within a second and leave, before new ones have imported torch.
"""

import argparse
import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path

LOCK = ".lock"
STAGES = ("zero1", "zero2", "zero3")


def folder_of(arguments: list[str]) -> Path | None:
    """The folder that a training program with these arguments takes; None if they name neither folder nor stage."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder")
    parser.add_argument("--preset", default="tiny")
    given, _ = parser.parse_known_args(arguments)
    stage = next((word for word in arguments if word in STAGES), None)
    folder = given.folder or (stage and f"runs/{stage}-{given.preset}")
    return Path(folder) if folder else None


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


def lock(folder: Path, meeting: str | None = None):
    """Hold `folder` as long as the returned file is open. Raises ValueError, which names the holder, if it is in use.

    `meeting` is where the machines of a run of several meet. Launchers that name the same one share the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / LOCK, "a+")  # noqa: SIM115  until the process ends
    for wait in (0.1, 0.2, 0.4, 0):  # another launcher may be between its two locks
        if _take(file, fcntl.LOCK_EX):  # nobody else holds it: write down who does now
            holder = {"host": socket.gethostname(), "process": os.getpid(), "meeting": meeting}
            file.truncate(0)
            file.write(json.dumps(holder) + "\n")
            file.flush()
            if meeting is None or _take(file, fcntl.LOCK_SH):  # it lets the other machines of this run in
                return file
        elif meeting and _take(file, fcntl.LOCK_SH):
            if _holder(file).get("meeting") == meeting:
                return file
            fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(wait)
    holder = _holder(file)
    file.close()
    host, process = holder.get("host", "?"), holder.get("process", "?")
    there = "" if host == socket.gethostname() else "there: "
    used = f"--folder {str(folder)!r} is in use by a run on {host}, process {process}"
    raise ValueError(f"{used}: stop it first ({there}kill -INT {process}), or take another --folder")


def _take(file, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file) -> dict:
    file.seek(0)
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(file.read())
    return {}
