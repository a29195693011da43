"""Programs in processes forked from one that has imported torch: what a user starts, without the seconds of the start.

`alone` is `python PROGRAM`; `on_ranks` is torchrun's ranks, with the environment that torchrun gives each. A process's
exit status is the program's. What `./launch.sh` and torchrun do themselves is not here: for that tests/test_launch.py
goes through the doors.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from pool import forking

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Ended:
    """One process: its exit status (None: it did not end and was killed; -9: a signal did), and what it has written."""

    status: int | None
    stdout: str
    stderr: str


def alone(program: list[str], **environment: str) -> Ended:
    """Run `program`, a script or `-m module` and its arguments, in one process outside of any torchrun."""
    return _run(program, [environment], seconds=100, left_behind=0)[0]


def on_ranks(
    program: list[str], ranks: int, seconds: float = 100, left_behind: int = 0, **environment: str
) -> list[Ended]:
    """Run `program` on ranks, and return what became of each.

    It waits until all but `left_behind` have ended, at most for `seconds`, and kills those that are left.
    """
    import torch.distributed as dist

    # The place where the ranks meet is in this process, as it is in torchrun: it stays when a rank dies.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "localhost", "MASTER_PORT": store.port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    given |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "ZERO_TIMEOUT": 60, **environment}
    each = [{**given, "RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
    return _run(program, each, seconds, left_behind)


def _run(program: list[str], environments: list[dict], seconds: float, left_behind: int) -> list[Ended]:
    with tempfile.TemporaryDirectory() as folder:
        files = [(f"{folder}/{number}.out", f"{folder}/{number}.err") for number in range(len(environments))]
        processes = []
        for environment, both in zip(environments, files):
            strings = {key: str(value) for key, value in environment.items()}
            process = forking().Process(target=_program, args=(list(program), strings, *both), daemon=True)
            process.start()
            processes.append(process)
        until = time.monotonic() + seconds
        while sum(process.is_alive() for process in processes) > left_behind and time.monotonic() < until:
            time.sleep(0.05)
        statuses = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        texts = [[Path(file).read_text() if os.path.exists(file) else "" for file in both] for both in files]
    return [Ended(status, *both) for status, both in zip(statuses, texts)]


def _program(program: list[str], environment: dict[str, str], out: str, err: str) -> None:
    """In the fork: with `environment` besides its own, its output in files."""
    for number, file in ((1, out), (2, err)):
        with open(file, "w") as opened:
            os.dup2(opened.fileno(), number)
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):  # of a torchrun around the tests
        os.environ.pop(name, None)
    os.environ.update(environment)
    _execute(program)


def as_python(executable: str, arguments: list[str], folder: str, environment: dict[str, str], *streams) -> None:
    """In the fork: all as if `executable` had been started there with `arguments` (tests/forked_python.py)."""
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = open(0)  # noqa: SIM115  multiprocessing has closed it
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = executable  # what this one starts goes the same way
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *_of_the_installation()]
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while arguments[0] == "-u" or arguments[0].startswith("-X"):  # Python's own options, which change nothing here
        del arguments[0]
    multiprocessing.current_process()._config["daemon"] = False  # it may have children of multiprocessing's
    try:
        _execute(arguments, folder)
    finally:
        atexit._run_exitfuncs()  # multiprocessing's own end leaves them out


def _of_the_installation() -> list[str]:
    """sys.path without what PYTHONPATH or a working folder has added."""
    return [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]


def _execute(program: list[str], folder: str = str(ROOT)) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    if program[0] == "-c":
        sys.argv = ["-c", *program[2:]]
        exec(compile(program[1], "<string>", "exec"), {"__name__": "__main__"})
    elif program[0] == "-m":
        sys.argv = program[1:]
        sys.path.insert(0, folder)
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")
