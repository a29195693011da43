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
    parser = Parser(
        "check NAME [N]",
        description="Checks your exercise: prints for each blank that it passed, or what was expected and found.",
    )
    parser.add_argument("name", metavar="NAME", choices=EXERCISES, help=", ".join(EXERCISES))
    parser.add_argument(
        "ranks", nargs="?", metavar="N", type=positive_int, help="the number of ranks, 2 or more (default 3)"
    )
    parser.add_argument(
        "--hint",
        action="count",
        default=0,
        help="print the next hint for the first blank that failed, or if none failed, for the first that is not "
        "written yet; --hint --hint prints two hints",
    )
    parser.add_argument("--file", type=Path, help="check this file instead of exercises/NAME.py")
    parser.add_argument(
        "--folder",
        type=Path,
        help="check all Python files in this folder, and print a table of points; the exit status is 0",
    )
    parser.add_argument(
        "--seconds", type=positive_int, default=20, help="how long a rank may wait for another rank (default 20)"
    )
    parser.add_argument(
        "--limit", type=positive_int, default=300, help="how many seconds the check of one file may take (default 300)"
    )
    parser.add_argument("--junit", help="write the results to this file, in the XML format of JUnit")
    options = parser.parse_args(argv)
    if machines() != 1:
        parser.error("check runs on one machine: unset NNODES")
    parser.beside("--folder", "--seconds", "--limit", "--junit")
    if options.folder and not any(options.folder.glob("*.py")):
        parser.error(f"--folder {options.folder}: there is no Python file in it")
    check_writable("--junit", options.junit)
    return options
