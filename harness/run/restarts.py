"""torchrun for a run that comes back: ranks that die are started again, and who asks it to stop is obeyed politely.

    python -m harness.run.restarts --standalone --nproc-per-node 2 my_train.py [its options]

It takes torchrun's options, and has other defaults: three restarts, and a rendezvous (the machines' agreement on who
takes part) that soon misses a machine that has gone. And it treats three signals in its own way: SIGTERM, SIGINT
(Ctrl-C) and SIGUSR1. torchrun would pass them on to the ranks, kill what is left after 30 seconds, print a traceback
and fail. Here the first one makes a file. The ranks look for it after every step (harness/run/leaving.py), save, and
end without an error. A second signal ends the ranks at once.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api

from harness.run import folder
from harness.run.ending import NOT_AGAIN, what_failed
from harness.run.torchrun import Stopped

DEFAULTS = [
    "--max-restarts=3",
    # By its own defaults torchrun waits 30 s for machines that may still come, and misses one after 15 s.
    "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1",
    "--signals-to-handle=SIGHUP,SIGQUIT",  # the others are ours
]
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ONE = 1.0  # second: signals that are nearer to each other are one, as Slurm may send one on two ways


class Agent(LocalElasticAgent):
    """torchrun's agent, which starts the ranks and looks after them; this one says why it starts them again.

    One method is wrapped, although it is not public: only here all failures of a restart are known. torch's log names
    one rank, which may be one that has only lost the rank that was killed. Nor has torch an exit status, or an option,
    that means "not again".
    """

    def _monitor_workers(self, worker_group):
        result = super()._monitor_workers(worker_group)
        if result.is_failed() and result.failures:
            if any(failure.exitcode == NOT_AGAIN for failure in result.failures.values()):
                raise ChildFailedError("", result.failures)  # as torchrun does after the last restart
            left, allowed = self._remaining_restarts, worker_group.spec.max_restarts
            again = f". Starting all ranks again, {allowed - left + 1} of {allowed}" if left else ""
            _say(f"{what_failed(result.failures)}{again}")
        return result


def ranks_run() -> bool:
    """Whether any rank runs on this machine: they are all children that this process has."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # WNOWAIT: it changes nothing
    except ChildProcessError:
        return False
    return True


class Asked:
    """The handler of `ASKING`: the first signal makes the file `stop`, a second one raises `Stopped`.

    While no rank runs, the first one ends this process. A thread does that: the main one may be in C++, where torch
    tries for a minute to reach the other machine, and Python calls no handler.
    """

    def __init__(self, stop: Path):
        self.stop, self.first = stop, None

    def listen(self) -> None:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # Python writes each signal's number there, at once
        threading.Thread(target=self._leave_if_no_rank_runs, args=(reading,), daemon=True).start()

    def _leave_if_no_rank_runs(self, pipe: int) -> None:
        while True:
            number = os.read(pipe, 1)[0]
            if number in ASKING and not ranks_run():
                _say(f"{signal.Signals(number).name}: no rank runs now. What was saved before, if anything, remains")
                shutil.rmtree(self.stop.parent, ignore_errors=True)
                os._exit(128 + number)  # an exception would close the meeting of the machines also for the others

    def __call__(self, number: int, frame) -> None:
        name = signal.Signals(number).name
        if not ranks_run():
            return  # `_leave_if_no_rank_runs` sees it too
        if self.first is None:
            self.first = time.monotonic()
            self.stop.touch()
            _say(f"{name}: the ranks save after this step and leave. Once more: they leave at once")
        elif time.monotonic() - self.first > ONE:
            self.stop.unlink(missing_ok=True)  # so that SIGTERM, which torchrun now sends to the ranks, ends them
            raise Stopped(number)


def main(arguments: list[str]) -> None:
    """Run torchrun with `arguments`. After a second signal the exit status is 128 + its number."""
    # Without it the new ranks meet at the store of the old ones, and find what these have left (pytorch#135712).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ["ZERO_LAUNCHED"] = str(time.time())
    options = torchrun.parse_args(arguments)
    held = _hold(options)  # noqa: F841  until this process ends
    api.LocalElasticAgent = Agent  # it says of a rank that failed what torch would say in some lines of its log
    for name in ("api", "errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as place:
        stop = Path(place, "stop")
        os.environ["ZERO_STOP_FILE"] = str(stop)
        asked = Asked(stop)
        asked.listen()
        for number in ASKING:
            signal.signal(number, asked)
        if _several(options):
            one_is_enough = options.nnodes.startswith("1:")
            others = "other machines, if there are any," if one_is_enough else "the other machine(s)"
            print(f"waiting for {others} at {options.rdzv_endpoint} (the same line there)", flush=True)
        try:
            torchrun.main([*DEFAULTS, *arguments])
        except (Stopped, SignalException) as error:
            number = error.args[0] if isinstance(error, Stopped) else error.sigval
            _say(f"{signal.Signals(number).name}: left at once. What was saved before remains")
            sys.exit(128 + number)
        except ChildFailedError as error:
            never = [failure for _, failure in sorted(error.failures.items()) if failure.exitcode == NOT_AGAIN]
            if never:
                said = never[0].message if isinstance(never[0].message, str) else never[0].message.get("message", "")
                _say(f"restarts do not mend this: {said.partition(': ')[2] or said}")  # without the exception's name
                sys.exit(NOT_AGAIN)
            _say(f"gave up after the restarts that were allowed: {len(error.failures)} rank(s) failed, see above")
            sys.exit(1)
        except RendezvousError as error:
            _say(f"the machines cannot agree on who takes part ({error}). Is the one at --rdzv-endpoint gone?")
            sys.exit(1)


def _several(options) -> bool:
    return not options.standalone and options.nnodes not in ("1", "1:1")


def _hold(options):
    """The lock on the folder of the run, or None if it has none. A folder that is in use ends this process."""
    path = folder.folder_of(options.training_script_args, ("zero1", "zero2", "zero3"))
    try:
        return path and folder.lock(path, f"{options.rdzv_endpoint} {options.rdzv_id}" if _several(options) else None)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except OSError as error:  # not every network's file system has locks
        _say(f"--folder {str(path)!r} cannot be locked ({error.strerror}): nothing keeps a second start out of it")
        return None


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"\n{text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
