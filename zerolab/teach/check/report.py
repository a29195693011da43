"""`./launch.sh check zero2 [N]`: is the exercise solved? Reports step by step what was expected and what was found.

./launch.sh check zero2                          exercises/zero2.py
./launch.sh check zero2 --folder SUBMISSIONS     a table of all Python files in a folder
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import platform
import sys
from pathlib import Path

import torch

from zerolab.measure import tables
from zerolab.run import ranks
from zerolab.run.command_line import one_line
from zerolab.run.ranks import ROOT
from zerolab.teach import check_options
from zerolab.teach.check.examine import diverged
from zerolab.teach.exercise import FOLDER, edited, lines_of_blanks
from zerolab.teach.exercises import EXERCISES
from zerolab.teach.exercises.kinds import WholeFile

SIGNS = {"passed": "passed", "open": "to write", "failed": "FAILED", "error": "FAILED", "hang": "HANGS", "died": "DIED"}
# From bad to good: a rank that fails may be the cause for another one that waits or dies.
WORST = ("error", "failed", "open", "died", "hang", "passed")


def merge(verdicts: list[dict]) -> dict:
    """One verdict of all ranks' on one step: the worst, with what became of the other ranks."""

    def badness(rank: int) -> tuple[int, bool, float]:
        status, error = verdicts[rank]["status"], verdicts[rank].get("error", "")
        stopped = "without a word" in error  # perhaps because of another rank
        call = verdicts[rank].get("call")  # a rank that differs later may do so because of the first one
        return WORST.index(status), stopped, math.inf if call is None else call

    worst, *rest = sorted(range(len(verdicts)), key=badness)
    status, others = verdicts[worst]["status"], []
    for rank in sorted(rest):
        if verdicts[rank]["status"] in ("died", "hang"):
            others.append(f"rank {rank} {verdicts[rank]['error']}")
    alone = others or any(verdict["status"] != status for verdict in verdicts)
    return {**verdicts[worst], "rank": worst if alone else None, "others": others}


def paragraph(check, verdict: dict, shown: str, source: list[str]) -> str:
    """The report's paragraph about one step."""
    status, loading, line = verdict["status"], verdict.get("loading"), verdict.get("line")
    sign = "HANGS" if verdict.get("error", "").startswith("hangs") else SIGNS[status]
    lines = [f"{sign:<9} {'the file itself, before any step' if loading else check.title}"]
    if status == "passed":
        return lines[0]
    rank = f"on rank {verdict['rank']}: " if verdict.get("rank") is not None else ""
    at = f", {verdict['at']}" if verdict.get("at") else ""
    if status == "open":
        lines.append(f"  {rank}not written yet: {verdict['task']}, see line {line} of {shown}")
    elif status == "failed":
        lines += [f"  {rank}{verdict['what']}{at}", f"    expected  {verdict['expected']}"]
        lines.append(f"    found     {verdict['found']}")
    else:
        lines.append(f"  {rank}{verdict['error']}{at}")
    if line and status != "open":
        lines.append(f"  in line {line} of {shown}: {source[line - 1].strip()}")
    lines += [f"  {other}" for other in verdict.get("others", ())]
    if " waits in " in " ".join(lines):
        lines.append("  Collectives match by their order only: every rank must start the same ones, in the same order.")
    if not loading:
        lines.append(f"  read      {check.read}")
    return tables.wrapped("\n".join(lines))


def next_hints(check, text: str, many: int) -> str:
    """The next `many` hints of a `check`, after those that are in the file's `text` already."""
    words = " ".join(text.replace("#", " ").split())  # however its lines are broken
    hints = [hint for hint in check.hints if hint.replace("#", " ") not in words]
    lines = [f"hint      {hint}" for hint in hints[:many]]
    if hints[many:]:
        lines.append(f"          (one more: {' '.join(['--hint'] * (many + 1))})")
    if not hints:
        lines = [f"hint      there is no other; read {check.read}"]
    return tables.wrapped("\n".join(lines))


class Report:
    """Prints the verdicts as they come in, step by step."""

    def __init__(self, checks: list, shown: str, source: str):
        self.checks, self.shown, self.source = checks, shown, source.split("\n")
        self.verdicts: list[dict] = []

    @property
    def over(self) -> bool:
        """All blanks were tried, and the whole file if all of them have passed; or the file cannot be loaded."""
        if any(verdict.get("loading") for verdict in self.verdicts):
            return True
        left = self.checks[len(self.verdicts) :]
        return not left or (isinstance(left[0], WholeFile) and self.passed < len(self.verdicts))

    @property
    def passed(self) -> int:
        return sum(verdict["status"] == "passed" for verdict in self.verdicts)

    def add(self, verdicts: list[dict]) -> None:
        """All ranks' verdicts on the next step."""
        check, verdict = self.checks[len(self.verdicts)], merge(verdicts)
        self.verdicts.append(verdict)
        print(paragraph(check, verdict, self.shown, self.source), flush=True)

    def as_json(self, name: str) -> dict:
        """A point for each check that has passed, with what was expected and found."""
        checks = []
        for check, verdict in itertools.zip_longest(self.checks, self.verdicts, fillvalue={"status": "not tried"}):
            checks.append({"title": check.title, "point": int(verdict["status"] == "passed"), **verdict})
        points = {"exercise": name, "file": self.shown, "points": self.passed, "of": len(self.checks)}
        return {**points, "checks": checks, "torch": torch.__version__, "python": platform.python_version()}


