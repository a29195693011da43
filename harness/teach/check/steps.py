"""What `./launch.sh check` runs on every rank: load the student's file, try step after step, write down what was found.

`harness/teach/check/report.py` starts the ranks and reads the verdicts.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import threading
import time
import traceback
import types
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from harness.properties.moves import ALL_STEPS, MOVES
from harness.properties.property import Finding
from harness.properties.sheet import MIXED, MIXED_AT, Recorder, Sheet
from harness.run import process_group, ranks
from harness.teach.exercise import EXERCISES, ROOT, Blank

FINDINGS = 3  # that are written down per step
PATIENCE = 3  # seconds
# What torch says when an operation meets a storage that was resized to 0.
FREED = re.compile(r"setStorage|out of bounds for storage of size 0|storage of size 0")
TOO_SMALL = re.compile(r"requiring a storage size of (\d+) are out of bounds for storage of size ([1-9]\d*)")
# What the engine says when a unit is to compute that is not there; what gloo and NCCL say of two dtypes.
NOT_READY = re.compile(r"unit '(.+?)' is to compute, but it is (not gathered|on its way): (\w+)\(\) must")
TWO_DTYPES = re.compile(r"invalid tensor type|same (data ?)?type|consistent dtype|tensors? of different d?types?")
LOST = ("onnection reset", "onnection closed", "roken pipe")  # what gloo says when another rank has gone


@dataclass(frozen=True)
class Check:
    """One line of the report: what it looks at (`blank`, or all steps together) and how."""

    title: str
    look: object
    blank: Blank | None = None

    @property
    def read(self) -> str:
        return self.blank.read if self.blank else "what stands at the top of the file, and its class's docstring"


ALL = ("training like one process on all data, and what it sends", "what is held, and that nothing else is alive")


def checks_of(name: str) -> list[Check]:
    """The checks of an exercise, in the order of the steps."""
    blanks = zip(EXERCISES[name].blanks, MOVES[name], strict=True)
    whole = [Check(f"All steps: {title}", look) for title, look in zip(ALL, ALL_STEPS, strict=True)]
    return [Check(blank.task, look, blank) for blank, look in blanks] + whole


class Broken(Exception):
    """The file cannot be used at all; the message says why."""


class _Watch(Recorder):
    """Knows which collective this rank is in."""

    def __init__(self, file: str, note: Path | None = None):
        self.file, self.now, self.last, self.loading = file, "", "", True
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


def load(name: str, file: str) -> types.ModuleType:
    """The student's module, from this path. Raises Broken if there is none, or if it is the reference in disguise."""
    exercise, path = EXERCISES[name], os.path.realpath(file)
    spec = importlib.util.spec_from_file_location(f"student_{name}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise Broken(f"line {error.lineno}: {error.msg}") from error
    except ImportError as error:
        if f"{error.name}.py" == exercise.source:
            raise Broken(f"it imports {exercise.source}, the reference, which it is to replace") from error
        raise
    for blank in exercise.blanks:
        at = module
        for part in blank.where.split("."):
            at = getattr(at, part, None)
        code = getattr(inspect.unwrap(at) if callable(at) else at, "__code__", None)  # it may be decorated
        if code is None:
            raise Broken(f"there is no {blank.where} in it, which this exercise is to write")
        if os.path.realpath(code.co_filename) != path:
            raise Broken(f"{blank.where} comes from {code.co_filename}, and not from this file")
    cls = getattr(module, exercise.engine, None)
    if not isinstance(cls, type) or cls.__module__ != module.__name__:
        raise Broken(f"there is no class {exercise.engine} of its own in it")
    return module


@contextlib.contextmanager
def filled(module: types.ModuleType, blanks: list[Blank], chapter: types.ModuleType):
    """Inside, the chapter's code stands in these `blanks` of the student's module, so that its class is whole."""
    with contextlib.ExitStack() as stack:
        for blank in blanks:
            *owner, name = blank.where.split(".")
            mine, theirs = (functools.reduce(getattr, owner, each) for each in (module, chapter))
            function = getattr(theirs, name)
            if not blank.head:  # it stays the student's function, and calls what stands in the student's module
                mine, name = inspect.unwrap(getattr(mine, name)), "__code__"
                function = inspect.unwrap(function).__code__
            stack.callback(setattr, mine, name, getattr(mine, name))
            setattr(mine, name, function)
        yield


def examine(name, file: str, folder: str, seconds: float, device="cpu", first: int = 0, exit_on_hang=False) -> None:
    """Try step after step on this rank, from number `first` to one that some rank fails; verdicts go to `folder`."""
    file, rank, world_size, sheet = os.path.realpath(file), dist.get_rank(), dist.get_world_size(), None
    blanks = EXERCISES[name].blanks
    with without_reference(name) as chapter, _Watch(file, Path(folder, f"now.{rank}")) as watch:
        for number, check in list(enumerate(checks_of(name)))[first:]:
            over = threading.Event()
            watch.begin()
            if exit_on_hang:
                threading.Thread(target=_guard, args=(over, seconds, watch, folder, number), daemon=True).start()
            try:
                if sheet is None:
                    sheet = sheet_of(name, load(name, file), device)
                    watch.loading = False
                with filled(sheet.chapter, blanks[number + 1 :], chapter):  # what the student may not have written yet
                    verdict = _findings(sheet.look(check.look)) or {"status": "passed"}
            except BaseException as error:
                verdict = _verdict(error, watch, sheet)
                if verdict["status"] == "error" and sheet:  # it may be a consequence of what was found before
                    verdict = _findings(sheet.findings) or verdict
            over.set()
            ranks.say(folder, number, rank, verdict)
            patience = PATIENCE if verdict["status"] == "lost" else 2 * seconds + 10  # who is lost sends no verdict
            if any(not_passed(other) for other in ranks.everyone(folder, number, world_size, patience)):
                return


def sheet_of(name: str, module: types.ModuleType, device: str = "cpu") -> Sheet:
    cls = getattr(module, EXERCISES[name].engine)
    return Sheet(name, module, cls, torch.device(device), f"exercises/{EXERCISES[name].source}")


def _findings(found: list[Finding]) -> dict | None:
    return {"status": "failed", "findings": [asdict(finding) for finding in found[:FINDINGS]]} if found else None


def not_passed(verdict: dict | None) -> bool:
    return verdict is None or verdict["status"] != "passed"


def _verdict(error: BaseException, watch: _Watch, sheet: Sheet | None) -> dict:
    """What an exception that came out of a check means; without a `sheet`, out of the file itself."""
    chain, seen = error, error
    while chain is not None:  # `waiting_for` passes on what happened inside
        seen, chain = (chain, None) if isinstance(chain, NotImplementedError) else (seen, chain.__cause__)
    trace = traceback.extract_tb(seen.__traceback__)
    lines = [frame.lineno for frame in trace if frame.filename == watch.file]
    line = lines[-1] if lines else None
    if isinstance(seen, NotImplementedError) and line and str(seen).startswith("Step "):
        return {"status": "open", "line": line, "task": str(seen)}
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST):
        return {"status": "lost", "line": line, "error": f"has lost another rank in {watch.last or f'line {line}'}"}
    said = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
    if sheet is None:
        return {"status": "error", "line": line, "error": said, "loading": True}
    explained = _in_a_students_words(str(seen), sheet, watch.last)
    said = explained or said
    ours = [frame for frame in trace if frame.filename.startswith(str(ROOT))]
    if not line and ours and not explained and not isinstance(error, Broken):
        place = f"{os.path.relpath(ours[-1].filename, ROOT)}, line {ours[-1].lineno}"
        said += f" (raised in {place}, because of something that this file has left behind)"
    return {"status": "error", "line": line, "error": f"{sheet.at}: ".removeprefix(", ") * bool(sheet.at) + said}


