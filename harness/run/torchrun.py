"""torchrun whose end can be read: `./launch.sh` starts its ranks by this, with torchrun's own options.

When somebody stops it, torchrun prints a traceback of itself and of every rank. When a rank fails, it prints one and a
table. The ranks have said more: every error of theirs is a line ("[rank 1] error: ..."). So here the end is one
line: who stopped it, or which rank was the first to fail. A rank that was killed has said nothing, so the line tells
how. (`./launch.sh train` has restarts.py, as there ranks may come back.)
"""

import logging
import signal
import sys

from harness.run.ending import one_line, what_failed

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """Somebody has stopped this run. torchrun's own is an Exception, and code that goes on after any such loses it."""


def stop(number: int, frame) -> None:
    """The handler of `STOPPING`. On its way out torchrun sends SIGTERM, which ends a rank wherever it is."""
    logging.disable(logging.WARNING)  # it would say whom it stops
    raise Stopped(number)


def main(arguments: list[str]) -> None:
    """Run torchrun with `arguments`. The exit status is 128 + the number of the signal that stopped it, or 1."""
    with one_line():  # importing torch takes seconds, and somebody may have seen a typing mistake
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    # What it says of a rank that failed, and of those that it then stops, is said below.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    for number in STOPPING:
        signal.signal(number, stop)
    try:
        torchrun.main(["--signals-to-handle=SIGHUP,SIGQUIT", *arguments])  # the others are ours
    except Stopped as error:
        for each in STOPPING:
            signal.signal(each, signal.SIG_IGN)
        number = error.args[0]
        _say("stopped by Ctrl-C" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}")
        sys.exit(128 + number)
    except ChildFailedError as error:
        _say(what_failed(error.failures))
        sys.exit(1)


def _say(text: str) -> None:
    print(f"\n{text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
