"""What `./launch.sh check` runs on every rank: try the student's blanks, and write down the verdicts.

`report.py` starts the ranks and reads the verdicts.
"""

import faulthandler
import os
import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from harness.properties.property import Differs
from harness.run import process_group, ranks
from harness.teach.check import cases
from harness.teach.check.difference import Comparison, Run
from harness.teach.check.module import Broken, Missing, chapter, load
from harness.teach.check.recorder import Recorder
from harness.teach.check.tasks import judge
from harness.teach.exercise import EXERCISES, ROOT, Blank, Target

# What torch says when an operation meets a storage that was resized to 0.
FREED = re.compile(r"setStorage|out of bounds for storage of size 0|storage of size 0")
TOO_SMALL = re.compile(r"requiring a storage size of (\d+) are out of bounds for storage of size ([1-9]\d*)")


@dataclass(frozen=True)
class Check:
    """One line of the report: what is tried is one `blank`, or the whole file, or a `target` of a task."""

    title: str
    blank: Blank | None = None
    target: Target | None = None

    @property
    def read(self) -> str:
        return self.blank.read if self.blank else "what stands at the top of the file, and its class's docstring"


def checks_of(name: str) -> list[Check]:
    """The checks of an exercise: its blanks, each by itself, and then the whole file; or a task's targets."""
    if not EXERCISES[name].blanks:
        return [Check(target.title, target=target) for target in EXERCISES[name].targets]
    blanks = [Check(blank.task, blank) for blank in EXERCISES[name].blanks]
    return [*blanks, Check("All steps: training steps, what they send and what they hold")]


def try_case(name: str, theirs, check: Check, case: cases.Case, recorder: Recorder) -> None:
    """Raises what `theirs`, the student's module, does otherwise than the chapter in this case, or than a target."""
    exercise, blank = EXERCISES[name], check.blank
    if check.target:
        return judge(exercise, check.target, getattr(theirs, exercise.engine), recorder, case.seed)
    whole = f"{exercise.engine}.training_step"
    seen = cases.groups_of(dist.group.WORLD).seen
    if (name, case) not in seen:  # once, whichever blank is compared with it
        right = Run(case, [whole, *(each.where for each in exercise.blanks)])
        right.train(recorder, chapter(name), exercise.engine)
        if right.ended:
            raise right.ended
        seen[name, case] = right
    where = blank.where if blank else whole
    wrong = Run(case, [where])
    comparison = Comparison(where, seen[name, case], wrong)
    wrong.train(recorder, theirs, exercise.engine, comparison.expected)
    comparison.compare()


def try_check(name: str, check: Check, recorder: Recorder, folder: str, item: str, seconds: float, seed: int) -> dict:
    """This rank's verdict on a check: of the first case in which any rank finds something. A target has one case."""
    rank, world_size, blank = dist.get_rank(), dist.get_world_size(), check.blank
    verdict, theirs = {"status": "passed"}, None
    found = cases.cases_of(name, blank.where if blank else None, seed)
    for number, case in enumerate(found[:1] if check.target else found):
        if (crash := Path(folder, f"crash.{rank}")).exists():  # else nobody starts new ranks
            faulthandler.dump_traceback_later(seconds, exit=True, file=open(crash, "w"))  # noqa: SIM115
        try:
            if theirs is None:
                theirs = load(name, recorder.file, blank)
            try_case(name, theirs, check, case, recorder)
        except BaseException as error:
            loading = theirs is None and not isinstance(error, Missing)
            verdict = {"at": case.at, **verdict_of(error, recorder), "loading": loading}
        faulthandler.cancel_dump_traceback_later()
        ranks.say(folder, f"{item}.case{number}", rank, verdict)
        verdicts = ranks.everyone(folder, f"{item}.case{number}", world_size, seconds + 10)
        if any(each is None or each["status"] != "passed" for each in verdicts):
            break
    return {**verdict, "count": recorder.count}


def examine(name: str, file: str, folder: str, numbers: Iterable[int], seconds: float = 60, seed: int = 0) -> None:
    """Try these checks on this rank. Verdicts go to `folder`. When the ranks have parted no other is tried."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with Recorder(os.path.realpath(file), Path(folder, f"now.{rank}")) as recorder:
        for number in numbers:
            check = checks_of(name)[number]
            verdict = try_check(name, check, recorder, folder, str(number), seconds, seed)
            ranks.say(folder, number, rank, verdict)
            if parted(ranks.everyone(folder, number, world_size, seconds + 10)):
                cases.groups_of.cache_clear()  # a collective that was waited for in vain has broken them
                return


def parted(verdicts: list[dict | None]) -> bool:
    """Whether the ranks have stopped in different places: then they cannot try anything else together."""
    counts = {None if verdict is None or verdict["status"] == "hang" else verdict.get("count") for verdict in verdicts}
    return len(counts) > 1 or None in counts


def verdict_of(error: BaseException, recorder: Recorder) -> dict:
    """What an exception that came out of a case means."""
    if isinstance(error, Differs):
        return {"status": "failed", "what": error.what, "expected": error.expected, "found": error.found}
    trace = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in trace if frame.filename == recorder.file]
    line, said = lines[-1] if lines else None, str(error)
    if isinstance(error, NotImplementedError) and line and said.startswith("Step "):
        return {"status": "open", "line": line, "task": said}
    if isinstance(error, RuntimeError) and process_group.lost(said):
        return {"status": "hang", "line": line, "error": f"waits in {recorder.last}"}
    if explained := _in_a_students_words(said):
        return {"status": "error", "line": line, "error": explained}
    if not isinstance(error, Broken):
        said = f"{type(error).__name__}: {said}"
    ours = [frame for frame in trace if frame.filename.startswith(str(ROOT))]
    if not line and ours and not isinstance(error, Broken):
        place = f"{os.path.relpath(ours[-1].filename, ROOT)}, line {ours[-1].lineno}"
        said += f" (raised in {place}, because of something that this file has left behind)"
    return {"status": "error", "line": line, "error": said}


def _in_a_students_words(said: str) -> str:
    """What an error of torch means in an exercise; "" for one that says it itself."""
    if small := TOO_SMALL.search(said):
        needed, there = small.groups()
        return (
            f"a tensor needs {needed} bytes, its storage has {there}. Does resize_() get bytes (numel() * "
            "element_size())?"
        )
    if FREED.search(said):
        return "a tensor is read whose storage has no bytes: its unit was freed too early, or was not gathered yet"
    if "grad_dtype" in said:  # as torch says it, of `piece.grad = ...`
        return "a piece is given a gradient of another dtype than its own: `gradient.to(piece.dtype)` casts it"
    return ""


def main() -> None:
    name, file, seconds, backend, device, seed, first, folder = sys.argv[1:]
    ranks.begin(folder)
    process_group.start(backend, device)
    numbers = range(int(first), len(checks_of(name)))
    examine(name, file, folder, numbers, float(seconds), int(seed))


if __name__ == "__main__":
    process_group.run(main)
