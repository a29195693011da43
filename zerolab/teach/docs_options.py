"""The options of `./launch.sh docs`."""

import argparse

from zerolab.run.command_line import Parser, did_you_mean
from zerolab.run.names import FIGURES
from zerolab.run.shared_options import (
    existing_file,
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("docs", description="Writes the generated parts of README.md and docs/, and draws the figures.")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--check",
        action="store_true",
        help="write nothing; list the pages whose generated parts are out of date, "
        "and the results that older code has measured",
    )
    instead.add_argument("--figure", metavar="NAME", help="draw only this figure, and write no page")
    parser.add_argument(
        "--from",
        metavar="FILE",
        nargs="+",
        type=existing_file,
        dest="source",
        help="with --figure: draw it from these files instead of results/",
    )
    parser.add_argument("--out", help="the folder for the figures (default: results/figures of the project)")
    options = parser.parse_args(argv)
    parser.beside("--check")
    parser.needs("--from", "--figure")
    if options.figure not in (None, *FIGURES):
        parser.error(
            f"no figure {options.figure!r}{did_you_mean(options.figure, FIGURES)} There are: {', '.join(FIGURES)}"
        )
    return options
