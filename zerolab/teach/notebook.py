"""Helpers for the notebooks: run the project's commands as a reader would type them, and print text and tables."""

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from zerolab.measure import memory as memory_command
from zerolab.measure import tables
from zerolab.measure.timeline import COLLECTIVES, STEPS
from zerolab.run import ranks
from zerolab.run.ranks import ROOT

COLUMNS = 99  # the longest line that a notebook shows without scrolling
_FOLDER = tempfile.TemporaryDirectory(prefix="zero-notebook-")


def scratch() -> Path:
    """The folder for files that the commands of a notebook write. It is deleted when the kernel ends."""
    return Path(_FOLDER.name)


def run(line: str) -> str:
    """Run `line` in the project's folder with this kernel's Python; returns what it printed.

    `line` is ./launch.sh or torchrun with options, without shell syntax. If the command fails, raises RuntimeError with
    the end of its output.
    """
    words = shlex.split(line)
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    show(f"$  {line}")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "encoding": "utf-8"}
    # The command also ends if the reader interrupts the kernel.
    with ranks.started(words, cwd=ROOT, env=ranks.environment(PYTHON=sys.executable), **streams) as process:
        printed, errors = process.communicate()
    if process.returncode:
        end = "\n".join([*printed.splitlines()[-10:], *errors.splitlines()[-40:]])
        raise RuntimeError(f"{line}\nended with exit status {process.returncode}:\n{end}")
    return printed


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
