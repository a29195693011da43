"""The options of `./launch.sh report`."""

import argparse
import time
from pathlib import Path

from zerolab.run.command_line import Parser
from zerolab.run.shared_options import (
    non_negative_float,
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        "report [FOLDER]",
        description="Runs the main measurements on this machine within a few minutes, and writes one page about them.",
    )
    folder = time.strftime("report-%Y%m%d-%H%M%S")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=folder, help="a new folder for the page (default: report-DATE-TIME)"
    )
    parser.add_argument(
        "--minutes", type=non_negative_float, default=10, help="stop after this number of minutes (default 10)"
    )
    options = parser.parse_args(argv)
    if options.folder.is_dir() and any(options.folder.iterdir()):
        parser.error(f"{str(options.folder)!r} is not empty: name a new or an empty folder")
    return options
