"""The options of `./launch.sh docs`."""

import argparse

from zerolab.run.command_line import did_you_mean
from zerolab.run.names import FIGURES
from zerolab.run.shared_options import existing_file, make_parser

DESCRIPTION = """\
Writes the tables and numbers of README.md and docs/ that are generated from the files
in results/, and draws the figures."""
EXAMPLES = """\
  ./launch.sh docs
  ./launch.sh docs --check
  ./launch.sh docs --figure memory --out figures"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("docs", DESCRIPTION, EXAMPLES)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--check",
        action="store_true",
        help="write nothing, and list the pages whose generated parts are out of date, and the results that were "
        "measured with older code",
    )
    instead.add_argument(
        "--figure",
        metavar="NAME",
        help="draw only this figure, and write no page (an unknown name prints the list of all names)",
    )
    parser.add_argument(
        "--from",
        metavar="FILE",
        nargs="+",
        type=existing_file,
        dest="source",
        help="draw the figure of --figure from these files (default: files in results/)",
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="the folder for the figures (default: results/figures of the project)"
    )
    options = parser.parse_args(argv)
    parser.beside("--check")
    parser.needs("--from", "--figure")
    if options.figure not in (None, *FIGURES):
        parser.error(
            f"no figure {options.figure!r}{did_you_mean(options.figure, FIGURES)} Use one of: {', '.join(FIGURES)}"
        )
    return options
