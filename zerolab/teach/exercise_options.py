"""The options of `./launch.sh exercise`."""

import argparse

from zerolab.run.command_line import Parser
from zerolab.run.names import EXERCISES


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("exercise NAME", description="A chapter with blanks, or a task, to be written by you.")
    parser.add_argument("name", metavar="NAME", choices=EXERCISES, help=", ".join(EXERCISES))
    parser.add_argument(
        "--hints", type=int, choices=(0, 1, 2), default=1, help="hints above each blank; 0: only its target (default 1)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file even if it was edited")
    return parser.parse_args(argv)
