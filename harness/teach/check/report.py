"""`./launch.sh check zero2 [N]`: is the exercise solved? Says so step by step, with what was expected and found.

This process has no rank: it starts those that try the steps (`steps.py`), and puts their verdicts into words.
"""

import argparse
import ast
import itertools
import os
import platform
import re
import sys
import textwrap
from pathlib import Path

import torch

from harness.engine import accelerator
from harness.run import options as common
from harness.run import process_group, ranks
from harness.run.command_line import one_line
from harness.teach.check.steps import checks_of, parted
from harness.teach.exercise import EXERCISES, FOLDER, ROOT

SECONDS = 30  # for one step; each takes a second or two
GONE = ("died", "lost", "hang")  # ranks with nothing to say about the step itself
SIGNS = {"passed": "passed", "failed": "FAILED", "error": "FAILED", "open": "to write"}
SIGNS |= {"died": "DIED", "lost": "DIED", "hang": "HANGS"}


def to_write(text: str) -> list[tuple[int, str]]:
    """(line, task) of the blanks that are still blank. Raises SyntaxError."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            said = node.exc.args[0]
            if isinstance(said, ast.Constant) and str(said.value).startswith("Step "):
                found.append((node.lineno, said.value))
    return sorted(found)


def merge(verdicts: list[dict]) -> dict:
    """One verdict of all ranks' on one step: the worst, with what only some ranks found under their names.

    What made one rank fail is what the others wait for, or have lost: that is said second.
    """
    gone = [rank for rank, verdict in enumerate(verdicts) if verdict["status"] in GONE]
    others = [f"rank {rank} {verdicts[rank]['error']}" for rank in gone]
    for status in ("error", "failed", "open"):
        ranks = [rank for rank, verdict in enumerate(verdicts) if verdict["status"] == status]
        if ranks:
            if status == "error" or gone:
                others += parting([verdict.get("issued") for verdict in verdicts])
            return {**verdicts[ranks[0]], "rank": ranks[0] if len(ranks) < len(verdicts) else None, "others": others}
    if gone:
        worst = next(status for status in GONE if any(verdict["status"] == status for verdict in verdicts))
        done = [rank for rank in range(len(verdicts)) if rank not in gone]
        others += [f"rank {rank} is through with this step" for rank in done]
        others += parting([verdict.get("issued") for verdict in verdicts])
        return {"status": worst, "others": others, "loading": any(verdict.get("loading") for verdict in verdicts)}
    return {"status": "passed"}


def parting(issued: list[list[str] | None]) -> list[str]:
    """Where the ranks' collectives of a step part: a line for each, if all have told theirs and they do part.

    A rank that skips a collective goes on, and hangs or passes later, perhaps in a line that is not the student's.
    """
    if any(names is None for names in issued):
        return []
    for number, names in enumerate(itertools.zip_longest(*issued), start=1):
        # A rank that has issued less than others may be waiting: that is no other way than theirs.
        if len({name.partition(", issued")[0] for name in names if name is not None}) > 1:
            return [f"The ranks part at collective {number} of this step:"] + [
                f"rank {rank} issues {name}" for rank, name in enumerate(names) if name is not None
            ]
    counts = [len(names) for names in issued]
    if len(set(counts)) == 1:
        return []
    short, most = min(counts), counts.index(max(counts))
    ranks = [f"rank {rank}" for rank, count in enumerate(counts) if count == short]
    what = f"{issued[most][short]}, collective {short + 1} of this step"
    return [f"rank {most} issues {what}; {', '.join(ranks)} does not"]


def lines_of(check, verdict: dict, shown: str, source: list[str]) -> list[str]:
    """What the report says about one step."""
    status = verdict["status"]
    loading = verdict.get("loading")
    lines = [f"{SIGNS[status]:<9} {'the file itself, before any step' if loading else check.title}"]
    if status == "passed":
        return lines
    rank = f"on rank {verdict['rank']}: " if verdict.get("rank") is not None else ""

    def code(line):
        return f": {source[line - 1].strip()}" if line and line <= len(source) else ""

    if status == "open":
        lines.append(f"  {rank}not written yet: {verdict['task']}, see line {verdict['line']} of {shown}")
    for finding in verdict.get("findings", ()):
        lines += [
            f"  {rank}{finding['what']}",
            f"    expected  {finding['expected']}",
            f"    found     {finding['found']}",
        ]
    if status == "error":
        lines.append(f"  {rank}{verdict['error']}")
        if verdict.get("line"):
            lines.append(f"  in line {verdict['line']} of {shown}{code(verdict['line'])}")
    lines += [f"  {other}" for other in verdict.get("others", ())]
    if status in ("lost", "hang") and any(" in all" in other or " waits in " in other for other in verdict["others"]):
        lines.append(
            "  Collectives match by their order alone: every rank must issue the same ones, in the same order."
        )
    lines += [] if loading else [f"  read      {check.read}"]
    return [text for line in lines for text in _wrapped(line)]


def next_hints(check, text: str, many: int) -> list[str]:
    """The next `many` hints of the blank that `check` looks at, beyond those that stand in the file's `text`."""
    hints = check.blank.hints if check.blank else ()
    words = " ".join(text.replace("#", " ").split())  # however its lines are broken
    hints = [hint for hint in hints if " ".join(hint.replace("#", " ").split()) not in words]
    lines = [f"hint      {hint}" for hint in hints[:many]]
    if hints[many:] and many:
        lines.append(f"          (one more: {' '.join(['--hint'] * (many + 1))})")
    none = "there is no other" if check.blank else "all blanks are written"
    return [part for line in lines or [f"hint      {none}; read {check.read}"] for part in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    indent = re.match(r" *(expected  |found     |read      |hint      )?", line).end()
    return textwrap.wrap(line, 118, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


class Report:
    """Prints the verdicts as they come in, step by step."""

    def __init__(self, checks, shown: str, source: str):
        self.checks, self.shown, self.source = checks, shown, source.split("\n")
        self.verdicts: list[dict] = []

    @property
    def over(self) -> bool:
        """All blanks were tried; and the whole file, if all have passed."""
        if len(self.verdicts) < len(self.checks) - 1:
            return False
        return len(self.verdicts) == len(self.checks) or self.passed < len(self.verdicts)

    @property
    def passed(self) -> int:
        return sum(verdict["status"] == "passed" for verdict in self.verdicts)

    def add(self, verdicts: list[dict]) -> None:
        """All ranks' verdicts on the next step."""
        check, verdict = self.checks[len(self.verdicts)], merge(verdicts)
        self.verdicts.append(verdict)
        print("\n".join(lines_of(check, verdict, self.shown, self.source)), flush=True)


def with_issued(folder: Path, rank: int, verdict: dict) -> dict:
    """The verdict, with what this rank has written down that it issues in this step, as long as it was there."""
    log = folder / f"now.{rank}.issued"
    return {**verdict, "issued": log.read_text().splitlines()} if log.exists() else verdict


def run(name: str, world_size: int, seconds: float, backend: str, device: str, file: Path, seed: int = 0) -> Report:
    """Start the ranks on `file`, and print the report."""
    shown = _shown(file)
    print(
        f"+ torchrun {' '.join(ranks.torchrun(world_size)[2:])} -m harness.teach.check.steps {name} {shown}\n",
        flush=True,
    )
    report = Report(checks_of(name), shown, file.read_text())
    variables = {"ZERO_TIMEOUT": str(12 * seconds + 60), "OMP_NUM_THREADS": "1"}
    while not report.over:
        first = len(report.verdicts)
        command = ["-m", "harness.teach.check.steps", name, str(file), str(seconds), backend, device]
        command += [str(seed), str(first)]
        together = 60 + (seconds + 5) * len(report.checks)
        with ranks.Ranks(command, world_size, together, file=str(file), **variables) as there:
            for _, verdicts in there.verdicts(range(first, len(report.checks))):
                report.add([with_issued(there.folder, rank, verdict) for rank, verdict in enumerate(verdicts)])
                if report.over or parted(verdicts):
                    break  # other ranks try the rest
        if len(report.verdicts) == first:
            break
    if not report.over:
        print(f"the ranks ended without a verdict, the last they said:\n{there.text[-2000:]}", file=sys.stderr)
    return report


def _shown(file: Path) -> str:
    return os.path.relpath(file, ROOT) if file.is_relative_to(ROOT) else str(file)


def tell_rest(report: Report, text: str, hints: int) -> None:
    """Print how many have passed, and so many `hints` for the first that has not."""
    print(f"\n{report.passed} of {len(report.checks)} passed.")
    for check, verdict in zip(report.checks, report.verdicts):
        if hints and verdict["status"] != "passed":
            print("\n".join(next_hints(check, text, hints)))
            break
    if len(report.verdicts) < len(report.checks):
        print(f"then      {report.checks[-1].title}")


def as_json(report: Report, name: str) -> dict:
    """For who collects points: one for each check, with what was expected and found."""
    checks = []
    for check, verdict in itertools.zip_longest(report.checks, report.verdicts):
        verdict = verdict or {"status": "not tried"}
        point = int(verdict["status"] == "passed")
        checks.append({"title": check.title, "where": check.blank and check.blank.where, "point": point, **verdict})
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"exercise": name, "points": report.passed, "of": len(report.checks), "checks": checks, "versions": versions}


def default_ranks(options: argparse.Namespace, gpus: int) -> int:
    """Three, or as many as there are GPUs: with two, too much is alike on both."""
    return gpus if gpus > 1 and options.device != "cpu" else 3


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """What was asked for, and where it runs. Raises ValueError."""
    parser = common.Parser("check NAME [N]", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", help=", ".join(EXERCISES))
    parser.add_argument("ranks", nargs="?", metavar="N", type=int, help="2 or more ranks (default: 3, or one per GPU)")
    hint = "the next hint for the step that is not passed; twice: the next two"
    parser.add_argument("--hint", action="count", default=0, help=hint)
    parser.add_argument("--file", help="another file than exercises/NAME.py")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time for one step (default {SECONDS})")
    parser.add_argument("--seed", type=int, default=0, help="other data, for a teacher (default 0)")
    parser.add_argument("--json", metavar="FILE", help="write points, and what was expected and found")
    common.add(parser, "backend", "device")
    options = parser.parse_args(argv)
    name, number, gpus = options.name, options.ranks, accelerator.count()
    if name not in EXERCISES:
        raise ValueError(f"which one? there are: {', '.join(EXERCISES)}" + f"; not {name!r}" * bool(name))
    if number is not None and number < 2:
        raise ValueError(f"N must be 2 or more: with one rank nothing is cut, and everything would pass; got {number}")
    if not 0 < options.seconds <= 3600:  # not a number is refused, too
        raise ValueError(f"--seconds must be above 0, an hour (3600) at most, got {options.seconds}")
    if (os.environ.get("NNODES") or "1") != "1":
        raise ValueError("check runs on one machine: unset NNODES")
    file = Path(options.file).resolve() if options.file else FOLDER / f"{name}.py"
    if not file.is_file():
        how = "" if options.file else f": ./launch.sh exercise {name} writes it"
        raise ValueError(f"there is no {options.file or file.relative_to(ROOT)}{how}")
    options.file = file
    options.ranks = number or default_ranks(options, gpus)
    _, options.runs_on, options.why = process_group.choose(options.backend, options.device, 0, options.ranks, gpus)
    return options


def main(argv: list[str] | None = None) -> None:
    with one_line(ValueError):
        options = arguments(argv)
    name, file, checks = options.name, options.file, checks_of(options.name)
    shown = _shown(file)
    try:
        text = file.read_text()
        lines = {task: line for line, task in to_write(text)}
    except (SyntaxError, ValueError) as error:  # not Python, not utf-8, or a null byte
        line = getattr(error, "lineno", None)
        said = f"{error.msg}: {error.text or ''}" if line else error
        print(f"{shown}{f', line {line}' * bool(line)}: {said}".rstrip(" :\n"), file=sys.stderr)
        sys.exit(1)
    report = Report(checks, shown, text)
    if len(lines) == len(checks) - 1:  # nothing is written: no rank is needed to tell
        for check in checks[:-1]:
            verdict = {"status": "open", "task": check.title, "line": lines[check.title]}
            report.add([verdict])
    else:
        where = "CPU" if options.runs_on == "cpu" else "GPU"
        print(f"{shown} on {options.ranks} ranks, {where}: {options.why}. It takes about half a minute")
        with one_line():
            seconds, backend, device = options.seconds, options.backend, options.device
            report = run(name, options.ranks, seconds, backend, device, file, options.seed)
    with one_line(ValueError):
        common.write_json(options.json, as_json(report, name))
    if report.passed == len(checks):
        print(f"\n{report.passed} of {len(checks)} passed: {shown} is right. It {EXERCISES[name].goal}.")
        sys.exit(0)
    tell_rest(report, text, options.hint)
    sys.exit(1)