def _in_a_students_words(said: str, sheet: Sheet, last: str) -> str:
    """What an error of torch or the engine means in an exercise; "" for one that says it itself.

    `last` is the last collective that this rank was in.
    """
    if small := TOO_SMALL.search(said):
        needed, there = small.groups()
        return (
            f"a tensor needs {needed} bytes, its storage has {there}. Does resize_() get bytes (numel() * "
            "element_size())?"
        )
    if FREED.search(said):
        return "a tensor is read whose storage has no bytes: its unit was freed too early, or was not gathered yet"
    if "'Bucket' object has no attribute 'kept'" in said:
        return "a bucket of frozen parameters is sent: they have no gradients. Send those of `unit.trained_buckets`"
    if found := NOT_READY.search(said):
        unit, how, moment = found.groups()
        why = "still in flight: `_wait(unit)` is missing"
        why = "not gathered: never gathered, or freed again?" if how == "not gathered" else why
        return f"{moment}({unit}) has returned, and {unit} is {why}"
    if TWO_DTYPES.search(said) and sheet.at == MIXED_AT and last.startswith("all_gather"):
        own, there = str(sheet.odd().head.weight.dtype)[6:], str(MIXED["param_dtype"])[6:]
        short = re.split(r" at index | \(|\n", said)[0]
        return f"{short}: the shard is {own}, `flat` {there}: `precision.rounded_shard(bucket)` rounds it"
    if "grad_dtype" in said:  # as torch says it, of `piece.grad = ...`
        return "a piece is given a gradient of another dtype than its own: `gradient.to(piece.dtype)` casts it"
    if sheet.name == "zero3" and "were not reduced" in said:
        return f"{said.partition(':')[0]}. A unit may have several buckets: is each of `unit.trained_buckets` sent?"
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
    ranks.say(folder, number, rank, hang)
    ranks.everyone(folder, number, world_size, 5)
    os._exit(3)


def main() -> None:
    name, file, seconds, backend, device, folder = sys.argv[1:]
    ranks.begin(folder)
    me = process_group.start(backend, device)
    examine(name, file, folder, float(seconds), me.device, exit_on_hang=True)


if __name__ == "__main__":
    process_group.run(main)
