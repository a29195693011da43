"""torchrun whose end can be read: `./launch.sh` starts its ranks by this, with torchrun's own options.

When somebody stops it, torchrun prints a traceback of itself and of every rank. When a rank fails, it prints one and a
table. The ranks have said more: every error of theirs is a line ("[rank 1] error: ..."). So here the end is one
line: who stopped it, or which rank was the first to fail. A rank that was killed has said nothing, so the line tells
how. (`./launch.sh train` has restarts.py, as there ranks may come back.)
"""

import contextlib
import logging
import signal
import sys

from harness.run.ending import SAID, one_line, what_failed

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """Somebody has stopped this run. torchrun's own is an Exception, and code that goes on after any such loses it."""


def stop(number: int, frame) -> None:
    """The handler of `STOPPING`. On its way out torchrun sends SIGTERM, which ends a rank wherever it is."""
    logging.disable(logging.WARNING)  # it would say whom it stops
    raise Stopped(number)


def stopped(number: int) -> str:
    return "stopped by Ctrl-C" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


def failed(failures: dict) -> tuple[str, int]:
    return "" if SAID in [failure.exitcode for failure in failures.values()] else what_failed(failures), 1


def main(arguments: list[str]) -> None:
    with one_line():  # importing torch takes seconds, and somebody may have seen a typing mistake
        import torch.distributed.run  # noqa: F401
    for number in STOPPING:
        signal.signal(number, stop)
    run(arguments, stopped, failed)


def run(arguments: list[str], stopped, failed) -> None:
    """Run torchrun with `arguments`. A signal stops it by a handler that raises `Stopped`.

    `stopped(number)` is then the last line, and the exit status 128 + the signal's number. If ranks fail,
    `failed(failures)` gives line and status.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    # What it says of a rank that failed, and of those that it then stops, is said below.
    for name in ("api", "errors.error_handler"):
        logging.getLogger(f"torch.distributed.elastic.multiprocessing.{name}").setLevel(logging.CRITICAL)
    try:
        torchrun.main(["--signals-to-handle=SIGHUP,SIGQUIT", *arguments])  # the others are ours
        return
    except (Stopped, SignalException) as error:
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
        number = error.args[0] if isinstance(error, Stopped) else error.sigval
        words, status = stopped(number), 128 + number
    except ChildFailedError as error:
        words, status = failed(error.failures)
    except RendezvousError as error:
        words = f"the machines cannot agree on who takes part ({error}). Is the one at --rdzv-endpoint gone?"
        status = 1
    if words:
        say(words)
    sys.exit(status)


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"\n{text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
