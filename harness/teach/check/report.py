"""`./launch.sh check zero2 [N]`: is the exercise solved? Says so step by step, with what was expected and found.

This process has no rank: it starts the ranks with torchrun, reads the verdicts they write (`ranks.py`),
and so has something to say when they hang, crash or never start.
"""

import argparse
import ast
import contextlib
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from harness.run.ending import killed_by, one_line
from harness.teach.exercise import EXERCISES, FOLDER, ROOT, Blank, answer, find, generate

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


def first_open(name: str, text: str) -> Blank | None:
    """The exercise's first blank, if its function stands as the exercise was written; None if anything was changed.

    A blank behind others is told by the ranks alone: those before it may be wrong.
    """
    blank = EXERCISES[name].blanks[0]
    with contextlib.suppress(LookupError):
        trees = ast.parse(text), ast.parse(generate(name, [blank.where]))
        written, blank_one = (ast.dump(find(tree, blank.where)) for tree in trees)
        return blank if written == blank_one else None
    return None


class LastCheck:
    """What the last check of a file has found, kept beside it: at which step the file did not pass.

    It holds as long as the file's code is the same, comments aside, and the check is asked for in the same way.
    """

    def __init__(self, name: str, file: Path, text: str, *asked):
        self._file = file.with_name(f".{file.name}.checked")
        code = ast.dump(ast.parse(text))
        self._key = hashlib.sha256(repr((name, code, asked)).encode()).hexdigest()

    def keep(self, passed: int) -> None:
        """So many steps have passed, and the next one has not."""
        with contextlib.suppress(OSError):  # a folder that cannot be written to: then the next hint takes a check
            self._file.write_text(json.dumps({"key": self._key, "passed": passed}))

    @property
    def passed(self) -> int | None:
        """How many steps have passed, or None if nothing is known."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(self._file.read_text())
            return int(known["passed"]) if known["key"] == self._key else None
        return None


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
        return {"status": worst, "others": others + parting([verdict.get("issued") for verdict in verdicts])}
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
            *(f"      {line}" for line in finding.get("picture", ())),
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
    reads = [finding["read"] for finding in verdict.get("findings", ()) if finding.get("read")]
    lines += [] if loading else [f"  read      {(reads or [check.read])[0]}"]
    return [text for line in lines for text in _wrapped(line)]


def next_hints(check, text: str, many: int) -> list[str]:
    """The next `many` hints of the blank that `check` looks at, beyond those that stand in the file's `text`."""
    if check.blank is None:
        return [f"hint      all blanks are written; read {check.read}"]
    shown = check.blank.hints_in(text)
    hints = check.blank.hints[shown : shown + many]
    lines = [f"hint      {hint}" for hint in hints] or [f"hint      there is no other; read {check.read}"]
    if hints and shown + many < len(check.blank.hints):
        lines.append(f"          (one more: {' '.join(['--hint'] * (many + 1))})")
    return [part for line in lines for part in _wrapped(line)]


