"""Starts a command's module, so that Ctrl-C and a closed pipe end every command alike, also while torch is imported.

    python zerolab/run/start.py zerolab.measure.memory 64 --preset 70b

It is started as a file: the package would import torch before the first line here.
"""

import os
import runpy
import signal
import sys


def leave(number: int, frame) -> None:
    """Ctrl-C while torch is imported: its C++ cannot be left by an exception."""
    print("\nstopped by Ctrl-C", file=sys.stderr, flush=True)
    os._exit(128 + number)


def run() -> None:
    """Start the module that the command line names, with what follows it."""
    signal.signal(signal.SIGINT, leave)
    from zerolab.run.command_line import one_line
    from zerolab.run.starter import end_with_starter

    end_with_starter()  # which a notebook is, say: kill -9 leaves nobody else to end this
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with one_line():
        try:
            runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is known


if __name__ == "__main__":
    run()
