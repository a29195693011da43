"""Running a command: a process with a time limit, of which nothing is left when the time is up."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from harness.run.ranks import ROOT, environment, started

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
        # Ctrl-C in the terminal reaches this process alone, which then ends the others.
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        with started(argv, by=signal.SIGABRT, cwd=ROOT, env=environment(**more), **streams) as process:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                return TIMED_OUT, None
    if process.returncode == 0:
        return DONE, 0
    return OUT_OF_MEMORY if "OutOfMemoryError" in log.read_text(errors="replace") else FAILED, process.returncode


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
