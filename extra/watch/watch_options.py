"""The options of `./launch.sh watch`."""

import argparse

from zerolab.run.command_line import Parser
from zerolab.run.names import engines_of
from zerolab.run.shared_options import (
    ENGINE,
    add_engines,
    check_engines,
    check_name,
    check_writable,
    make_parser,
    split,
)
from zerolab.teach.museum_options import numbers_of_bugs

MOST_RANKS = 16  # with more ranks the cells are too small to see
PRESETS = ("toy", "tiny", "small")  # larger ones have too many rows for a page

DESCRIPTION = f"""\
Records one training step, event by event, with each engine on real ranks (processes
that train together) on the CPU. It writes a page, one HTML file, which plays the steps
in a browser: the memory of each rank, the collectives, and the code that runs.
{ENGINE}"""
EXAMPLES = """\
  ./launch.sh watch zero3 2
  ./launch.sh watch zero3 4 --engines zero3,ddp --preset small
  ./launch.sh watch --bug 16"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("watch [ENGINE] [N]", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "engine",
        metavar="ENGINE",
        nargs="?",
        help="the engine that the page shows first; an unknown name prints the list of all names (default zero3)",
    )
    parser.add_argument("ranks", metavar="N", nargs="?", help="the number of ranks, 2 to 16 (default 2)")
    add_engines(parser, engines_of("watch"))
    parser.add_argument(
        "--bug",
        metavar="NUMBER",
        help="record this bug of the museum and the correct engine (./launch.sh bug lists the bugs)",
    )
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="the size of the GPT (default tiny)")
    parser.add_argument("--out", metavar="FILE", help="the page to write (default watch-ENGINE.html)")
    parser.add_argument(
        "--from", metavar="PAGE", dest="source", help="record nothing, and use the recordings in this page"
    )
    parser.add_argument(
        "--gif",
        metavar="FILE",
        help="also write an animation of ENGINE to this file; this needs the browser Chromium and takes minutes",
    )
    parser.add_argument("--on-ranks", help=argparse.SUPPRESS)  # for the started ranks: the folder for their recordings
    options = parser.parse_args(argv)
    files = ("--bug", "--from", "--out", "--gif", "--on-ranks")
    parser.beside("--bug", *files)  # its model is always the same
    parser.beside("--from", *files, "--engines")
    if options.ranks is None and options.engine is not None and options.engine.isdecimal():
        options.engine, options.ranks = None, options.engine  # ./launch.sh watch 2
    options.ranks = options.ranks or "2"
    if not (options.ranks.isdecimal() and 2 <= int(options.ranks) <= MOST_RANKS):
        parser.error(f"N must be 2 to {MOST_RANKS} ranks, got {options.ranks!r}")
    options.ranks = int(options.ranks)
    if options.bug is None:
        choose_engines(parser, options)
    else:
        check_bug(parser, options)
    if options.gif is not None and not options.gif.lower().endswith(".gif"):
        parser.error(f"--gif must name a file that ends with .gif, got {options.gif!r}")
    if options.out is None and not (options.source and options.gif):
        options.out = f"watch-{options.opens}.html"
    for name in ("out", "gif"):
        check_writable(f"--{name}", getattr(options, name))
    return options


def choose_engines(parser: Parser, options: argparse.Namespace) -> None:
    """Set the engines that are recorded (`names`), and the one with which the page opens (`opens`)."""
    known = check_engines(parser, options, engines_of("watch"))
    names = known if options.engines is None else split(options.engines)
    options.opens = options.engine or ("zero3" if options.engines is None else names[0])
    check_name(parser, options.opens, known)
    options.names = list(dict.fromkeys([options.opens, *names]))


def check_bug(parser: Parser, options: argparse.Namespace) -> None:
    if options.engine is not None:
        parser.error(f"--bug chooses the engine: leave out {options.engine!r}")
    numbers = numbers_of_bugs()
    if not options.bug.isdecimal() or int(options.bug) not in numbers:
        parser.error(f"no bug {options.bug!r}: the numbers are 1 to {max(numbers)}")
    options.bug = int(options.bug)
    options.opens = f"bug{options.bug}"