def _wrapped(line: str) -> list[str]:
    indent = re.match(r" *(expected  |found     |read      |hint      )?", line).end()
    return textwrap.wrap(line, 118, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


class Report:
    """Prints the verdicts as they come in, step by step."""

    def __init__(self, checks, folder: str, world_size: int, shown: str, source: str):
        self.checks, self.folder, self.world_size = checks, folder, world_size
        self.shown, self.source = shown, source.split("\n")
        self.verdicts: list[dict] = []

    @property
    def over(self) -> bool:
        return len(self.verdicts) == len(self.checks) or any(v["status"] != "passed" for v in self.verdicts)

    def read(self, died: dict[int, str] | None = None) -> None:
        """Print what is new. `died` says how ranks ended; then what is missing will never come."""
        while not self.over:
            files = [Path(self.folder, f"{len(self.verdicts)}.{rank}") for rank in range(self.world_size)]
            there = [file.exists() for file in files]
            if not all(there) and (died is None or not (died or any(there))):
                return
            verdicts = [
                json.loads(file.read_text()) if file.exists() else self._died(rank, died.get(rank, "ended"))
                for rank, file in enumerate(files)
            ]
            verdict = merge(verdicts)
            lines = lines_of(self.checks[len(self.verdicts)], verdict, self.shown, self.source)
            self.verdicts.append(verdict)
            print("\n".join(lines), flush=True)

    def _died(self, rank: int, how: str) -> dict:
        """The verdict in place of a rank's own that has ended. What it had issued it has written down (`ranks.py`)."""
        log = Path(self.folder, f"now.{rank}.issued")
        return {"status": "died", "error": how, **({"issued": log.read_text().splitlines()} if log.exists() else {})}


def _how_they_died(folder: str, errors: str, world_size: int, file: str) -> dict[int, str]:
    """{rank: what is known}, of ranks that ended without a verdict."""
    codes = {
        int(rank): int(code)
        for rank, code in re.findall(r"rank\s*: (\d+) \(.*?exitcode\s*: (-?\d+)", errors, re.DOTALL)
    }
    died = {}
    for rank in range(world_size):
        crash, now = Path(folder, f"crash.{rank}"), Path(folder, f"now.{rank}")
        if not crash.exists():
            continue  # it never began
        text, code = crash.read_text(), codes.get(rank, 0)
        last = now.read_text().strip() if now.exists() else ""
        last = f"; the last collective it was in: {last}" * bool(last)
        if text:
            what = text.split("\n")[0].removeprefix("Fatal Python error: ")
            line = re.search(rf'File "{re.escape(file)}", line (\d+)', text)
            at = f" in line {line[1]}" if line else ""
            freed = " (is it a tensor whose memory was freed?)" * ("Segmentation" in what)
            died[rank] = f"died: {what}{at}{freed}{last}"
        elif code < 0 and code != -signal.SIGTERM:
            died[rank] = f"was {killed_by(-code)}{last}"
        elif code > 0:
            died[rank] = f"ended with exit status {code}{last}"
        else:
            died[rank] = f"ended without a word: os._exit(), or it was stopped when another rank had ended{last}"
    return died


def run(name: str, ranks: int, seconds: float, backend: str, device: str, file: Path):
    """Start the ranks on `file` and print the report: (whether all steps passed, the Report)."""
    from harness.teach.check import steps as check_steps

    source = file.read_text()
    shown = os.path.relpath(file, ROOT) if file.is_relative_to(ROOT) else str(file)
    environment = {**os.environ, "ZERO_TIMEOUT": str(12 * seconds + 60), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment.pop("ZERO_PREFLIGHT", None)
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "errors"), "w+") as errors:
        arguments = [name, str(file), folder, str(seconds), backend, device]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        print(f"+ torchrun {' '.join(torchrun[2:])} -m harness.teach.check.ranks {name} {shown}\n", flush=True)
        report = Report(check_steps.checks_of(name), folder, ranks, shown, source)
        process = subprocess.Popen(
            [sys.executable, *torchrun, "-m", "harness.teach.check.ranks", *arguments],
            cwd=ROOT, env=environment, stderr=errors, start_new_session=True,
        )  # fmt: skip
        until = time.monotonic() + 60 + (seconds + 5) * len(report.checks)
        try:
            while process.poll() is None and not report.over and time.monotonic() < until:
                report.read()
                time.sleep(0.05)
            with_verdict = report.over
            if not with_verdict and process.poll() is None:
                _stop(process)
            elif with_verdict:
                with _patience():
                    process.wait(10)
        finally:
            _stop(process)
        errors.seek(0)
        said = errors.read()
        report.read(_how_they_died(folder, said, ranks, str(file)))
    if not report.over:
        print(f"the ranks ended without a verdict, the last they said:\n{said[-2000:]}", file=sys.stderr)
    return report.over and all(verdict["status"] == "passed" for verdict in report.verdicts), report


class _patience:
    """Let a process have its time, and no more."""

    def __enter__(self):
        return self

    def __exit__(self, kind, *exception):
        return kind is subprocess.TimeoutExpired


