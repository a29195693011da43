"""The options of `./launch.sh check`."""

import argparse
from pathlib import Path

from zerolab.run.names import EXERCISES
from zerolab.run.shared_options import (
    check_writable,
    machines,
    make_parser,
    positive_int,
)

DESCRIPTION = """\
Tests your exercise, and prints for each blank that it passed, or what the test
expected and found. A blank is a function whose code you write."""
EXAMPLES = """\
  ./launch.sh check zero2
  ./launch.sh check zero2 --hint       # and one hint for the blank to work on"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("check NAME [N]", DESCRIPTION, EXAMPLES)
    parser.add_argument("name", metavar="NAME", choices=EXERCISES, help=f"the exercise: {', '.join(EXERCISES)}")
    parser.add_argument(
        "ranks",
        nargs="?",
        metavar="N",
        type=positive_int,
        help="the number of ranks (processes), 2 or more (default 3; two_machines and second_shard need 4)",
    )
    parser.add_argument(
        "--hint",
        action="count",
        default=0,
        help="also print the next hint for the first blank that failed, or for the first unwritten blank if none "
        "failed; --hint --hint prints two hints",
    )
    parser.add_argument("--file", type=Path, help="the file to test (default exercises/NAME.py)")
    parser.add_argument(
        "--folder",
        type=Path,
        help="test all Python files in this folder, and print a table of points; the exit status is then always 0",
    )
    parser.add_argument(
        "--seconds",
        type=positive_int,
        default=20,
        help="the time that a rank may wait for another rank, in seconds (default 20)",
    )
    parser.add_argument(
        "--junit", metavar="FILE", help="also write the results to this file, in the XML format of JUnit"
    )
    options = parser.parse_args(argv)
    if machines() != 1:
        parser.error("check runs on one machine: unset NNODES")
    parser.beside("--folder", "--seconds", "--junit")
    if options.folder and not any(options.folder.glob("*.py")):
        parser.error(f"--folder {options.folder}: there is no Python file in it")
    check_writable("--junit", options.junit)
    return options
