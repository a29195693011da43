"""What `./launch.sh check` runs on every rank: load the student's file, try its blanks, write down the verdicts.

`harness/teach/check/report.py` starts the ranks and reads the verdicts.
"""

import ast
import contextlib
import importlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from harness.run import process_group, ranks
from harness.teach.check.cases import Case, cases_of
from harness.teach.check.difference import Differences, chapter_tree, module_of, run, with_one_blank
from harness.teach.check.recorder import Recorder
from harness.teach.exercise import EXERCISES, ROOT, Blank

FINDINGS = 3  # that are written down per blank
PATIENCE = 3  # seconds
# What torch says when an operation meets a storage that was resized to 0.
FREED = re.compile(r"setStorage|out of bounds for storage of size 0|storage of size 0")
TOO_SMALL = re.compile(r"requiring a storage size of (\d+) are out of bounds for storage of size ([1-9]\d*)")
LOST = ("onnection reset", "onnection closed", "roken pipe")  # what gloo says when another rank has gone


@dataclass(frozen=True)
class Check:
    """One line of the report: what is tried is one `blank`, or the whole file."""

    title: str
    blank: Blank | None = None

    @property
    def read(self) -> str:
        return self.blank.read if self.blank else "what stands at the top of the file, and its class's docstring"


def checks_of(name: str) -> list[Check]:
    """The checks of an exercise: its blanks, each by itself, and then the whole file."""
    blanks = [Check(blank.task, blank) for blank in EXERCISES[name].blanks]
    return [*blanks, Check("All steps: training steps, what they send and what they hold")]


@dataclass(frozen=True)
class Options:
    """`seconds`: for one check. `seed`: of the data. Who waits in vain leaves the process where `exit_on_hang`."""

    seconds: float = 30
    seed: int = 0
    exit_on_hang: bool = False


class Broken(Exception):
    """The file cannot be used at all; the message says why."""


