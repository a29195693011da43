"""Running a command: a process with a time limit, of which nothing is left when the time is up."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness.run.ranks import ROOT, environment

DONE, FAILED, TIMED_OUT = "done", "failed", "timed out"
OUT_OF_MEMORY, INTERRUPTED, LEFT_OUT = "out of memory", "interrupted", "left out"
MOST_LINES = 300  # of what a command prints, the last ones


def run(argv: list[str], seconds: float, log: Path) -> tuple[str, int | None]:
    """Run `argv` for at most `seconds`; what it prints goes to `log`. Returns (status, exit status or None).

    Its processes are ended before this returns, also when the caller is interrupted.
    """
    # So that a process that dies says where it was, and ranks that wait in vain end before this does.
    more = {"ZERO_TIMEOUT": os.environ.get("ZERO_TIMEOUT", "60"), "PYTHONFAULTHANDLER": "1", "PYTHON": sys.executable}
    with open(log, "wb") as output:
        # A session of its own: Ctrl-C in the terminal reaches this process alone, which then ends the others.
        process = subprocess.Popen(argv, cwd=ROOT, env=environment(**more), stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return TIMED_OUT, None
        finally:
            end(process)
    if process.returncode == 0:
        return DONE, 0
    return OUT_OF_MEMORY if "OutOfMemoryError" in log.read_text(errors="replace") else FAILED, process.returncode


def end(process: subprocess.Popen) -> None:
    """End a process and all that it has started. torchrun gives every rank a session, so a group is not enough."""
    if process.poll() is not None:
        return
    with_us = [*descendants(process.pid), process.pid]
    # At the first signal Python's fault handler writes where each thread is: the place of a hang.
    for number in (signal.SIGABRT, signal.SIGKILL):
        for known in with_us:
            with contextlib.suppress(ProcessLookupError):
                os.kill(known, number)
        time.sleep(1)
    process.wait()


def descendants(process_id: int) -> list[int]:
    """The processes that a process has started, and those that they have started."""
    pairs = []  # (process, its parent), of all processes
    if os.path.isdir("/proc/self"):  # Linux, also where a container has no `ps`
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
                pairs.append((int(name), int(file.read().rpartition(")")[2].split()[1])))
    else:
        listed = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True).stdout
        pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found = [process_id]
    for known in found:  # which grows meanwhile
        found += [child for child, parent in pairs if parent == known]
    return found[1:]


def shorten(log: Path) -> None:
    """Keep the last lines of a log, without this machine's names and folders."""
    lines = [line[:300] for line in log.read_text(errors="replace").replace("\r", "\n").splitlines()]
    log.write_text(scrub("\n".join(lines[-MOST_LINES:]), log.parent) + "\n")


def scrub(text: str, folder: Path) -> str:
    """`text` without the folders and the name of this machine; the report's own folder is called FOLDER."""
    names = {str(folder): "FOLDER", str(ROOT): ".", sys.prefix: "<python>", sys.base_prefix: "<python>",
             os.path.expanduser("~"): "~", os.uname().nodename: "<host>"}  # fmt: skip
    for secret, public in names.items():
        if len(secret) > 3:
            text = text.replace(secret, public)
    return text
