"""Starts a command's module, so that Ctrl-C and a closed pipe end every command alike, also while torch is imported.

python -m harness.run.start harness.measure.memory 64 --preset 70b
"""

import runpy
import sys

from harness.run.command_line import one_line
from harness.run.starter import end_with_starter


def run() -> None:
    """Start the module that the command line names, with what follows it."""
    end_with_starter()  # which a notebook is, say: kill -9 leaves nobody else to end this
    with one_line():
        try:
            runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is known


if __name__ == "__main__":
    run()
