"""Commands and scripts, started in new processes as users start them."""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

from zerolab.run import ranks
from zerolab.run.ranks import ROOT

LONGEST = 600  # seconds: far more than anything here takes, on a busy machine too


def launch(*arguments: str, folder: Path = ROOT, **environment) -> subprocess.CompletedProcess:
    """Run ./launch.sh in that folder."""
    return _run([str(ROOT / "launch.sh"), *arguments], {"PYTHON": sys.executable, **environment}, folder)


def alone(program: list[str], folder: Path = ROOT, **environment) -> subprocess.CompletedProcess:
    """Run `program`, a script or `-m module` and its arguments, without torchrun."""
    return _run([sys.executable, *program], environment, folder)


def ranks_of(program: list[str], number: int, **environment) -> subprocess.CompletedProcess:
    """Run `program` on ranks that the project's launcher starts."""
    return _run([sys.executable, *ranks.torchrun(number), *program], environment)


def plain_torchrun(program: list[str], number: int, folder: Path = ROOT, **environment) -> subprocess.CompletedProcess:
    """Run `program` by torchrun itself, as users do without launch.sh."""
    line = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)
    return _run([sys.executable, *line, *program], environment, folder)


def on_ranks(program: list[str], number: int, **environment) -> list[subprocess.CompletedProcess]:
    """Run `program` on ranks that no torchrun ends, and return how each has ended, with what it printed."""
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "WORLD_SIZE": number}
    variables |= {"LOCAL_WORLD_SIZE": number, **environment}
    line = [sys.executable, *program]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(number):
            own = _environment(variables | {"RANK": rank, "LOCAL_RANK": rank})
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(stack.enter_context(ranks.started(line, cwd=ROOT, env=own, **streams)))
        ended = []
        for process in processes:
            out, err = process.communicate(timeout=LONGEST)
            ended.append(subprocess.CompletedProcess(line, process.returncode, out, err))
    return ended


def _environment(more: dict) -> dict[str, str]:
    return ranks.environment(**{name: str(value) for name, value in more.items()})


def _run(line: list[str], more: dict, folder: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(line, cwd=folder, env=_environment(more), capture_output=True, text=True, timeout=LONGEST)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
