"""The options of `./launch.sh report`."""

import argparse
import time
from pathlib import Path

from zerolab.run.shared_options import make_parser, non_negative_float

DESCRIPTION = """\
Runs the main measurements on this machine, and writes their results into a folder:
one page to read, report.md, and the files that it was made from."""
EXAMPLES = """\
  ./launch.sh report
  ./launch.sh report my-machine --minutes 30"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("report [FOLDER]", DESCRIPTION, EXAMPLES)
    folder = time.strftime("report-%Y%m%d-%H%M%S")
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        type=Path,
        default=folder,
        help="a new or empty folder for the results (default report-DATE-TIME)",
    )
    parser.add_argument(
        "--minutes",
        type=non_negative_float,
        default=10,
        help="the time limit in minutes; measurements for which no time is left are skipped (default 10)",
    )
    options = parser.parse_args(argv)
    if options.folder.is_dir() and any(options.folder.iterdir()):
        parser.error(f"{str(options.folder)!r} is not empty: use a new or an empty folder")
    return options
