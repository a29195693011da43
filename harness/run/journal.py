"""What a run writes down: `losses.jsonl`, a line of JSON per step, in order, every step once.

A restart goes on after the checkpoint's step and makes the steps after it again. So it first cuts their lines off. And
no line is lost, as a step's line is in the file before a checkpoint has the step. Between the lines of steps are those
of events: "start" (which processes), "restart" (how long it took), "lost" (a rank missed another), "left".
"""

import contextlib
import json
import os
import time
from pathlib import Path

NAME = "losses.jsonl"


class Journal:
    """The file in `folder`, cut off after `step` and open for more lines. Rank 0 alone has one."""

    def __init__(self, folder, step: int):
        path, lines = Path(folder, NAME), _lines(folder)
        self._before = [] if any(line.get("event") == "left" for line in lines[-1:]) else lines
        self._step = step
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = path.with_suffix(".kept")
        kept.write_text("".join(json.dumps(line) + "\n" for line in lines if line["step"] <= step))
        kept.rename(path)  # all of it or nothing
        self._file = open(path, "a")  # noqa: SIM115  until the process ends

    def write(self, **values) -> None:
        """One line, with the time. It survives this process when this returns."""
        self._file.write(json.dumps({**values, "time": time.time()}) + "\n")
        self._file.flush()

    def to_disk(self) -> None:
        """What was written survives the machine as well."""
        os.fsync(self._file.fileno())

    def back(self, joined: float, loaded: float, launched: float = 0.0) -> dict | None:
        """After the first step: {phase: seconds} since the last step before, if that run was broken off.

        None also if every launcher has begun later than that step: `launched` is when the first of them did. Then
        somebody has typed the line again, and the time until then says nothing of the restart.

        `joined` and `loaded` are times (seconds since 1970) of this process. A phase is everything from the end of the
        one before it; docs/restarts.md says what that is. No "noticed" if no rank lived to say that it missed one.
        """
        steps = [line for line in self._before if "event" not in line]
        if not steps or launched > (last := steps[-1]["time"]):
            return None
        lost = [line["time"] for line in self._before if line.get("event") == "lost" and line["time"] >= last]
        moments = {"noticed": min(lost, default=None), "restarted": process_began(), "joined": joined}
        moments |= {"loaded": loaded, "first step": time.time()}
        seconds = {}
        for phase, moment in moments.items():
            if moment is not None:
                seconds[phase], last = round(moment - last, 2), moment
        self.write(event="restart", step=self._step, repeated=steps[-1]["step"] - self._step, seconds=seconds)
        return seconds


def read(path) -> list[dict]:
    """The lines of a journal. One that was not written to its end is left out."""
    lines = []
    for text in Path(path).read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


def _lines(folder) -> list[dict]:
    path = Path(folder, NAME)
    return read(path) if path.exists() else []


def last_step(folder) -> int:
    """The last step that the journal in `folder` has; 0 if there is none."""
    return max((line["step"] for line in _lines(folder) if "event" not in line), default=0)


def note_lost(folder, rank: int, step: int, why: str) -> None:
    """Any rank, when it misses another or hangs: a line that tells the next start when that was."""
    line = {"event": "lost", "step": step, "rank": rank, "why": why.partition("\n")[0][:200], "time": time.time()}
    with open(Path(folder, NAME), "a") as file:
        file.write(json.dumps(line) + "\n")  # one short write at the end: two ranks' lines do not mix


def process_began() -> float | None:
    """When the system started this process, in seconds since 1970; None where there is no /proc."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the machine's start
        running = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return None
    return time.time() - running
