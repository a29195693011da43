"""What the notebooks share: the project's commands, run as a reader would type them, and text that fits a screen."""

import inspect
import json
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from pathlib import Path

from zerolab.measure import memory as memory_command
from zerolab.measure import tables
from zerolab.measure.timeline import COLLECTIVES, STEPS
from zerolab.run import ranks
from zerolab.run.ranks import ROOT
from zerolab.teach import practice

COLUMNS = 99  # the widest line that a notebook shows without scrolling
_FOLDER = tempfile.TemporaryDirectory(prefix="zero-notebook-")
DOTS = 5  # seconds from one sign of life of a quiet command to the next


def scratch() -> Path:
    """The folder for what the commands of a notebook write; it goes with the kernel."""
    return Path(_FOLDER.name)


def run(line: str) -> str:
    """Run `line` in the project's folder with this kernel's Python; returns what it printed.

    `line` is what a reader would type: ./launch.sh or torchrun with options, no shell syntax. Printed are the line, a
    dot for what the command says, at most one in `DOTS` seconds, and how long it took. Raises RuntimeError with the end
    of what was printed.
    """
    words = shlex.split(line)
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    environment = ranks.environment(PYTHON=sys.executable)
    environment.pop("MPLBACKEND", None)
    streams = {"stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    say(f"$  {line}")
    printed, began, dots = [], time.monotonic(), 0
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        # It ends also when the reader interrupts the kernel.
        with ranks.started(words, cwd=ROOT, env=environment, stderr=errors, **streams) as process:
            for text in process.stdout:
                printed.append(text)
                if time.monotonic() >= began + (dots + 1) * DOTS:
                    print(".", end="", flush=True)
                    dots += 1
            process.wait()
        print(f" {time.monotonic() - began:.0f} s", flush=True)
        if process.returncode:
            errors.seek(0)
            end = "".join([*printed[-10:], *errors.readlines()[-40:]])
            raise RuntimeError(f"{line}\nended with exit status {process.returncode}:\n{end}")
    return "".join(printed)


def memory(arguments: str) -> dict:
    """The dry run in this process: `./launch.sh memory` with these arguments; its JSON."""
    options = memory_command.arguments(shlex.split(arguments))
    say(f"the same as: ./launch.sh memory {arguments}")
    return memory_command.measure_all(options)


def say(text: str, columns: int = COLUMNS) -> None:
    """Print `text` in lines that a notebook shows without scrolling."""
    print(tables.wrapped(text, columns), flush=True)


def table(columns: list[str], rows: list[list]) -> None:
    """Print a table, the first column to the left and the others to the right."""
    print("\n".join(tables.text([columns, *([str(cell) for cell in row] for row in rows)], rule=False)))


def solution(task: str, *things) -> None:
    """Print the code of the project's own way of a practice task, once the reader has tried the task."""
    if task not in practice.TRIED:
        print("The project's own code stands here when you have tried yours: run the check, then this cell.")
        return
    for thing in things:
        print(f"# {Path(inspect.getsourcefile(thing)).relative_to(ROOT)}, line {inspect.getsourcelines(thing)[1]}")
        print(textwrap.dedent(inspect.getsource(thing)))


def part(text: str, first: str, last: str) -> str:
    """The lines of `text` from the one that begins with `first` to before the one that begins with `last`.

    Raises ValueError if there is none.
    """
    found = re.search(rf"^{re.escape(first)}.*?(?=\n{re.escape(last)})", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"no lines from {first!r} to {last!r} in:\n{text[-2000:]}")
    return found[0].rstrip()


def events(trace: dict) -> Counter:
    """How often rank 0 starts what in the step of a trace: {(step, "all-gather", unit or bucket): times}."""
    spans = [one for one in trace["traceEvents"] if one["ph"] == "X" and one["pid"] == 0]
    steps = [one for one in spans if one["cat"] == STEPS]
    found = Counter()
    for span in spans:
        around = [step for step in steps if step["ts"] <= span["ts"] <= step["ts"] + step["dur"]]
        if around and span["cat"] == COLLECTIVES:
            found[int(around[0]["name"][5]), span["name"], span["args"].get("unit")] += 1
    return found


def sent(said: str) -> float:
    """What a rank has sent in a told step, in elements: Ψ (N-1)/N times this."""
    return float(re.search(r"([\d.]+) Ψ x", said)[1])


def read(path: Path) -> dict:
    """The JSON in a file."""
    return json.loads(Path(path).read_text())
