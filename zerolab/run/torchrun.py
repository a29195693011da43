"""torchrun whose end can be read: `./launch.sh` starts its ranks by this, with torchrun's own options.

When somebody stops it, torchrun prints a traceback of itself and of every rank. When a rank fails, it prints one and a
table. The ranks have said more: every error of theirs is a line ("[rank 1] error: ..."). So here the end is one
line: who stopped it, or which rank was the first to fail. A rank that was killed has said nothing, so the line tells
how. It also ends with the process that has started it (zerolab/run/starter.py).
"""

import contextlib
import json
import logging
import os
import signal
import sys
from pathlib import Path

from zerolab.run.command_line import one_line
from zerolab.run.endings import ENDED, LAUNCHER, SAID, what_failed
from zerolab.run.starter import end_with_starter

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)  # the last: nobody reads what rank 0 prints


class Stopped(BaseException):
    """Somebody has stopped this run. torchrun's own is an Exception, and code that goes on after any such loses it."""


def _stop(number: int, frame) -> None:
    """The handler of `STOPPING`. On its way out torchrun sends SIGTERM, which ends a rank wherever it is."""
    raise Stopped(number)


def main(arguments: list[str]) -> None:
    """Run torchrun with `arguments`. After a signal the exit status is 128 + its number."""
    end_with_starter()
    os.environ[LAUNCHER] = str(os.getpid())
    with one_line():  # importing torch takes seconds, and somebody may have seen a typing mistake
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous.api import RendezvousError

    for number in STOPPING:
        signal.signal(number, _stop)
    # torch's log names a rank that failed, and those that it then stops. Where ranks may be started again, that is
    # the only word of it; elsewhere this says it last.
    logging.disable(logging.WARNING if "--max-restarts" in arguments else logging.CRITICAL)
    try:
        with one_line(ValueError, AssertionError, RendezvousError):  # as for machines that cannot be, or do not meet
            # The other signals are ours, unless `arguments` say so.
            run.main(["--signals-to-handle=SIGHUP,SIGQUIT", *arguments])
        return
    except Stopped as error:
        words, status = _stopped(error.args[0])
    except SignalException as error:
        words, status = _stopped(error.sigval)
    except ChildFailedError as error:
        statuses = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
        if ENDED in os.environ:
            Path(os.environ[ENDED]).write_text(json.dumps(statuses))
        words = "" if SAID in statuses.values() else what_failed(error.failures)
        status = 1
    if words:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"\n{words}", file=sys.stderr, flush=True)
    sys.exit(status)


def _stopped(number: int) -> tuple[str, int]:
    for other in STOPPING:
        signal.signal(other, signal.SIG_IGN)
    if number == signal.SIGPIPE:
        return "", 128 + number
    by = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    return f"stopped by {by}", 128 + number


if __name__ == "__main__":
    main(sys.argv[1:])
