"""The options of `./launch.sh docs`."""

import argparse

from zerolab.run.shared_options import make_parser

DESCRIPTION = """\
Writes the tables and numbers of README.md and docs/ that are generated from the files
in results/, and draws the figures."""
EXAMPLES = """\
  ./launch.sh docs
  ./launch.sh docs --check"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("docs", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing, and list the pages whose generated parts are out of date, and the results that were "
        "measured with older code",
    )
    return parser.parse_args(argv)
