"""The options of `./launch.sh articles`."""

import argparse

from zerolab.run.shared_options import add_json, check_writable, make_parser

DESCRIPTION = """\
Tests the claims of five articles about ZeRO and FSDP by measurements, and prints for
each claim whether it holds, does not hold, or holds under a condition."""
EXAMPLES = """\
  ./launch.sh articles
  ./launch.sh articles --only gather memory"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("articles", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="test only the claims whose name or text contains one of these texts",
    )
    add_json(parser)
    options = parser.parse_args(argv)
    check_writable("--json", options.json)
    return options
