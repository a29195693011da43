"""The options of `./launch.sh bug`."""

import argparse
from pathlib import Path

from zerolab.run.shared_options import make_parser

DESCRIPTION = """\
Lists the bugs of the museum, which are ZeRO stages with one mistake each. With NUMBER
it trains with this bug and with the correct code, and prints the losses and bytes of
both, so that you can look for the mistake."""
EXAMPLES = """\
  ./launch.sh bug                      # the list
  ./launch.sh bug 7
  ./launch.sh bug 7 --answer"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("bug [NUMBER [N]]", DESCRIPTION, EXAMPLES)
    numbers = sorted(numbers_of_bugs())
    parser.add_argument(
        "number", metavar="NUMBER", nargs="?", type=int, choices=numbers, help="the number of the bug in the list"
    )
    parser.add_argument(
        "ranks",
        metavar="N",
        nargs="?",
        type=int,
        default=2,
        choices=range(2, 17),
        help="the number of ranks (processes), 2 to 16 (default 2)",
    )
    for name, what in (
        ("clue", "the symptom of bug NUMBER, and a question to think about"),
        ("hint", "the method to look at"),
        ("answer", "the mistake, the reason why it goes unnoticed, and the code"),
    ):
        help_text = f"run nothing, and print {what}"
        parser.add_argument(f"--{name}", action="store_const", const=name, dest="asked", help=help_text)
    options = parser.parse_args(argv)
    if options.number is None and options.asked:
        parser.error(f"--{options.asked} needs the number of a bug, 1 to {max(numbers)}")
    return options


def numbers_of_bugs() -> set[int]:
    files = Path(__file__).with_name("museum").joinpath("exhibits").glob("[0-9]*.py")
    return {int(file.stem.partition("_")[0]) for file in files}
