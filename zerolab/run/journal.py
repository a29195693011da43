"""A training run's journal: `losses.jsonl`, with one line of JSON per step.

A restart continues after the checkpoint's step and repeats the steps after it, so it first cuts off their lines. A
step's line is on disk before a checkpoint has the step. So every step has exactly one line.
"""

import contextlib
import json
import os
import time
from pathlib import Path

NAME = "losses.jsonl"


class Journal:
    """The file in `folder`, cut off after `step` and open for more lines. Only rank 0 has one.

    With `tensorboard`, a folder, the numbers go there as well.
    """

    def __init__(self, folder: Path, step: int, tensorboard: Path | None = None):
        lines = [json.dumps(line) + "\n" for line in read(folder) if line["step"] <= step]
        kept = folder / f"{NAME}.kept"
        kept.write_text("".join(lines))
        kept.rename(folder / NAME)  # all of it or nothing
        self._file = open(folder / NAME, "a")  # noqa: SIM115  until the process ends
        self._writer = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # a package that need not be installed

            self._writer = SummaryWriter(tensorboard, purge_step=step + 1)  # hides the steps that are repeated

    def write(self, step: int, numbers: dict[str, float], **more) -> None:
        """One line, with the time. When this returns, it survives this process and the machine."""
        self._file.write(json.dumps({"step": step, **numbers, **more, "time": time.time()}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._writer:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()  # ranks end without closing it


def read(folder: Path) -> list[dict]:
    """The lines of a folder's journal, if there is one, without a line that was not written to its end."""
    path, lines = folder / NAME, []
    for text in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines
