"""Starts ranks with torchrun, and collects what each rank reports, even if ranks hang or die.

    with Ranks(["-m", "my.module", "zero2"], 2, seconds=60) as ranks:    # my.module is given ranks.folder as well
        for item, verdicts in ranks.verdicts(["values", "bytes"]):       # a verdict per rank
            ...

A rank reports its verdict on an item by a small file (`report`), and not by torch.distributed: a rank that hangs, or is
killed, cannot join a collective any more. Nothing here imports torch.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from zerolab.run.command_line import ERRORS_ARE_COLLECTED
from zerolab.run.parent import end_with_parent

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 10  # seconds for ranks that have reported everything, to leave by themselves
ENDING = 5  # seconds from SIGTERM to SIGKILL

# Called by a rank.


def start_rank(folder: str | Path) -> int:
    """Called first on every rank, so that it is known how the rank ends. Returns its number."""
    end_with_parent(signal.SIGKILL)
    rank = int(os.environ["RANK"])
    faulthandler.enable(open(Path(folder, f"crash.{rank}"), "w"))  # noqa: SIM115
    return rank


def report(folder: str | Path, item, rank: int, verdict: dict) -> None:
    """This rank's verdict on `item`, a number or a name, as JSON."""
    file = Path(folder, f"{item}.{rank}.json")
    part = file.with_suffix(".part")
    part.write_text(json.dumps(verdict))
    part.rename(file)  # whole, or not there


def reports(folder: str | Path, item, world_size: int) -> list[dict | None]:
    """Every rank's verdict on `item`, None where there is none yet."""
    files = [Path(folder, f"{item}.{rank}.json") for rank in range(world_size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def wait_for_reports(folder: str | Path, item, world_size: int, seconds: float) -> list[dict | None]:
    """`reports`, when all are there or the time is over: for a rank that must not leave before the others report.

    One that leaves makes the others fail in another way than they would have.
    """
    until = time.monotonic() + seconds
    while None in (verdicts := reports(folder, item, world_size)) and time.monotonic() < until:
        time.sleep(0.002)
    return verdicts


# Starting ranks.


def torchrun(world_size: int, *more: str) -> list[str]:
    """Python's arguments that start this number of ranks on this machine. A script or `-m module` follows them."""
    return ["-m", "zerolab.run.torchrun", *more, "--standalone", "--nproc-per-node", str(world_size)]


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
    """A process in its own session, which has ended when the block is left; see `end`."""
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent, **options)
    try:
        yield process
    finally:
        end(process, by=by)


def end(process: subprocess.Popen, seconds: float = 0, by: int = signal.SIGTERM) -> None:
    """Wait up to this number of seconds for the process to end by itself, then end its session.

    First by the signal `by`: at SIGTERM torchrun ends its ranks, at SIGABRT Python's fault handler prints where each
    thread is. What is left of its children after that is killed, because torchrun gives each rank its own session.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, by)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDING)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.kill()
    process.wait()


class Ranks:
    """So many ranks that run the Python `command`, whose last argument is the `folder` for their verdicts.

    All of them have `seconds`. Their stdout is shown, or with `quiet` it is in `text` once they have ended. `text`
    always has their stderr. `file` is the path of the code in which the line of a crash is looked for.
    `variables` are set in the ranks' environment.
    """

    def __init__(self, command: list[str], world_size: int, seconds: float, quiet=False, file: str = "", **variables):
        self.command, self.world_size, self.seconds, self.quiet = command, world_size, seconds, quiet
        self.file, self.variables = file, variables
        self.late, self.text, self._stack = False, "", contextlib.ExitStack()

    def __enter__(self) -> "Ranks":
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        output = self._stack.enter_context(open(self.folder / "output", "w"))
        statuses = "--failures", str(self.folder / "failures")
        command = [sys.executable, *torchrun(self.world_size, *statuses), *self.command, str(self.folder)]
        streams = {"stdout": output if self.quiet else None, "stderr": output}
        self.until = time.monotonic() + self.seconds
        self.process = self._stack.enter_context(started(command, env=environment(**self.variables), **streams))
        return self

    def __exit__(self, kind, *exception) -> None:
        with self._stack:
            self._end(0 if kind or self.late else PATIENCE)

    def _end(self, seconds: float) -> None:
        end(self.process, seconds)
        self.text = (self.folder / "output").read_text(errors="replace")

    def verdicts(self, items: Iterable) -> Iterator[tuple[object, list[dict | None]]]:
        """(item, every rank's verdict), one item after the other, as soon as all ranks have reported.

        A verdict that will never come is replaced by {"status": "died", "error": how that rank ended}. Of what
        no rank has begun there is none: if all ranks end before they report anything, `text` may have the reason.
        """
        for item in items:
            while None in (verdicts := reports(self.folder, item, self.world_size)):
                self.late = self.late or time.monotonic() > self.until
                if self.late or self.process.poll() is not None:
                    self._end(0)
                    verdicts = self._last_verdicts(item)
                    break
                time.sleep(0.05)
            if not any(verdicts):
                return
            yield item, verdicts

    def _last_verdicts(self, item) -> list[dict | None]:
        """When all have ended: what each has reported by now, or how it has ended."""
        verdicts, deaths = reports(self.folder, item, self.world_size), list(map(self.death, range(self.world_size)))
        if not any(deaths) and not any(verdicts):
            return verdicts
        lost = ({"status": "died", "error": how or "ended"} for how in deaths)
        return [verdict or instead for verdict, instead in zip(verdicts, lost)]

    def end_of_output(self) -> str:
        """When all have ended: the end of what they have printed, which has the first error."""
        return self.text[-3000:]

    def death(self, rank: int) -> str | None:
        """A sentence about how a rank ended, once all have ended. None for a rank that never began."""
        if not (self.folder / f"crash.{rank}").exists():
            return None
        now = self.folder / f"now.{rank}"
        last = f"; the last collective it was in: {now.read_text().strip()}" if now.exists() else ""
        return self._death(rank) + last

    def _death(self, rank: int) -> str:
        failures = self.folder / "failures"  # {rank: exit status}; not there if torchrun was ended itself
        status = json.loads(failures.read_text()).get(str(rank), 0) if failures.exists() else 0
        if crash := (self.folder / f"crash.{rank}").read_text():
            what = crash.split("\n")[0].removeprefix("Fatal Python error: ")
            line = self.file and re.search(rf'File "{re.escape(self.file)}", line (\d+)', crash)
            at = f" in line {line[1]}" if line else ""
            if what.startswith("Timeout"):  # of `faulthandler.dump_traceback_later`
                return f"hangs{at}"
            freed = " (is it a tensor whose memory was freed?)" if "Segmentation" in what else ""
            return f"died: {what}{at}{freed}"
        if self.late:
            return f"had not come to its end after {self.seconds:g} s, and was ended"
        if status < 0 and status != -signal.SIGTERM:
            hint = " (out of memory? kill -9?)" if status == -signal.SIGKILL else ""
            return f"was killed by {signal.Signals(-status).name}{hint}"
        if status > 0:
            return f"ended with exit status {status}"
        return "ended without an error: os._exit(), or it was stopped when another rank had ended"
