"""`./launch.sh check zero2 [N]`: is the exercise solved? Says so step by step, with what was expected and found.

./launch.sh check zero2                          exercises/zero2.py
./launch.sh check zero2 --folder SUBMISSIONS     a table of all Python files in a folder
"""

import argparse
import contextlib
import io
import itertools
import os
import sys
from pathlib import Path

from zerolab.engine import accelerator
from zerolab.measure import tables
from zerolab.properties import conform
from zerolab.properties.property import library
from zerolab.run import engine_file, process_group, ranks
from zerolab.run import options as common
from zerolab.run.command_line import Parser, one_line
from zerolab.teach.check.steps import parted
from zerolab.teach.exercise import EXERCISES, FOLDER, ROOT, Check, edited, lines_of_blanks

SIGNS = {"passed": "passed", "open": "to write", "failed": "FAILED", "error": "FAILED", "hang": "HANGS", "died": "DIED"}
# What makes one rank fail is what others wait for, or have lost.
WORST = ("error", "failed", "open", "died", "hang", "passed")


def merge(verdicts: list[dict]) -> dict:
    """One verdict of all ranks' on one step: the worst, with what became of the other ranks."""

    def badness(rank: int) -> tuple[int, bool]:
        status, said = verdicts[rank]["status"], verdicts[rank].get("error", "")
        return WORST.index(status), "without a word" in said  # it may be another's victim

    worst, *rest = sorted(range(len(verdicts)), key=badness)
    status, others = verdicts[worst]["status"], []
    for rank in sorted(rest):
        if verdicts[rank]["status"] in ("died", "hang"):
            others.append(f"rank {rank} {verdicts[rank]['error']}")
    alone = others or any(verdict["status"] != status for verdict in verdicts)
    return {**verdicts[worst], "rank": worst if alone else None, "others": others}


def words_of(check: Check, verdict: dict, shown: str, source: list[str]) -> str:
    """What the report says about one step."""
    status, loading = verdict["status"], verdict.get("loading")
    sign = "HANGS" if verdict.get("error", "").startswith("hangs") else SIGNS[status]
    lines = [f"{sign:<9} {'the file itself, before any step' if loading else check.title}"]
    if status == "passed":
        return lines[0]
    rank = f"on rank {verdict['rank']}: " if verdict.get("rank") is not None else ""
    at = f", {verdict['at']}" if verdict.get("at") else ""
    if status == "open":
        lines.append(f"  {rank}not written yet: {verdict['task']}, see line {verdict['line']} of {shown}")
    elif status == "failed":
        lines += [f"  {rank}{verdict['what']}{at}", f"    expected  {verdict['expected']}"]
        lines.append(f"    found     {verdict['found']}")
    else:
        lines.append(f"  {rank}{verdict['error']}{at}")
        if line := verdict.get("line"):
            lines.append(f"  in line {line} of {shown}: {source[line - 1].strip()}")
    lines += [f"  {other}" for other in verdict.get("others", ())]
    if " waits in " in " ".join(lines):
        said = "Collectives match by their order alone: every rank must issue the same ones, in the same order."
        lines.append(f"  {said}")
    if not loading:
        lines.append(f"  read      {check.read}")
    return tables.wrapped("\n".join(lines))


def next_hints(check: Check, text: str, many: int) -> str:
    """The next `many` hints of a `check`, beyond those that stand in the file's `text`."""
    words = " ".join(text.replace("#", " ").split())  # however its lines are broken
    hints = [hint for hint in check.hints if " ".join(hint.replace("#", " ").split()) not in words]
    lines = [f"hint      {hint}" for hint in hints[:many]]
    if hints[many:]:
        lines.append(f"          (one more: {' '.join(['--hint'] * (many + 1))})")
    if not hints:
        lines = [f"hint      {check.no_hint}; read {check.read}"]
    return tables.wrapped("\n".join(lines))


