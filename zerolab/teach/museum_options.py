"""The options of `./launch.sh bug`."""

import argparse
from pathlib import Path

from zerolab.run.command_line import Parser


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        "bug [NUMBER [N]]",
        description="The museum of bugs: lists them, or runs bug NUMBER next to the correct stage.",
    )
    parser.add_argument("number", nargs="?", help="the number of a bug")
    parser.add_argument(
        "ranks", metavar="N", nargs="?", type=int, default=2, help="the number of ranks, 2 to 16 (default 2)"
    )
    for name, what in (
        ("clue", "the symptom, and a question to think about"),
        ("hint", "which method to look at"),
        ("answer", "what is wrong, why it goes unnoticed, and the code"),
    ):
        parser.add_argument(f"--{name}", action="store_const", const=name, dest="asked", help=f"print {what}")
    options = parser.parse_args(argv)
    numbers = numbers_of_bugs()
    if options.number is None and options.asked:
        parser.error(f"--{options.asked} needs the number of a bug, 1 to {max(numbers)}")
    if options.number is not None and not (options.number.isdecimal() and int(options.number) in numbers):
        parser.error(f"no bug {options.number!r}: the numbers are 1 to {max(numbers)}")
    if not 2 <= options.ranks <= 16:
        parser.error(f"N must be 2 to 16 ranks, got {options.ranks}")
    return options


def numbers_of_bugs() -> set[int]:
    files = Path(__file__).with_name("museum").joinpath("exhibits").glob("[0-9]*.py")
    return {int(file.stem.partition("_")[0]) for file in files}
