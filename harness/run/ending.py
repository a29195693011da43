"""How a run ends, in one line: stopped by Ctrl-C, because a process was killed, or by what no restart mends."""

import contextlib
import signal
import sys

NOT_AGAIN = 3  # exit status of a rank that would fail again: the launcher does not start it again


class NotAgain(RuntimeError):
    """An error that a restart does not mend. It ends a rank with the status `NOT_AGAIN`."""


def killed_by(number: int) -> str:
    """What is said of a process that the signal `number` has ended."""
    name = signal.Signals(number).name
    # Nobody but the kernel sends SIGKILL unasked, and as a rule because the machine's memory is used up.
    return f"killed by {name}: out of memory?" if number == signal.SIGKILL else f"killed by {name}"


@contextlib.contextmanager
def one_line():
    """Inside, Ctrl-C ends this process with one line and exit status 130, as the shell expects it."""
    try:
        yield
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
