"""The options of `./launch.sh articles`."""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

from zerolab.run.shared_options import add_json, check_writable, make_parser

DESCRIPTION = """\
Tests the claims of five articles about ZeRO and FSDP by measurements, and prints for
each claim whether it holds, does not hold, or holds under a condition."""
EXAMPLES = """\
  ./launch.sh articles
  ./launch.sh articles --article frameworks --only memory"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("articles", DESCRIPTION, EXAMPLES)
    names = ("multiple_gpus", "sharding_state", "frameworks", "scaling", "wordpress")
    parser.add_argument(
        "--article", choices=names, help="test only the claims of this article (default: of all articles)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="test only the claims whose name or text contains one of these texts",
    )
    add_json(parser)
    options = parser.parse_args(argv)
    if not any(matches(options.only, name, text) for name, text in names_and_texts()):
        parser.error(f"--only {' '.join(options.only)!r} matches none of the claims")
    check_writable("--json", options.json)
    return options


def matches(only: list[str], name: str, text: str) -> bool:
    """Whether a claim contains one of the texts of --only."""
    return any(each.lower() in f"{name} {text}".lower() for each in only)


def names_and_texts() -> Iterator[tuple[str, str]]:
    """Names and docstrings of the claims, found in the source, because to import the claims takes seconds."""
    for file in Path(__file__).with_name("articles").glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                yield node.name, " ".join((ast.get_docstring(node) or "").split())
