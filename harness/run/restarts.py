"""torchrun for a run that comes back: ranks that die are started again, and who asks it to stop is obeyed politely.

    python -m harness.run.restarts --standalone --nproc-per-node 2 my_train.py [its options]

It takes torchrun's options, and has other defaults: three restarts, and a rendezvous (the machines' agreement on who
takes part) that soon misses a machine that has gone. And it treats three signals in its own way: SIGTERM, SIGINT
(Ctrl-C) and SIGUSR1. torchrun would pass them on to the ranks, kill what is left after 30 seconds, print a traceback
and fail. Here the first one makes a file. The ranks look for it after every step (harness/run/leaving.py), save, and
end without an error. A second signal ends the ranks at once.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api

from harness.run import torchrun
from harness.run.ending import NOT_AGAIN, what_failed
from harness.run.leaving import hear
from harness.run.torchrun import say

DEFAULTS = [
    "--max-restarts=3",
    # By its own defaults torchrun waits 30 s for machines that may still come, and misses one after 15 s.
    "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1",
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
            say(f"{what_failed(result.failures)}{again}")
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
        hear(ASKING, self._leave_if_no_rank_runs)
        for number in ASKING:
            signal.signal(number, self)

    def _leave_if_no_rank_runs(self, number: int) -> None:
        if not ranks_run():
            say(f"{signal.Signals(number).name}: no rank runs now. What was saved before, if anything, remains")
            shutil.rmtree(self.stop.parent, ignore_errors=True)
            os._exit(128 + number)  # an exception would close the meeting of the machines also for the others

    def __call__(self, number: int, frame) -> None:
        if not ranks_run():
            return  # `_leave_if_no_rank_runs` sees it too
        if self.first is None:
            self.first = time.monotonic()
            self.stop.touch()
            name = signal.Signals(number).name
            say(f"{name}: the ranks save after this step and leave. Once more: they leave at once")
        elif time.monotonic() - self.first > ONE:
            self.stop.unlink(missing_ok=True)  # so that SIGTERM, which torchrun now sends to the ranks, ends them
            torchrun.stop(number, frame)


def main(arguments: list[str]) -> None:
    """Run torchrun with `arguments`. After a second signal the exit status is 128 + its number."""
    # Without it the new ranks meet at the store of the old ones, and find what these have left (pytorch#135712).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ["ZERO_LAUNCHED"] = str(time.time())
    options = run.parse_args(arguments)
    several = not options.standalone and options.nnodes not in ("1", "1:1")
    api.LocalElasticAgent = Agent  # it says of a rank that failed what torch would say in some lines of its log
    with tempfile.TemporaryDirectory() as place:
        stop = Path(place, "stop")
        os.environ["ZERO_STOP_FILE"] = str(stop)
        Asked(stop)
        if several:
            one_is_enough = options.nnodes.startswith("1:")
            others = "other machines, if there are any," if one_is_enough else "the other machine(s)"
            print(f"waiting for {others} at {options.rdzv_endpoint} (the same line there)", flush=True)
        torchrun.run([*DEFAULTS, *arguments], stopped, failed)


def stopped(number: int) -> str:
    return f"{signal.Signals(number).name}: left at once. What was saved before remains"


def failed(failures: dict) -> tuple[str, int]:
    never = [failure for _, failure in sorted(failures.items()) if failure.exitcode == NOT_AGAIN]
    if not never:
        return f"gave up after the restarts that were allowed: {len(failures)} rank(s) failed, see above", 1
    said = never[0].message if isinstance(never[0].message, str) else never[0].message.get("message", "")
    return f"restarts do not mend this: {said.partition(': ')[2] or said}", NOT_AGAIN  # without the exception's name


if __name__ == "__main__":
    main(sys.argv[1:])
