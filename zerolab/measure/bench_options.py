"""The options of `./launch.sh bench`."""

import argparse

from zerolab.measure.sweeps import SWEEPS
from zerolab.run.shared_options import (
    ENGINE,
    RANKS,
    add_batch,
    add_hardware,
    add_json,
    add_preset,
    add_seq,
    check_seq,
    check_writable,
    make_parser,
    positive_int,
)

DESCRIPTION = f"""\
Measures what options cost: the step times and the peak memory of engines with
different bucket sizes, units, prefetch and recomputation. The values of an option take
turns, one training step each, so that a disturbance of the machine disturbs all of
them. The command prints a table for each option, which compares each value with the
first one. {ENGINE}

{RANKS}"""
EXAMPLES = """\
  ./launch.sh bench 2
  ./launch.sh bench 2 --sweeps prefetch         # zero3 with several values of prefetch"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("bench [N]", DESCRIPTION, EXAMPLES)
    add_preset(parser)
    parser.add_argument(
        "--rounds",
        type=positive_int,
        default=15,
        metavar="STEPS",
        help="the number of steps of each engine that are timed (default 15)",
    )
    add_batch(parser, 4)
    add_seq(parser)
    add_hardware(parser)
    add_json(parser)
    parser.add_argument(
        "--sweeps",
        nargs="?",
        const="",
        default="",
        metavar="TEXT",
        help=f"measure only the options whose name contains TEXT. The names are: {'; '.join(SWEEPS)}",
    )
    parser.add_argument(
        "--host",
        action="store_true",
        help="instead, measure the time that Python needs for a step of a model with many small parameters",
    )
    options = parser.parse_args(argv)
    parser.beside("--host", "--rounds", "--json")
    if not any(options.sweeps in name for name in SWEEPS):
        parser.error(f"no sweep has {options.sweeps!r} in its name. The sweeps are: {'; '.join(SWEEPS)}")
    check_seq(parser, options)
    check_writable("--json", options.json)
    return options
