"""The options of `./launch.sh conform`."""

import argparse
from pathlib import Path

from zerolab.run.command_line import did_you_mean
from zerolab.run.names import CHAPTERS, engines_of
from zerolab.run.shared_options import ENGINE, add_json, check_writable, make_parser

DESCRIPTION = f"""\
Runs the conformance tests on engines. Each test trains a small model in a way that an
engine may get wrong, such as with tied weights. The command prints a table, which shows
how often each engine was correct, raised a clear error, or gave wrong results.
{ENGINE}"""
EXAMPLES = """\
  ./launch.sh conform                  # the chapters, our engines and PyTorch's
  ./launch.sh conform zero2.py zero2     # a chapter, and the engine that extends it
  ./launch.sh conform zero3 3 --only clip"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("conform [ENGINE|FILE.py ...] [N]", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "engines",
        nargs="*",
        metavar="ENGINE|FILE.py",
        help="the engines to test. For example, zero2 is the class ZeRO2Engine, zero2.py is the chapter, which is the "
        "file of this name, and FILE.py is your own engine (default: the three chapters, our engines, PyTorch's "
        "engines, and DeepSpeed's if it is installed). A number at the end is N, the number of ranks (processes), 1 to "
        "8 (default 2)",
    )
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="run only the tests whose name contains this text, as pytest -k does"
    )
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="also run the slower tests, with more sizes, options and numbers of ranks",
    )
    add_json(parser)
    options = parser.parse_args(argv)
    options.ranks = 2
    if options.engines and options.engines[-1].isdecimal():
        options.ranks = int(options.engines.pop())
    if not 1 <= options.ranks <= 8:
        parser.error(f"N must be 1 to 8 ranks, got {options.ranks}")
    documented = engines_of("conform")  # nothing is known of what other engines promise
    for name in options.engines:
        if name in documented or name.removesuffix(".py") in CHAPTERS:
            continue
        if not name.endswith(".py"):
            near = did_you_mean(name, documented)
            parser.error(f"no engine {name!r}{near} Use one or more of: {', '.join(documented)}")
        if not Path(name).is_file():
            parser.error(f"no such file: {name}")
    check_writable("--json", options.json)
    return options
