"""The options of `./launch.sh watch`."""

import argparse

from zerolab.run.command_line import Parser
from zerolab.run.names import PRESETS, engines_of
from zerolab.run.shared_options import (
    ENGINE,
    add_engine_file,
    add_engines,
    add_hardware,
    add_json,
    add_preset,
    check_engines,
    check_name,
    make_parser,
    non_negative_float,
    split,
)
from zerolab.teach.museum_options import numbers_of_bugs

MOST_RANKS = 16  # with more ranks the cells are too small to see

DESCRIPTION = f"""\
Records one training step, event by event, with each engine on real ranks (processes
that train together). It writes a page, one HTML file, which plays the steps in a
browser: the memory of each rank, the collectives, and the code that runs.
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
    parser.add_argument(
        "ranks",
        metavar="N",
        nargs="?",
        help="the number of ranks, 2 to 16 (default: one per GPU, or 2 with fewer than two GPUs)",
    )
    add_engines(parser, engines_of("watch"))
    add_engine_file(parser)
    parser.add_argument(
        "--bug",
        metavar="NUMBER",
        help="record this bug of the museum and the correct engine (./launch.sh bug lists the bugs)",
    )
    add_preset(parser)
    add_hardware(parser)
    add_json(parser, "also write the recordings to this file, as JSON, which --from can read")
    parser.add_argument(
        "--batch",
        type=int,
        default=2,
        metavar="SEQUENCES",
        help="the number of sequences that each rank trains on (default 2)",
    )
    parser.add_argument(
        "--seq",
        type=int,
        metavar="TOKENS",
        help="tokens per sequence; with many tokens the activations need nearly all of the memory (default 32)",
    )
    parser.add_argument(
        "--bucket-mb",
        type=non_negative_float,
        metavar="MIB",
        help="the largest size of a bucket in MiB (default: the engine's)",
    )
    parser.add_argument(
        "--tries",
        type=int,
        default=5,
        metavar="STEPS",
        help="the number of steps that are recorded, of which the fastest is kept (default 5)",
    )
    parser.add_argument("--out", metavar="FILE", help="the page to write (default watch-ENGINE.html)")
    parser.add_argument(
        "--from",
        metavar="FILE",
        dest="source",
        help="record nothing, and use the recordings in this file, which is a page or was written by --json",
    )
    parser.add_argument(
        "--gif",
        metavar="FILE",
        help="also write an animation of ENGINE to this file; this needs the browser Chromium and takes minutes",
    )
    parser.add_argument("--dark", action="store_true", help="draw the animation of --gif in dark colours")
    parser.add_argument("--on-ranks", help=argparse.SUPPRESS)  # for the started ranks: the folder for their recordings
    options = parser.parse_args(argv)
    shown = ("--bug", "--from", "--out", "--json", "--gif", "--dark", "--on-ranks")
    parser.beside("--bug", *shown, "--tries")  # its model is always the same
    parser.beside("--from", *shown, "--engines")
    parser.needs("--dark", "--gif")
    if options.ranks is None and options.engine is not None and options.engine.isdecimal():
        options.engine, options.ranks = None, options.engine  # ./launch.sh watch 2
    check_ranges(parser, options)
    if options.bug is None:
        choose_engines(parser, options)
    else:
        check_bug(parser, options)
    return options


def check_ranges(parser: Parser, options: argparse.Namespace) -> None:
    ranks = options.ranks
    if ranks is not None and not (ranks.isdecimal() and 2 <= int(ranks) <= MOST_RANKS):
        parser.error(f"N must be 2 to {MOST_RANKS} ranks, got {ranks!r}")
    longest = PRESETS[options.preset]["seq"]
    options.seq = min(32, longest) if options.seq is None else options.seq
    for name, least, most in (("batch", 1, 4096), ("tries", 1, 1000), ("seq", 1, longest)):
        given = getattr(options, name)
        if not least <= given <= most:
            parser.error(f"--{name} must be {least} to {most} (preset {options.preset}), got {given}")


def choose_engines(parser: Parser, options: argparse.Namespace) -> None:
    """Set the engines that are recorded (`names`), and the one with which the page opens (`opens`)."""
    shipped = engines_of("watch")
    known = check_engines(parser, options, shipped)
    names = known if options.engines is None else split(options.engines)
    if options.engine is None:
        own = known[len(shipped) :]
        default = "zero3" if options.engines is None else names[0]
        options.engine = own[0] if own else default
    check_name(parser, options.engine, known)
    options.names = list(dict.fromkeys([options.engine, *names]))
    options.opens = options.engine


def check_bug(parser: Parser, options: argparse.Namespace) -> None:
    if options.engine is not None:
        parser.error(f"--bug chooses the engine: leave out {options.engine!r}")
    numbers = numbers_of_bugs()
    if not options.bug.isdecimal() or int(options.bug) not in numbers:
        parser.error(f"no bug {options.bug!r}: the numbers are 1 to {max(numbers)}")
    options.bug = int(options.bug)
    options.opens = f"bug{options.bug}"
