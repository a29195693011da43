"""The options of `./launch.sh conform`."""

import argparse
from pathlib import Path

from zerolab.run.command_line import Parser, did_you_mean
from zerolab.run.names import CHAPTERS, engines_of
from zerolab.run.shared_options import add_json, check_writable


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        "conform [ENGINE|FILE.py ...] [N]",
        description="Tests which behaviours an engine gets right, refuses with an error, or silently gets wrong.",
    )
    parser.add_argument(
        "engines",
        nargs="*",
        metavar="ENGINE|FILE.py",
        help="zero2 tests ZeRO2Engine, zero2.py the chapter, FILE.py your own engine "
        "(default: the chapters, our engines, PyTorch's engines, and DeepSpeed's if it is installed)",
    )
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="run only the tests whose name contains this text (pytest's -k)"
    )
    parser.add_argument("--thorough", action="store_true", help="also test further sizes, options and numbers of ranks")
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
            parser.error(f"no engine {name!r}{near} There are: {', '.join(documented)}")
        if not Path(name).is_file():
            parser.error(f"no such file: {name}")
    check_writable("--json", options.json)
    return options
