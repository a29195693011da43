"""Common to all commands: reading options, and ending with one line after a mistake or Ctrl-C."""

import argparse
import contextlib
import difflib
import os
import signal
import sys

ERRORS_ARE_COLLECTED = "ZERO_ERRORS_ARE_COLLECTED"  # set for ranks whose launcher prints their first error


@contextlib.contextmanager
def one_line(*mistakes: type[Exception]):
    """Inside, Ctrl-C ends this process with one line and exit status 130, which shells expect.

    An error of one of the kinds `mistakes`, which says what cannot work, ends it with one line and exit status 2.
    """
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os._exit(128 + signal.SIGPIPE)
    except mistakes as error:
        print(error_line(error), end="", file=sys.stderr, flush=True)
        sys.exit(2)


def error_line(error: BaseException) -> str:
    """The message that a command prints for `error`. On a rank it begins with the rank's number."""
    where = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    if isinstance(error, OSError) and error.filename:
        return f"{where}error: {str(error.filename)!r} cannot be used: {error.strerror}. Name another one\n"
    return f"{where}error: {error}\n"


def did_you_mean(given: str, known) -> str:
    """ ": did you mean zero3?", or "." where nothing is like it."""
    near = difflib.get_close_matches(given.strip().lower(), known, cutoff=0.75)
    return f": did you mean {' or '.join(near)}?" if near else "."


class Parser(argparse.ArgumentParser):
    """Reads a command's options. A mistake ends the command with one line and exit status 2, as all others do.

    `words` are the command and its positional arguments: "compare [N]".
    """

    def __init__(self, words: str, **more):
        super().__init__(usage=f"./launch.sh {words} [options]", allow_abbrev=False, **more)

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        words = sys.argv[1:] if args is None else args
        self.given = [word.partition("=")[0] for word in words if word.startswith("--")]
        for name in self.given:
            if name not in self._option_string_actions:
                self.error(f"no option {name}{did_you_mean(name, self._option_string_actions)}")
        return super().parse_args(args, namespace)

    def beside(self, option: str, *others: str) -> None:
        """Where `option` is given, refuse all but these `others`: they would be ignored."""
        for name in self.given if option in self.given else ():
            if name not in (option, *others):
                self.error(f"{name} does nothing beside {option}: leave out one of them")

    def needs(self, option: str, other: str) -> None:
        """Refuse `option` without `other`: it would be ignored."""
        if option in self.given and other not in self.given:
            self.error(f"{option} does nothing without {other}")

    def error(self, message: str):
        for action in self._actions:
            if action.choices and message.endswith(f"are required: {action.metavar}"):
                message = f"{action.metavar} is missing, one of: {', '.join(action.choices)}"
        self.exit(2, f"error: {message.removesuffix('.')} (--help lists what there is)\n")
