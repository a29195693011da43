"""What a run writes down: `losses.jsonl`, a line of JSON per step, in order, every step once.

A restart goes on after the checkpoint's step and makes the steps after it again. So it first cuts their lines off. And
no line is lost, as a step's line is in the file before a checkpoint has the step. Between the lines of steps are those
of events: "start" (which processes), "restart" (after how long), "left".
"""

import contextlib
import json
import os
import time
from pathlib import Path

NAME = "losses.jsonl"


class Journal:
    """The file in `folder`, cut off after `step` and open for more lines. Rank 0 alone has one."""

    def __init__(self, folder: Path, step: int):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        kept = path.with_suffix(".kept")
        self._file = open(kept, "w")  # noqa: SIM115  until the process ends
        for line in read(path):
            if line["step"] <= step:
                self.write(**line)
        kept.rename(path)  # all of it or nothing; later lines go to the same file

    def write(self, **values) -> None:
        """One line, with the time. It survives this process when this returns."""
        values.setdefault("time", time.time())
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def to_disk(self) -> None:
        """What was written survives the machine as well."""
        os.fsync(self._file.fileno())


def read(path: Path) -> list[dict]:
    """The lines of a journal, if it is there. One that was not written to its end is left out."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


def of(lines: list[dict], event: str | None) -> list[dict]:
    """Those of an event, or of steps (None)."""
    return [line for line in lines if line.get("event") == event]
