"""What every command's line has in common: how it is read, and that a mistake, or Ctrl-C, ends it in one line."""

import argparse
import contextlib
import os
import signal
import sys


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
