"""Running a job: a process with a time limit, of which nothing is left when the time is up."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DONE, FAILED, TIMED_OUT, SKIPPED = "done", "failed", "timed out", "skipped"
OUT_OF_MEMORY, INTERRUPTED = "out of memory", "interrupted"
FRAME = re.compile(r'  File "[^"]*", line \d+ in ')  # as the fault handler writes it
FRAMES = 6  # of each stack
TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NNODES",
)


@dataclass
class Job:
    """One command of a part.

    `argv` is what Python gets, with "{file}" where the name of the file for the results is to stand; `shown` the same
    for a reader; `weight` its share of the part's time. `about` says what it measures, for the page. `ladder` and
    `size`: once a job of a ladder is out of memory, its larger ones are skipped. `skip` is a reason not to start it.
    """

    name: str
    argv: list[str]
    shown: str
    weight: float = 1.0
    about: dict = field(default_factory=dict)
    ladder: str = ""
    size: float = 0.0
    skip: str = ""


class Interrupted(BaseException):
    """The report was told to stop, by the signal `number`."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def environment() -> dict[str, str]:
    """The caller's, without what a torchrun around it has set, and so that a process that dies says where it was."""
    clean = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    clean.setdefault("OMP_NUM_THREADS", "1")
    clean.setdefault("ZERO_TIMEOUT", "60")
    return {**clean, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def run(argv: list[str], seconds: float, log: Path) -> tuple[str, int | None, float]:
    """Start Python with `argv`, for at most `seconds`; what it prints goes to `log`.

    Returns (status, exit status or None, seconds that it took). Its processes are ended before this returns, also when
    the caller is interrupted.
    """
    started = time.monotonic()
    with open(log, "wb") as output:
        # A session of its own: Ctrl-C in the terminal reaches this process alone, which then ends the others.
        process = subprocess.Popen(
            [sys.executable, *argv], cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
            status = FAILED if process.returncode else DONE
        except subprocess.TimeoutExpired:
            status = TIMED_OUT
        finally:
            end(process)
    code = None if status == TIMED_OUT else process.returncode
    if status == FAILED and "OutOfMemoryError" in tail(log, 400):
        status = OUT_OF_MEMORY
    return status, code, time.monotonic() - started


def end(process: subprocess.Popen) -> None:
    """End a process and all that it has started. torchrun gives every rank a session, so a group is not enough."""
    if process.poll() is not None:
        return
    with_us = [*descendants(process.pid), process.pid]
    for number in with_us:
        _signal(number, signal.SIGABRT)  # Python's fault handler then writes where each thread is: the place of a hang
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    time.sleep(0.2)
    for number in {*with_us, *(child for known in with_us for child in descendants(known))}:
        _signal(number, signal.SIGKILL)
    process.wait()


def _signal(process_id: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process_id, number)


def descendants(process_id: int) -> list[int]:
    """The processes that a process has started, and those that they have started, children first."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found, ahead = [], [process_id]
    while ahead:
        ahead = [child for known in ahead for child in children.get(known, ())]
        found += ahead
    return found


def _parents() -> list[tuple[int, int]]:
    """(process, its parent) of all processes."""
    if os.path.isdir("/proc/self"):
        pairs = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
                pairs.append((int(name), int(file.read().rpartition(")")[2].split()[1])))
        return pairs
    listed = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True).stdout
    return [tuple(map(int, line.split())) for line in listed.splitlines()]


def tail(log: Path, lines: int = 30) -> str:
    """The last lines of a log, without this machine's names and folders.

    Of the stacks that the fault handler writes of a process that hung, the innermost frames are kept: they say where.
    """
    with open(log, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 2**17))
        text = file.read().decode(errors="replace")
    kept, frames = [], 0
    for line in text.replace("\r", "\n").splitlines():
        frames = frames + 1 if FRAME.match(line) else 0
        if line.strip() and frames <= FRAMES and not line.startswith("Extension modules:"):
            kept.append(line[:300])
    return scrub("\n".join(kept[-lines:]))


def scrub(value):
    """`value`, a string or JSON with strings in it, without the folders and the name of this machine."""
    if isinstance(value, dict):
        return {key: scrub(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [scrub(inner) for inner in value]
    if not isinstance(value, str):
        return value
    name = os.uname().nodename if hasattr(os, "uname") else ""
    for secret, public in ((str(ROOT), "."), (sys.prefix, "<python>"), (sys.base_prefix, "<python>"),
                           (os.path.expanduser("~"), "~"), (name, "<host>")):  # fmt: skip
        if len(secret) > 3:
            value = value.replace(secret, public)
    return value
