"""The part of `./launch.sh check` that runs on every rank: it tries the student's blanks or targets.

`report.py` starts the ranks and reads the verdicts.
"""

import contextlib
import faulthandler
import os
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from zerolab.run import process_group, ranks
from zerolab.run.ranks import ROOT
from zerolab.teach.check.cases import OF_CHAPTER, Case, groups_of
from zerolab.teach.check.difference import Comparison, Run
from zerolab.teach.check.findings import Differs
from zerolab.teach.check.module import Missing, Unusable, chapter, load
from zerolab.teach.check.recorder import Recorder
from zerolab.teach.check.tasks import judge
from zerolab.teach.exercises import EXERCISES
from zerolab.teach.exercises.kinds import Task, WholeFile


class Examination:
    """Checks one file on this rank, and writes the verdicts into `folder`."""

    def __init__(self, name: str, file: str, folder: str, seconds: float, seed: int):
        self.name, self.exercise = name, EXERCISES[name]
        self.folder, self.seconds, self.seed, self.rank = folder, seconds, seed, dist.get_rank()
        self.recorder = Recorder(os.path.realpath(file), Path(folder, f"now.{self.rank}"))
        self.right: dict[Case, Run] = {}  # the chapter's runs, for all blanks

    def exchange(self, item, verdict: dict) -> list[dict | None]:
        """Write down this rank's verdict on an item. Returns the verdicts of all ranks."""
        ranks.report(self.folder, item, self.rank, verdict)
        return ranks.wait_for_reports(self.folder, item, dist.get_world_size(), self.seconds + 10)

    def try_check(self, check, item: int) -> dict:
        """This rank's verdict, in the first case in which any rank finds something."""
        verdict, theirs = {"status": "passed"}, None
        is_task = isinstance(self.exercise, Task)
        cases = [None] if is_task else OF_CHAPTER[self.exercise.chapter]
        for number, case in enumerate(cases):
            with self.limited():
                try:
                    if theirs is None:
                        theirs = load(self.name, self.recorder.file, check)
                    if is_task:
                        judge(self.name, check, getattr(theirs, self.exercise.engine), self.recorder, self.seed)
                    else:
                        self.try_case(theirs, check, case)
                except (Exception, SystemExit, KeyboardInterrupt) as error:
                    loading = theirs is None and not isinstance(error, Missing)
                    at = "" if is_task else case.at
                    verdict = {"at": at, **verdict_of(error, self.recorder), "loading": loading}
            verdicts = self.exchange(f"{item}.case{number}", verdict)
            if any(each is None or each["status"] != "passed" for each in verdicts):
                break
        return {**verdict, "count": self.recorder.count}

    @contextlib.contextmanager
    def limited(self):
        """End this process if the block takes more than `seconds`. (In tests nobody would start new ranks.)"""
        crash = Path(self.folder, f"crash.{self.rank}")
        if crash.exists():
            with open(crash, "w") as file:
                faulthandler.dump_traceback_later(self.seconds, exit=True, file=file)
                try:
                    yield
                finally:
                    faulthandler.cancel_dump_traceback_later()
        else:
            yield

    def try_case(self, theirs: ModuleType, check, case: Case) -> None:
        """Raises what the student's module does differently from the chapter in this case."""
        engine = self.exercise.engine
        whole = (f"{engine}.training_step",)
        if case not in self.right:
            watched = [*whole]
            for blank in self.exercise.blanks:
                watched += blank.watched
            self.right[case] = right = Run(case, tuple(dict.fromkeys(watched)))
            right.train(self.recorder, chapter(self.exercise), engine, self.seed)
        right = self.right[case]
        if right.ended:
            raise right.ended
        wrong = Run(case, whole if isinstance(check, WholeFile) else check.watched)
        comparison = Comparison(right, wrong)
        wrong.train(self.recorder, theirs, engine, self.seed, comparison.expected)
        comparison.compare()


def examine(name: str, file: str, folder: str, numbers: Iterable[int], seconds: float = 60, seed: int = 0) -> None:
    """Try these checks on this rank. After the ranks have diverged no other is tried."""
    examination = Examination(name, file, folder, seconds, seed)
    with examination.recorder.recording():
        for number in numbers:
            verdict = examination.try_check(EXERCISES[name].checks[number], number)
            if diverged(examination.exchange(number, verdict)):
                groups_of.cache_clear()  # a collective that was waited for in vain has broken them
                return


def diverged(verdicts: list[dict | None]) -> bool:
    """Whether the ranks have stopped in different places: then they cannot try anything else together."""
    counts = {None if verdict is None or verdict["status"] == "hang" else verdict.get("count") for verdict in verdicts}
    return len(counts) > 1 or None in counts


def verdict_of(error: BaseException, recorder: Recorder) -> dict:
    """The verdict for an exception that a case has raised."""
    trace = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in trace if frame.filename == recorder.file]
    line, message = lines[-1] if lines else None, str(error)
    if isinstance(error, Differs):
        found = {"what": error.what, "expected": error.expected, "found": error.found, "call": error.call}
        return {"status": "failed", "line": line, **found}
    if isinstance(error, NotImplementedError) and line and message.startswith("Step "):
        return {"status": "open", "line": line, "task": message}
    if isinstance(error, RuntimeError) and (process_group.lost(message) or "timeout" in message):
        return {"status": "hang", "line": line, "error": f"waits in {recorder.last}"}
    if explained := explanation(message):
        return {"status": "error", "line": line, "error": explained}
    if not isinstance(error, Unusable):
        message = f"{type(error).__name__}: {message}"
    ours = [frame for frame in trace if frame.filename.startswith(str(ROOT))]
    if not line and ours and not isinstance(error, Unusable):
        place = f"{os.path.relpath(ours[-1].filename, ROOT)}, line {ours[-1].lineno}"
        message += f" (raised in {place}, because of something that this file has left behind)"
    return {"status": "error", "line": line, "error": message}


def explanation(message: str) -> str:
    """The cause of some torch errors in an exercise, or ""."""
    too_small = re.search(
        r"requiring a storage size of (\d+) are out of bounds for storage of size ([1-9]\d*)", message
    )
    if too_small:
        needed, there = too_small.groups()
        return (
            f"a tensor needs {needed} bytes, and its storage has {there}. Does resize_() get bytes (numel() * "
            "element_size())?"
        )
    if "setStorage" in message or "storage of size 0" in message:
        return "a tensor is read whose storage has no bytes: its unit was freed too early, or was not gathered yet"
    return ""


def main() -> None:
    name, file, seconds, seed, first, folder = sys.argv[1:]
    ranks.begin(folder)
    process_group.start("gloo", "cpu")
    numbers = range(int(first), len(EXERCISES[name].checks))
    examine(name, file, folder, numbers, float(seconds), int(seed))


if __name__ == "__main__":
    process_group.run(main)
