"""What the notebooks share: the project's commands, run as a reader would type them, and plots in its colours."""

import atexit
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path

from matplotlib.patches import Patch

from harness.measure import figures
from harness.measure.figures import PART_COLOURS

ROOT = Path(__file__).resolve().parents[2]
INK = figures.THEMES[""]["ink"]


def scratch() -> Path:
    """A new folder for what the commands of a notebook write; it goes with the kernel."""
    folder = Path(tempfile.mkdtemp(prefix="zero-notebook-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def run(line: str, show: bool = True) -> str:
    """Run `line` in the project's folder, print it and, as it comes, what it prints; returns what it printed.

    `line` is what a reader would type: ./launch.sh or torchrun with options, no shell syntax. It runs with this
    kernel's Python. With `show=False` only the line is printed. Raises RuntimeError with the end of stderr.
    """
    words = shlex.split(line)
    if words[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    outside = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ZERO_PREFLIGHT", "MPLBACKEND")
    environment = {key: value for key, value in os.environ.items() if key not in outside}
    environment["PYTHON"] = sys.executable
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    environment.setdefault("OMP_NUM_THREADS", "1")
    print(f"$ {line}", flush=True)
    printed, errors = [], deque(maxlen=40)
    process = subprocess.Popen(words, cwd=ROOT, env=environment, text=True, encoding="utf-8",
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    reader = threading.Thread(target=lambda: errors.extend(process.stderr), daemon=True)
    reader.start()
    try:
        for text in process.stdout:
            printed.append(text)
            if show:
                print(text, end="", flush=True)
        process.wait()
    finally:  # also when the reader interrupts the kernel
        if process.poll() is None:
            process.terminate()  # torchrun passes it on to the ranks
            process.wait()
    reader.join(timeout=10)
    if process.returncode:
        end = "".join([*printed[-10:], *errors])
        raise RuntimeError(f"{line}\nended with exit status {process.returncode}:\n{end}")
    return "".join(printed)


def part(text: str, first: str, last: str) -> str:
    """The lines of `text` from the one that begins with `first` to before the one that begins with `last`.

    Raises ValueError if there is none.
    """
    lines = text.splitlines()
    start = stop = None
    for number, line in enumerate(lines):
        if start is None and line.startswith(first):
            start = number
        elif start is not None and line.startswith(last):
            stop = number
            break
    if stop is None:
        raise ValueError(f"no lines from {first!r} to {last!r} in:\n{text[-2000:]}")
    return "\n".join(lines[start:stop]).rstrip()


def read(path: Path) -> dict:
    """The JSON in a file."""
    return json.loads(Path(path).read_text())


def new(rows: int = 1, columns: int = 1, height: float = 3.5, **options):
    """(figure, axes) in the style of the README's figures; `options` go to `plt.subplots`."""
    return figures.new(figures.THEMES[""], rows, columns, height, **options)


def unit(nbytes: float) -> tuple[str, float]:
    """The unit in which `nbytes` reads well, and its bytes: ("MB (10⁶ bytes)", 1e6)."""
    for name, size in (("GB (10⁹ bytes)", 1e9), ("MB (10⁶ bytes)", 1e6), ("kB (10³ bytes)", 1e3)):
        if nbytes >= size:
            return name, size
    return "bytes", 1


def bars(rows: dict[str, dict[str, float]], title: str, formula: dict[str, float] | None = None, lines=()):
    """Horizontal bars, stacked by part: {label: {part: bytes}}, parts and colours as in `harness.measure.figures`.

    `formula` ({label: bytes}) is drawn hatched over the bar; `lines` are bytes to mark, GPUs' sizes say.
    """
    formula = formula or {}
    totals = {label: sum(parts.values()) for label, parts in rows.items()}
    longest = max([*totals.values(), *formula.values()])
    name, size = unit(longest)
    figure, axes = new(height=0.36 * len(rows) + 1.7)
    for position, (label, parts) in enumerate(rows.items()):
        start = 0.0
        for kind, nbytes in parts.items():
            axes.barh(position, nbytes / size, 0.7, left=start, color=PART_COLOURS[kind])
            start += nbytes / size
        text = f"{start:.4g}"
        if label in formula:
            axes.barh(position, formula[label] / size, 0.7, color="none", edgecolor=INK, hatch="///", linewidth=0.8)
            text += f", formula {formula[label] / size:.4g}"
        end = max(start, formula.get(label, 0) / size)
        paper = {"facecolor": figures.THEMES[""]["paper"], "edgecolor": "none", "pad": 0.5}  # over the dotted lines
        axes.annotate(text, (end, position), (4, 0), textcoords="offset points", va="center", bbox=paper)
    for nbytes in lines:
        if nbytes <= 1.2 * longest:
            axes.axvline(nbytes / size, color=INK, linewidth=0.8, linestyle=":")
            axes.text(nbytes / size, -0.62, f"{nbytes / size:g}", ha="center", va="bottom", fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xlim(0, 1.3 * longest / size)
    axes.set_xlabel(f"{name} on one rank")
    axes.set_title(title, pad=14 if lines else 6)
    kinds = dict.fromkeys(kind for parts in rows.values() for kind in parts if parts[kind] > 1e-3 * longest)
    handles = [Patch(color=PART_COLOURS[kind], label=kind) for kind in kinds]
    if formula:
        handles.append(Patch(facecolor="none", edgecolor=INK, hatch="///", label="formula"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure
