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
        path.touch()
        kept = path.with_suffix(".kept")
        with open(kept, "w") as file:
            for line in read(path):
                if line["step"] <= step:
                    file.write(json.dumps(line) + "\n")
        kept.rename(path)  # all of it or nothing
        self._file = open(path, "a")  # noqa: SIM115  until the process ends

    def write(self, **values) -> None:
        """One line, with the time. It survives this process when this returns."""
        self._file.write(json.dumps({**values, "time": time.time()}) + "\n")
        self._file.flush()

    def to_disk(self) -> None:
        """What was written survives the machine as well."""
        os.fsync(self._file.fileno())


def read(path) -> list[dict]:
    """The lines of a journal. One that was not written to its end is left out."""
    lines = []
    for text in Path(path).read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


def steps(folder: Path) -> list[dict]:
    """The lines of steps in the journal of `folder`, if there is one."""
    lines = read(folder / NAME) if (folder / NAME).exists() else []
    return [line for line in lines if "event" not in line]
