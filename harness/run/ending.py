"""How a run ends, in one line: stopped by Ctrl-C, because a process was killed, or by what no restart mends."""

import argparse
import contextlib
import os
import signal
import sys

NOT_AGAIN = 3  # exit status of a rank that would fail again: the launcher does not start it again
SAID = 4  # exit status of ranks that did not fail, and have said what is wrong: the launcher adds nothing


class NotAgain(RuntimeError):
    """An error that a restart does not mend. It ends a rank with the status `NOT_AGAIN`."""


def killed_by(number: int) -> str:
    """What is said of a process that the signal `number` has ended."""
    name = signal.Signals(number).name
    # Nobody but the kernel sends SIGKILL unasked, and as a rule because the machine's memory is used up.
    return f"killed by {name} (out of memory? kill -9?)" if number == signal.SIGKILL else f"killed by {name}"


def what_failed(failures: dict) -> str:
    """In plain words what has ended the ranks, of torch's {rank: ProcessFailure}: the causes, not what followed."""
    ended = {rank: failure.exitcode for rank, failure in sorted(failures.items())}
    # A killed rank's neighbours lose it and fail; those that are left, torchrun ends by SIGTERM.
    killed = {rank: -code for rank, code in ended.items() if code < 0 and code != -signal.SIGTERM}
    if killed:
        return "; ".join(f"rank {rank} was {killed_by(number)}" for rank, number in killed.items())
    first = min(failures, key=lambda rank: failures[rank].timestamp)
    return f"rank {first} was the first to fail, with exit status {ended[first]}: see its lines above"


@contextlib.contextmanager
def one_line(*mistakes: type[Exception]):
    """Inside, Ctrl-C ends this process with one line and exit status 130, as the shell expects it.

    An error of one of the kinds `mistakes`, which says what cannot work, ends it with one line and exit status 2.
    """
    try:
        yield
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # whoever reads this has enough, as `head` does
        os._exit(128 + signal.SIGPIPE)
    except mistakes as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


class Parser(argparse.ArgumentParser):
    """Reads a command's options. A mistake ends the command with one line and exit status 2, as all others do."""

    def error(self, message: str):
        self.exit(2, f"error: {message} (--help lists what there is)\n")
