"""A training run's folder: `losses.jsonl`, which has a line of JSON per step, in order, every step once; and its lock.

A restart goes on after the checkpoint's step and makes the steps after it again. So it first cuts their lines off. And
no line is lost, as a step's line is on disk before a checkpoint has the step.
"""

import contextlib
import json
import os
import time
from pathlib import Path

from filelock import FileLock, Timeout

NAME = "losses.jsonl"


class Journal:
    """The file in `folder`, cut off after `step` and open for more lines. Rank 0 alone has one."""

    def __init__(self, folder: Path, step: int):
        path = folder / NAME
        kept = path.with_suffix(".kept")
        with open(kept, "w") as file:
            for line in read(folder):
                if line["step"] <= step:
                    file.write(json.dumps(line) + "\n")
        kept.rename(path)  # all of it or nothing
        self._file = open(path, "a")  # noqa: SIM115  until the process ends

    def write(self, **values) -> None:
        """One line, with the time. When this returns, it survives this process and the machine."""
        values["time"] = time.time()
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read(folder: Path) -> list[dict]:
    """The lines of a folder's journal, if it is there. One that was not written to its end is left out."""
    path = folder / NAME
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


def lock(folder: Path, seconds: float) -> FileLock:
    """Hold `folder` as long as the returned lock is kept. Raises ValueError if a run uses it, after so many seconds.

    It is the system's lock, on the file `.lock`: gone with the process that holds it, however that ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = FileLock(folder / ".lock")
    try:
        held.acquire(timeout=seconds)
    except Timeout:
        raise ValueError(f"--folder {str(folder)!r} is in use by a run: stop it first, or take another") from None
    return held