class _Watch(Recorder):
    """Knows which collective this rank is in."""

    def __init__(self, file: str, note: Path | None = None):
        super().__init__()
        self.file, self.now, self.last, self.loading = file, "", "", True
        self.at, self.item, self.idle = "", "now", False  # the case, the name of its verdict, whether it is over
        self._note = None if note is None else os.open(note, os.O_CREAT | os.O_WRONLY)
        self.count = 0  # of collectives
        self._log = None if note is None else os.open(f"{note}.issued", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def begins(self, what: str) -> str:
        line = self.line(sys._getframe())
        what += f", issued in line {line}" if line else ""
        if self._log is not None:  # for whoever asks where the ranks part
            os.write(self._log, f"{what}\n".encode())
        return what

    @contextlib.contextmanager
    def inside(self, what: str):
        before, self.now = self.now, self.now or what
        self.last = self.now
        self.count += 1
        if self._note is not None:  # for whoever finds this rank dead
            os.pwrite(self._note, f"{self.now[:200]:<200}".encode(), 0)
        try:
            yield
        finally:
            self.now = before

    def begin(self) -> None:
        """A step begins: nothing was issued in it yet."""
        if self._log is not None:
            os.ftruncate(self._log, 0)

    def line(self, frame) -> int | None:
        """Line in the student's file of the innermost of `frame` and its callers that is there."""
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                return frame.f_lineno
            frame = frame.f_back
        return None

    def __exit__(self, *exception):
        super().__exit__(*exception)
        for file in (self._note, self._log):
            if file is not None:
                os.close(file)


@contextlib.contextmanager
def without_reference(name: str):
    """Inside, to import the exercise's reference, which this yields, is an error: `zero2` for `zero1` is a slip."""
    module = EXERCISES[name].source.removesuffix(".py")
    known, sys.modules[module] = importlib.import_module(module), None
    try:
        yield known
    finally:
        sys.modules[module] = known


def load(name: str, file: str, blank: Blank | None):
    """The student's file as a module; with a `blank`, all others are the chapter's. Raises Broken."""
    exercise, text = EXERCISES[name], Path(file).read_text()
    try:
        tree = ast.parse(text) if blank is None else with_one_blank(name, text, blank)
        if not any(isinstance(node, ast.ClassDef) and node.name == exercise.engine for node in tree.body):
            raise Broken(f"there is no class {exercise.engine} of its own in it")
        with without_reference(name):
            return module_of(tree, f"student_{name}", file)
    except SyntaxError as error:
        raise Broken(f"line {error.lineno}: {error.msg}") from error
    except LookupError as error:
        raise Broken(f"{error} in it, which this exercise is to write") from error
    except ImportError as error:
        if f"{error.name}.py" == exercise.source:
            raise Broken(f"it imports {exercise.source}, the reference, which it is to replace") from error
        raise


def differences(name: str, theirs, blank: Blank | None, case: Case, watch: "_Watch") -> list[dict]:
    """What `theirs`, the student's module, does otherwise than the chapter in this case."""
    engine, where = EXERCISES[name].engine, blank.where if blank else None
    watch.at = case.at
    chapter = module_of(chapter_tree(name), f"chapter_{name}", EXERCISES[name].source)
    right = run(chapter, where, case, watch, engine)
    watch.begin()
    wrong = run(theirs, where, case, watch, engine)
    return [asdict(each) for each in Differences(where, case).compare(right, wrong)]


def try_blank(name: str, file: str, blank: Blank | None, watch: "_Watch", folder: str, number: int, options) -> dict:
    """This rank's verdict on a blank, or on the whole file: of the first case in which any rank finds something."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    verdict = {"status": "passed"}
    for place, case in enumerate(cases_of(name, blank.where if blank else None, options.seed)):
        watch.item = f"{number}.case{place}"
        try:
            if place == 0:
                watch.loading = True
                theirs = load(name, file, blank)
                watch.loading = False
            found = differences(name, theirs, blank, case, watch)
            if found:
                verdict = {"status": "failed", "findings": found[:FINDINGS]}
        except BaseException as error:
            verdict = _verdict(error, watch)
        ranks.say(folder, watch.item, rank, verdict)
        watch.idle = True
        verdicts = ranks.everyone(folder, watch.item, world_size, 2 * options.seconds + 10)
        watch.idle = False
        if any(not_passed(each) for each in verdicts):
            break
    return {**verdict, "count": watch.count}


def examine(name, file: str, folder: str, options: Options, numbers: Iterable[int] | None = None) -> None:
    """Try these checks (all of them) on this rank. Verdicts go to `folder`. After a hang no other is tried."""
    file, rank, world_size = os.path.realpath(file), dist.get_rank(), dist.get_world_size()
    checks = checks_of(name)
    with _Watch(file, Path(folder, f"now.{rank}")) as watch:
        for number in range(len(checks)) if numbers is None else numbers:
            over = threading.Event()
            if options.exit_on_hang:
                arguments = (over, options.seconds, watch, folder, number)
                threading.Thread(target=_guard, args=arguments, daemon=True).start()
            verdict = try_blank(name, file, checks[number].blank, watch, folder, number, options)
            over.set()
            ranks.say(folder, number, rank, verdict)
            patience = PATIENCE if verdict["status"] == "lost" else 2 * options.seconds + 10
            verdicts = ranks.everyone(folder, number, world_size, patience)
            if parted(verdicts):
                return


def parted(verdicts: list[dict | None]) -> bool:
    """Whether the ranks have stopped in different places: then they cannot try anything else together."""
    return None in verdicts or len({verdict.get("count", -1) for verdict in verdicts}) > 1


def not_passed(verdict: dict | None) -> bool:
    return verdict is None or verdict["status"] != "passed"


def _verdict(error: BaseException, watch: "_Watch") -> dict:
    """What an exception that came out of a check means; while `loading`, out of the file itself."""
    trace = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in trace if frame.filename == watch.file]
    line = lines[-1] if lines else None
    if isinstance(error, NotImplementedError) and line and str(error).startswith("Step "):
        return {"status": "open", "line": line, "task": str(error)}
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST):
        return {"status": "lost", "line": line, "error": f"has lost another rank in {watch.last or f'line {line}'}"}
    said = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
    if watch.loading:
        return {"status": "error", "line": line, "error": said, "loading": True}
    explained = _in_a_students_words(str(error))
    said = explained or said
    ours = [frame for frame in trace if frame.filename.startswith(str(ROOT))]
    if not line and ours and not explained:
        place = f"{os.path.relpath(ours[-1].filename, ROOT)}, line {ours[-1].lineno}"
        said += f" (raised in {place}, because of something that this file has left behind)"
    if watch.at:
        said = f"{watch.at}: {said}"
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


def _guard(over: threading.Event, seconds: float, watch: _Watch, folder: str, number: int) -> None:
    """Unless the step is `over` in time: say where this rank is, give the others the time to say it too, and leave.

    A collective that this rank is in when another has failed, it is in in vain: PATIENCE is the time for that.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    until, since, last = time.monotonic() + seconds, time.monotonic(), watch.count
    while time.monotonic() < until:
        if over.wait(0.1):
            return
        if watch.idle:  # it waits for the other ranks' verdicts, each of which has its own time
            until = time.monotonic() + seconds
            continue
        if not watch.now or watch.count != last:
            since, last = time.monotonic(), watch.count
        elif time.monotonic() > since + PATIENCE and any(
            verdict and not_passed(verdict) for verdict in ranks.said(folder, number, world_size)
        ):
            break
    line = watch.line(sys._current_frames().get(threading.main_thread().ident))
    where = f"waits in {watch.now}" if watch.now else "is in no collective"
    # Issued at one line, waited for at another.
    at = f"; it is at line {line}" if line and f"line {line}" not in where else ""
    hang = {"status": "hang", "line": line, "error": where + at, "loading": watch.loading}
    for item in (watch.item, number):
        ranks.say(folder, item, rank, hang)
    ranks.everyone(folder, number, world_size, 5)
    os._exit(3)


def main() -> None:
    name, file, seconds, backend, device, seed, first, folder = sys.argv[1:]
    ranks.begin(folder)
    process_group.start(backend, device)
    options = Options(seconds=float(seconds), seed=int(seed), exit_on_hang=True)
    examine(name, file, folder, options, range(int(first), len(checks_of(name))))


if __name__ == "__main__":
    process_group.run(main)