class Report:
    """Prints the verdicts as they come in, step by step."""

    def __init__(self, checks: list[Check], shown: str, source: str):
        self.checks, self.shown, self.source = checks, shown, source.split("\n")
        self.verdicts: list[dict] = []

    @property
    def over(self) -> bool:
        """All blanks were tried, and the whole file if all have passed; or it is the file that cannot be loaded."""
        left = len(self.checks) - len(self.verdicts)
        loading = any(verdict.get("loading") for verdict in self.verdicts)
        whole_left = left == 1 and self.checks[0].where
        return not left or loading or (whole_left and self.passed < len(self.verdicts))

    @property
    def passed(self) -> int:
        return sum(verdict["status"] == "passed" for verdict in self.verdicts)

    def add(self, verdicts: list[dict]) -> None:
        """All ranks' verdicts on the next step."""
        check, verdict = self.checks[len(self.verdicts)], merge(verdicts)
        self.verdicts.append(verdict)
        print(words_of(check, verdict, self.shown, self.source), flush=True)

    def as_json(self, name: str) -> dict:
        """For who collects points: one for each check, with what was expected and found."""
        checks = []
        for check, verdict in itertools.zip_longest(self.checks, self.verdicts, fillvalue={"status": "not tried"}):
            point = int(verdict["status"] == "passed")
            checks.append({"title": check.title, "where": check.where, "point": point, **verdict})
        points = {"exercise": name, "file": self.shown, "points": self.passed, "of": len(self.checks)}
        return {**points, "checks": checks, "versions": conform.versions()}


def on_ranks(report: Report, file: Path, options: argparse.Namespace) -> None:
    """Start the ranks on `file`, and fill in the report."""
    while not report.over:
        first = len(report.verdicts)
        words = (options.name, file, options.seconds, options.backend, options.device, options.seed, first)
        command = ["-m", "zerolab.teach.check.steps", *map(str, words)]
        quiet = options.folder is not None  # what a file prints has no place between the others' points
        with ranks.Ranks(command, options.ranks, 3600, quiet, file=str(file), ZERO_TIMEOUT="60") as there:
            for _, verdicts in there.verdicts(range(first, len(report.checks))):
                report.add(verdicts)
                if report.over or parted(verdicts):
                    break  # other ranks try the rest
        if len(report.verdicts) == first:
            raise ValueError(f"the ranks ended without a verdict, the last they said:\n{there.text[-2000:]}")


def _shown(file: Path) -> str:
    return os.path.relpath(file, ROOT) if file.is_relative_to(ROOT) else str(file)


def tell_rest(report: Report, name: str, hints: int) -> None:
    """Print how many have passed, and so many `hints` for the first that has not."""
    said = f"{report.passed} of {len(report.checks)} passed"
    if report.passed == len(report.checks):
        print(f"\n{said}: {report.shown} is right. It {EXERCISES[name].goal}.")
        return
    print(f"\n{said}.")
    failed = next(place for place, verdict in enumerate(report.verdicts) if verdict["status"] != "passed")
    if hints:
        print(next_hints(report.checks[failed], "\n".join(report.source), hints))
    if len(report.verdicts) < len(report.checks):
        print(f"then      {report.checks[-1].title}")


def conformed(file: Path, ranks: int) -> dict:
    """The score of an engine of one's own: how many properties it has, of those that so many ranks can ask it."""
    (name,) = engine_file.enter([str(file)], "conform")
    names = [each.name for each in library().values() if conform.size_of(each, ranks) == ranks]
    outcomes = conform.outcomes_of(name, names, ranks)
    asked = [each for each in outcomes.values() if each["outcome"] != "not applicable"]
    points = sum(each["outcome"] == "right" for each in asked)
    refused = sum(each["outcome"] == "refused" for each in asked)
    print(f"\n{points} of {len(asked)} properties; {refused} refused in words")
    return {"exercise": "own_engine", "file": _shown(file), "points": points, "of": len(asked), "properties": outcomes}


