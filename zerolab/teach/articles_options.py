"""The options of `./launch.sh articles`."""

import argparse

from zerolab.run.command_line import Parser
from zerolab.run.shared_options import (
    add_json,
    check_writable,
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("articles", description="Measures what five articles claim, and prints which of the claims hold.")
    names = ("multiple_gpus", "sharding_state", "frameworks", "scaling", "wordpress")
    parser.add_argument("--article", choices=names, help="measure only the claims of this article")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="measure only the claims whose name or sentence contains a TEXT",
    )
    add_json(parser)
    options = parser.parse_args(argv)
    check_writable("--json", options.json)
    return options