def _stop(process: subprocess.Popen) -> None:
    """End torchrun and its ranks, if they have not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        with _patience():
            process.wait(10)


def tell_rest(checks, passed: int, told: int, text: str, hints: int, lines: dict[str, int]) -> None:
    """Print how many have passed, so many `hints` for the step that has not, if it was `told` of, and what follows."""
    print(f"\n{passed} of {len(checks)} passed.")
    if hints and told:
        print("\n".join(next_hints(checks[passed], text, hints)))
    for check in checks[passed + told :]:
        blank = f", not written yet: see line {lines[check.title]}" if check.title in lines else ""
        print(f"then      {check.title}{blank}")


def main(argv=None) -> None:
    parser = answer(argparse.ArgumentParser(prog="check", description=__doc__.splitlines()[0]))
    parser.add_argument("name", nargs="?", help=", ".join(EXERCISES))
    parser.add_argument("ranks", nargs="?", help="number of ranks, 2 or more (default: one per GPU, else 2)")
    parser.add_argument("--hint", action="count", default=0,
                        help="the next hint for the step that is not passed; twice: the next two")  # fmt: skip
    parser.add_argument("--file", help="another file than exercises/NAME.py")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time for one step (default {SECONDS})")
    parser.add_argument("--backend", default="auto", help="auto, gloo or nccl")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options = parser.parse_args(argv)
    name = options.name
    if name not in EXERCISES:
        parser.error(f"which one? there are: {', '.join(EXERCISES)}" + f"; not {name!r}" * bool(name))
    if options.ranks is not None and not re.fullmatch(r"[1-9][0-9]{0,3}", options.ranks):
        parser.error(f"N must be a number of ranks, 2 or more, got {options.ranks!r}")
    if options.ranks == "1":
        parser.error("N must be 2 or more: with one rank nothing is cut, and everything would pass")
    if not options.seconds > 0:
        parser.error(f"--seconds must be above 0, got {options.seconds:g}")
    if os.environ.get("NNODES", "1") != "1":
        parser.error("runs on one machine: unset NNODES")
    file = Path(options.file).resolve() if options.file else FOLDER / f"{name}.py"
    if not file.is_file():
        how = "" if options.file else f": ./launch.sh exercise {name} writes it"
        parser.error(f"there is no {options.file or file.relative_to(ROOT)}{how}")
    shown = os.path.relpath(file, ROOT) if file.is_relative_to(ROOT) else str(file)
    try:
        blanks = to_write(file.read_text())
    except SyntaxError as error:
        place = f", line {error.lineno}" * bool(error.lineno)
        print(f"{shown}{place}: {error.msg}: {(error.text or '').strip()}".rstrip(": "), file=sys.stderr)
        sys.exit(1)
    except ValueError as error:  # not utf-8, or a null byte
        print(f"{shown}: {error}", file=sys.stderr)
        sys.exit(1)
    import torch

    from harness.run import process_group

    gpus = torch.cuda.device_count()
    try:
        ranks = int(options.ranks or process_group.default_ranks(options.backend, options.device, gpus, 1))
        ranks = max(ranks, 2) if options.ranks is None else ranks
        _, device, why = process_group.choose(options.backend, options.device, 0, ranks, gpus)
    except ValueError as error:
        parser.error(str(error))
    text, lines = file.read_text(), {task: line for line, task in blanks}
    last = LastCheck(name, file, text, options.ranks, options.backend, options.device)
    unwritten = first_open(name, text)
    passed = 0 if unwritten else last.passed if options.hint else None
    if passed is not None:  # no rank is needed to tell
        from harness.teach.check import steps as check_steps

        checks = check_steps.checks_of(name)
        if unwritten:
            verdict = {"status": "open", "task": unwritten.task, "line": lines[unwritten.task]}
            print("\n".join(lines_of(checks[0], verdict, shown, text.split("\n"))))
        else:
            print(f"{shown} has not changed since its last check, which ended at: {checks[passed].title}")
        tell_rest(checks, passed, 1, text, options.hint, lines)
        sys.exit(1)
    print(f"{shown} on {ranks} ranks, {'CPU' if device == 'cpu' else 'GPU'}: {why}. It takes about half a minute")
    with one_line():
        right, report = run(name, ranks, options.seconds, options.backend, options.device, file)
    checks = report.checks
    done = sum(verdict["status"] == "passed" for verdict in report.verdicts)
    if right:
        print(f"\n{done} of {len(checks)} passed: {shown} is right. It {EXERCISES[name].goal}.")
        sys.exit(0)
    if report.verdicts:
        last.keep(done)
    tell_rest(checks, done, len(report.verdicts) - done, text, options.hint, lines)
    sys.exit(1)
