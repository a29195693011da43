"""The options of `./launch.sh exercise`."""

import argparse

from zerolab.run.command_line import Parser
from zerolab.run.names import EXERCISES


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("exercise NAME", description="Writes a chapter with blanks, or a task, for you to complete.")
    parser.add_argument("name", metavar="NAME", choices=EXERCISES, help=", ".join(EXERCISES))
    parser.add_argument(
        "--hints",
        type=int,
        choices=(0, 1, 2),
        default=1,
        help="how many hints each blank has; with 0 a blank has only its target (default 1)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file even if you have edited it")
    return parser.parse_args(argv)
