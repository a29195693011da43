"""Helpers for the notebooks: run the project's commands as a reader would type them, and print text and tables."""

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

COLUMNS = 99  # the longest line that a notebook shows without scrolling
_FOLDER = tempfile.TemporaryDirectory(prefix="zero-notebook-")
DOTS = 5  # seconds between the dots of a command that is running


def scratch() -> Path:
    """The folder for files that the commands of a notebook write. It is deleted when the kernel ends."""
    return Path(_FOLDER.name)


def run(line: str) -> str:
    """Run `line` in the project's folder with this kernel's Python; returns what it printed.

    `line` is ./launch.sh or torchrun with options, without shell syntax. Prints the line, a dot every `DOTS` seconds if
    the command prints something, and how long it took. If it fails, raises RuntimeError with the end of its output.
    """
    words = shlex.split(line)
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    environment = ranks.environment(PYTHON=sys.executable)
    environment.pop("MPLBACKEND", None)
    streams = {"stdout": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    show(f"$  {line}")
    printed, began, dots = [], time.monotonic(), 0
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        # The command also ends if the reader interrupts the kernel.
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
    """The JSON of `./launch.sh memory` with these arguments, run in this process."""
    options = memory_command.arguments(shlex.split(arguments))
    show(f"the same as: ./launch.sh memory {arguments}")
    return memory_command.measure_all(options)


def show(text: str, columns: int = COLUMNS) -> None:
    """Print `text` with long lines wrapped."""
    print(tables.wrapped(text, columns), flush=True)


def table(columns: list[str], rows: list[list]) -> None:
    """Print a table with the first column left-aligned and the others right-aligned."""
    print("\n".join(tables.text([columns, *([str(cell) for cell in row] for row in rows)], rule=False)))


def solution(task: str, *things) -> None:
    """Print the project's solution of a practice task, after the reader has tried it."""
    if task not in practice.TRIED:
        print("Run the check of your code first, then this cell: it prints the project's own code.")
        return
    for thing in things:
        print(f"# {Path(inspect.getsourcefile(thing)).relative_to(ROOT)}, line {inspect.getsourcelines(thing)[1]}")
        print(textwrap.dedent(inspect.getsource(thing)))


def part(text: str, first: str, last: str) -> str:
    """The lines of `text` from the one that begins with `first` up to, not including, the one that begins with `last`.

    Raises ValueError if there are none.
    """
    found = re.search(rf"^{re.escape(first)}.*?(?=\n{re.escape(last)})", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"no lines from {first!r} to {last!r} in:\n{text[-2000:]}")
    return found[0].rstrip()


def events(trace: dict) -> Counter:
    """How often rank 0 issues each collective in a trace: {(step, "all-gather", unit or bucket): times}."""
    spans = [one for one in trace["traceEvents"] if one["ph"] == "X" and one["pid"] == 0]
    steps = [one for one in spans if one["cat"] == STEPS]
    found = Counter()
    for span in spans:
        around = [step for step in steps if step["ts"] <= span["ts"] <= step["ts"] + step["dur"]]
        if around and span["cat"] == COLLECTIVES:
            found[int(around[0]["name"][5]), span["name"], span["args"].get("unit")] += 1
    return found


def sent(printed: str) -> float:
    """The traffic of a rank in a printed step, as a multiple of Ψ (N-1)/N elements."""
    return float(re.search(r"([\d.]+) Ψ x", printed)[1])


def read(path: Path) -> dict:
    """The JSON in a file."""
    return json.loads(Path(path).read_text())
