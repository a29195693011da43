"""Starts processes, such as ranks, in their own session, and ends what is left of them. It does not import torch."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from zerolab.run.command_line import ERRORS_ARE_COLLECTED
from zerolab.run.parent import end_with_parent

ROOT = Path(__file__).resolve().parents[2]
ENDING = 5  # seconds from the first signal to SIGKILL


def torchrun(world_size: int) -> list[str]:
    """Python's arguments that start this number of ranks on this machine. A script or `-m module` follows them."""
    return ["-m", "zerolab.run.torchrun", "--standalone", "--nproc-per-node", str(world_size)]


def environment(**more: str) -> dict[str, str]:
    """This process's variables, for one that it starts: the project can be imported, and one thread computes."""
    found = dict(os.environ)
    for of_a_rank in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", ERRORS_ARE_COLLECTED):
        found.pop(of_a_rank, None)
    found.setdefault("OMP_NUM_THREADS", "1")
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [found.get("PYTHONPATH")])])
    return found | more


@contextlib.contextmanager
def started(command: list[str], by: int = signal.SIGTERM, **options) -> Iterator[subprocess.Popen]:
    """A process in its own session, which has ended when the block is left.

    If it still runs then, it gets the signal `by`. At SIGTERM torchrun ends its ranks, and at SIGABRT Python's fault
    handler prints where each thread is. What is left of its children after that is killed, because torchrun gives each
    rank its own session.
    """
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            end(process, by)


def end(process: subprocess.Popen, by: int) -> None:
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, by)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDING)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.kill()
    process.wait()