def on_ranks(report: Report, file: Path, options: argparse.Namespace) -> None:
    """Start the ranks on `file`, and fill in the report."""
    while not report.over:
        first = len(report.verdicts)
        command = ["-m", "zerolab.teach.check.examine"]
        command += map(str, (options.name, file, options.seconds, options.seed, first))
        quiet = options.folder is not None  # what a file prints does not belong between the others' points
        with ranks.Ranks(command, options.ranks, 3600, quiet, file=str(file), ZERO_TIMEOUT="60") as there:
            for _, verdicts in there.verdicts(range(first, len(report.checks))):
                report.add(verdicts)
                if report.over or diverged(verdicts):
                    break  # other ranks try the rest
        if len(report.verdicts) == first:
            raise ValueError(f"the ranks ended without a verdict, and printed at last:\n{there.text[-2000:]}")


def _shown(file: Path) -> str:
    return os.path.relpath(file, ROOT) if file.is_relative_to(ROOT) else str(file)


def print_end(report: Report, name: str, hints: int) -> None:
    """Print how many have passed, and so many `hints` for the first that has not."""
    passed = f"{report.passed} of {len(report.checks)} passed"
    if report.passed == len(report.checks):
        print(tables.wrapped(f"\n{passed}: {report.shown} is correct. It {EXERCISES[name].goal}."))
        return
    print(f"\n{passed}.")
    failed = next(place for place, verdict in enumerate(report.verdicts) if verdict["status"] != "passed")
    if hints:
        print(next_hints(report.checks[failed], "\n".join(report.source), hints))
    if len(report.verdicts) < len(report.checks):
        print(f"then      {report.checks[-1].title}")


def examined(file: Path, options: argparse.Namespace) -> dict:
    """Check one file, and print what is found. Returns what --json writes. Raises ValueError if no rank starts."""
    checks = EXERCISES[options.name].checks
    text = file.read_text(errors="replace")
    report, lines = Report(checks, _shown(file), text), lines_of_blanks(text)
    while not (edited(text) or report.over):  # nothing is written: no rank is needed
        title = checks[len(report.verdicts)].title
        line = lines.get(title, max(lines.values()))  # a task's targets have no line
        report.add([{"status": "open", "task": title, "line": line}])
    on_ranks(report, file, options)
    print_end(report, options.name, options.hint)
    return report.as_json(options.name)


def table_of(options: argparse.Namespace) -> list[dict]:
    """Check all files of a folder, and print a table of their points. Returns what --json writes."""
    checks, found = EXERCISES[options.name].checks, []
    rows = [["file", "points", *map(str, range(1, len(checks) + 1))]]
    for file in sorted(options.folder.resolve().glob("*.py")):
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                one = examined(file, options)
            except ValueError as error:
                one = {"exercise": options.name, "file": _shown(file), "points": 0, "error": str(error)}
        found.append(one)
        signs = [SIGNS.get(check["status"], "-") for check in one.get("checks", ())]
        rows.append([file.name, str(one["points"]), *(signs or ["-"] * len(checks))])
        print(f"{file.name}: {one['points']} {one.get('error', '').partition(chr(10))[0]}", flush=True)
    print()
    for number, check in enumerate(checks, start=1):
        print(f"{number:>3}  {check.title}")
    print("\n" + "\n".join(tables.text(rows, left=range(len(rows[0])))))
    return found


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command's options. Raises ValueError."""
    options = check_options.arguments(argv)
    least = EXERCISES[options.name].ranks
    if options.ranks is None:
        options.ranks = max(least, 3)  # with two, too much is equal on both
    if options.ranks < least:
        raise ValueError(f"N must be {least} or more: with fewer, wrong files pass; got {options.ranks}")
    how = "" if options.file else f": ./launch.sh exercise {options.name} writes it"
    options.file = (options.file or FOLDER / f"{options.name}.py").resolve()
    if not options.folder and not options.file.is_file():
        raise ValueError(f"there is no {_shown(options.file)}{how}")
    if options.file.suffix != ".py":
        raise ValueError(f"--file must be a Python file, FILE.py, got {_shown(options.file)}")
    return options


def main(argv: list[str] | None = None) -> None:
    with one_line(ValueError):
        options = arguments(argv)
        what = options.folder or _shown(options.file)
        print(f"{what} on {options.ranks} ranks, on the CPU. A file takes about a minute")
        found = table_of(options) if options.folder else examined(options.file, options)
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
            print(f"written: {os.path.abspath(options.json)}")
    sys.exit(int(not options.folder and found["points"] < found["of"]))