def judged(file: Path, options: argparse.Namespace) -> dict:
    """What --json has of a file, which is printed as it is found. Raises ValueError where the ranks do not start."""
    checks = EXERCISES[options.name].checks
    if not checks:
        return conformed(file, options.ranks)
    text = file.read_text(errors="replace")
    report, lines = Report(checks, _shown(file), text), lines_of_blanks(text)
    while not (edited(text) or report.over):  # nothing is written: no rank is needed to tell
        title = checks[len(report.verdicts)].title
        line = lines.get(title, max(lines.values()))  # a task has one blank
        report.add([{"status": "open", "task": title, "line": line}])
    on_ranks(report, file, options)
    tell_rest(report, options.name, options.hint)
    return report.as_json(options.name)


def column_of(check: Check) -> str:
    """The function of a blank; or what a target counts."""
    return (check.where or check.title.partition(":")[0]).rpartition(".")[2]


def table_of(options: argparse.Namespace) -> list[dict]:
    """Examine all files of a folder, and print a table of their points. Returns what --json has."""
    checks, found = EXERCISES[options.name].checks, []
    rows = [["file", "points", *map(column_of, checks)]]
    for file in sorted(options.folder.resolve().glob("*.py")):
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                one = judged(file, options)
            except ValueError as error:
                one = {"exercise": options.name, "file": _shown(file), "points": 0, "error": str(error)}
        found.append(one)
        signs = [SIGNS.get(check["status"], "-") for check in one.get("checks", ())]
        rows.append([file.name, str(one["points"]), *(signs or ["-"] * len(checks))])
        said = one.get("error", "").partition("\n")[0]
        print(f"{file.name}: {one['points']} {said}", flush=True)
    print("\n" + "\n".join(tables.text(rows, left=range(len(rows[0])))))
    return found


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """What was asked for, and where it runs. Raises ValueError."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser("check NAME [N]", description=__doc__, formatter_class=form)
    parser.add_argument("name", metavar="NAME", choices=EXERCISES, help=", ".join(EXERCISES))
    parser.add_argument("ranks", nargs="?", metavar="N", type=int, help="2 or more ranks (default: 3, or one per GPU)")
    common.add(parser, "hint", "file")
    parser.add_argument("--folder", type=Path, help="all Python files in it: a table of points, and exit status 0")
    common.add(parser, "seconds", "seed", "json", "backend", "device")
    options = parser.parse_args(argv)
    name, gpus = options.name, accelerator.count()
    least = EXERCISES[name].ranks
    if options.ranks is None and not EXERCISES[name].checks:
        options.ranks = 2  # most properties have cases on two
    if options.ranks is None:  # with two, too much is alike on both
        options.ranks = max(least, gpus if gpus > 1 and options.device != "cpu" else 3)
    if options.ranks < least:
        raise ValueError(f"N must be {least} or more: with fewer, wrong files pass; got {options.ranks}")
    if (os.environ.get("NNODES") or "1") != "1":
        raise ValueError("check runs on one machine: unset NNODES")
    parser.beside("--folder", "--seconds", "--seed", "--json", "--backend", "--device")
    if options.folder and not any(options.folder.glob("*.py")):
        raise ValueError(f"--folder {options.folder}: there is no Python file in it")
    options.file = Path(options.file or FOLDER / f"{name}.py").resolve()
    if not options.folder and not options.file.is_file():
        how = "" if "--file" in parser.given else f": ./launch.sh exercise {name} writes it"
        raise ValueError(f"there is no {_shown(options.file)}{how}")
    if options.file.suffix != ".py":
        raise ValueError(f"--file must be a Python file, FILE.py, got {_shown(options.file)}")
    process_group.check_writable("--json", options.json)
    _, options.runs_on, options.why = process_group.choose(options.backend, options.device, 0, options.ranks, gpus)
    return options


def main(argv: list[str] | None = None) -> None:
    with one_line(ValueError):
        options = arguments(argv)
        where = "CPU" if options.runs_on == "cpu" else "GPU"
        what = options.folder or _shown(options.file)
        print(f"{what} on {options.ranks} ranks, {where}: {options.why}. A file takes {EXERCISES[options.name].takes}")
        found = table_of(options) if options.folder else judged(options.file, options)
        common.write_json(options.json, found)
    sys.exit(int(not options.folder and found["points"] < found["of"]))
