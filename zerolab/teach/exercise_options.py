"""The options of `./launch.sh exercise`."""

import argparse

from zerolab.run.names import EXERCISES
from zerolab.run.shared_options import make_parser

DESCRIPTION = """\
Writes an exercise to exercises/NAME.py. It is a copy of zero1.py, zero2.py or zero3.py
with blanks, which are functions whose code you write, or a task with a class to
write. ./launch.sh check NAME tests your code."""
EXAMPLES = """\
  ./launch.sh exercise zero1
  ./launch.sh exercise zero3 --hints 2"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("exercise NAME", DESCRIPTION, EXAMPLES)
    parser.add_argument("name", metavar="NAME", choices=EXERCISES, help=f"the exercise: {', '.join(EXERCISES)}")
    parser.add_argument(
        "--hints",
        type=int,
        choices=(0, 1, 2),
        default=1,
        help="the number of hints in each blank; with 0 a blank contains only its target, such as a number of lines "
        "(default 1)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite exercises/NAME.py even if you have edited it")
    return parser.parse_args(argv)
