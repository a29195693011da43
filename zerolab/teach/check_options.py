"""The options of `./launch.sh check`."""

import argparse
from pathlib import Path

from zerolab.run.command_line import Parser
from zerolab.run.names import EXERCISES
from zerolab.run.shared_options import (
    check_writable,
    machines,
    positive_int,
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("check NAME [N]", description="Checks an exercise step by step: passed, or expected and found.")
    parser.add_argument("name", metavar="NAME", choices=EXERCISES, help=", ".join(EXERCISES))
    parser.add_argument("ranks", nargs="?", metavar="N", type=positive_int, help="2 or more ranks (default 3)")
    parser.add_argument(
        "--hint", action="count", default=0, help="the next hint for the step that has not passed; twice: the next two"
    )
    parser.add_argument("--file", type=Path, help="another file than exercises/NAME.py")
    parser.add_argument("--folder", type=Path, help="all Python files in it: a table of points, and exit status 0")
    parser.add_argument(
        "--seconds", type=positive_int, default=20, help="how long a rank may wait for another one (default 20)"
    )
    parser.add_argument("--limit", type=positive_int, default=300, help="seconds for one file (default 300)")
    parser.add_argument("--junit", help="write the results to this file, in the XML format of JUnit")
    options = parser.parse_args(argv)
    if machines() != 1:
        parser.error("check runs on one machine: unset NNODES")
    parser.beside("--folder", "--seconds", "--limit", "--junit")
    if options.folder and not any(options.folder.glob("*.py")):
        parser.error(f"--folder {options.folder}: there is no Python file in it")
    check_writable("--junit", options.junit)
    return options
