"""How a run ends, in one line: stopped by Ctrl-C, or because a process was killed."""

import contextlib
import signal
import sys


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
