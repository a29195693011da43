"""How a run ends that somebody stops, or that loses a rank: one line, and no process is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.run.model import preset

ROOT = Path(__file__).resolve().parent.parent

# Ranks that need no torch: each says that it is there, and then waits, or is killed when both have said so.
SCRIPT = """\
import os, sys, time
rank = os.environ["RANK"]
os.write(1, f"rank {rank} has the number {os.getpid()}\\n".encode())  # in one piece
open(f"{__file__}.{rank}", "w").close()
if sys.argv[1:] == ["--killed"] and rank == "1":
    while not os.path.exists(f"{__file__}.0"):
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
time.sleep(600)
"""
# `./launch.sh zero1` with this for its Python: torch is there, the options are right, and the chapter is `SCRIPT`.
PYTHON = """\
#!/usr/bin/env bash
case "$*" in -c*) exit 0 ;; esac
[ -z "${{ZERO_PREFLIGHT:-}}" ] || {{ echo 2 && echo "two ranks" && exit 0; }}
exec {python} "${{@/zero1.py/{script}}}"
"""


@pytest.fixture
def started(tmp_path):
    """Starts ./launch.sh zero1 with options, waits until both ranks are there: (the process, the ranks' numbers)."""
    script, python, processes = tmp_path / "ranks.py", tmp_path / "python", []
    script.write_text(SCRIPT)
    python.write_text(PYTHON.format(python=sys.executable, script=script))
    python.chmod(0o755)

    def start(*options):
        process = subprocess.Popen(
            [str(ROOT / "launch.sh"), "zero1", "2", *options],
            env={**os.environ, "PYTHON": str(python)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # as a terminal starts it: Ctrl-C goes to this group
        )
        processes.append(process)
        numbers = []
        while len(numbers) < 2 and (line := process.stdout.readline()):
            numbers += [int(line.split()[-1])] if line.startswith("rank ") else []
        return process, numbers

    yield start
    for process in processes:
        process.kill()


def gone(numbers) -> bool:
    """Whether these processes end, if they have not."""
    until = time.monotonic() + 100
    while any(Path(f"/proc/{number}").exists() for number in numbers) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(Path(f"/proc/{number}").exists() for number in numbers)


@pytest.mark.parametrize(
    "options, said, status",
    (([], "stopped by Ctrl-C", 130), (["--killed"], "rank 1 was killed by SIGKILL (out of memory? kill -9?)", 1)),
)
def test_an_end_is_told_in_one_line_and_leaves_no_rank_behind(started, options, said, status):
    process, ranks = started(*options)
    if not options:
        os.killpg(process.pid, signal.SIGINT)
    _, mistake = process.communicate(timeout=200)
    assert mistake.split("\n") == ["", said, ""] and process.returncode == status
    assert len(ranks) == 2 and gone(ranks)


def test_a_preset_in_capitals_is_recognised():
    with pytest.raises(ValueError, match="'7B'.*is '7b' meant"):
        preset("7B")
    with pytest.raises(ValueError) as raised:
        preset("13b")  # no other preset is offered for it
    assert "meant" not in str(raised.value) and "70b" in str(raised.value)
