"""What `./launch.sh check` runs on every rank: try the student's blanks, and write down the verdicts.

`report.py` starts the ranks and reads the verdicts.
"""

import faulthandler
import os
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from zerolab.properties.property import Differs
from zerolab.run import process_group, ranks
from zerolab.teach import written
from zerolab.teach.check import cases
from zerolab.teach.check.difference import Comparison, Run
from zerolab.teach.check.module import Broken, Missing, chapter, load
from zerolab.teach.check.recorder import Recorder
from zerolab.teach.check.tasks import judge
from zerolab.teach.exercise import EXERCISES, ROOT, Check

ERRORS = written.beside(__file__, "errors")["error"]


class Examination:
    """Of one file, on this rank. Verdicts go to `folder`."""

    def __init__(self, name: str, file: str, folder: str, seconds: float, seed: int):
        self.name, self.exercise = name, EXERCISES[name]
        self.folder, self.seconds, self.seed, self.rank = folder, seconds, seed, dist.get_rank()
        self.recorder = Recorder(os.path.realpath(file), Path(folder, f"now.{self.rank}"))
        self.right = {}  # case -> what the chapter does, whichever blank is compared with it

    def tell(self, item, verdict: dict) -> list[dict | None]:
        """This rank's verdict on an item; returns all ranks'."""
        ranks.say(self.folder, item, self.rank, verdict)
        return ranks.everyone(self.folder, item, dist.get_world_size(), self.seconds + 10)

    def try_check(self, check: Check, item: int) -> dict:
        """This rank's verdict: of the first case in which any rank finds something. A target has one case."""
        verdict, theirs = {"status": "passed"}, None
        found = cases.cases_of(self.name, check.where, self.seed)
        for number, case in enumerate(found[:1] if self.exercise.targets else found):
            if (crash := Path(self.folder, f"crash.{self.rank}")).exists():  # else nobody starts new ranks
                faulthandler.dump_traceback_later(self.seconds, exit=True, file=open(crash, "w"))  # noqa: SIM115
            try:
                if theirs is None:
                    theirs = load(self.name, self.recorder.file, check)
                self.try_case(theirs, check, case)
            except BaseException as error:
                loading = theirs is None and not isinstance(error, Missing)
                verdict = {"at": case.at, **verdict_of(error, self.recorder), "loading": loading}
            faulthandler.cancel_dump_traceback_later()
            verdicts = self.tell(f"{item}.case{number}", verdict)
            if any(each is None or each["status"] != "passed" for each in verdicts):
                break
        return {**verdict, "count": self.recorder.count}

    def try_case(self, theirs: ModuleType, check: Check, case: cases.Case) -> None:
        """Raises what the student's module does otherwise than the chapter in this case, or than a target."""
        exercise, engine = self.exercise, self.exercise.engine
        if exercise.targets:
            return judge(exercise, check, getattr(theirs, engine), self.recorder, self.seed)
        whole = f"{engine}.training_step"
        if case not in self.right:
            right = Run(case, [whole, *(blank.where for blank in exercise.blanks)])
            right.train(self.recorder, chapter(self.name), engine)
            if right.ended:
                raise right.ended
            self.right[case] = right
        where = check.where or whole
        wrong = Run(case, [where])
        comparison = Comparison(where, self.right[case], wrong)
        wrong.train(self.recorder, theirs, engine, comparison.expected)
        comparison.compare()


def examine(name: str, file: str, folder: str, numbers: Iterable[int], seconds: float = 60, seed: int = 0) -> None:
    """Try these checks on this rank. When the ranks have parted no other is tried."""
    examination = Examination(name, file, folder, seconds, seed)
    with examination.recorder.recording():
        for number in numbers:
            verdict = examination.try_check(EXERCISES[name].checks[number], number)
            if parted(examination.tell(number, verdict)):
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
    for error in ERRORS:
        if found := re.search(error["said"], said):
            return error["means"].format(*found.groups())
    return ""


def main() -> None:
    name, file, seconds, backend, device, seed, first, folder = sys.argv[1:]
    ranks.begin(folder)
    process_group.start(backend, device)
    numbers = range(int(first), len(EXERCISES[name].checks))
    examine(name, file, folder, numbers, float(seconds), int(seed))


if __name__ == "__main__":
    process_group.run(main)
