"""The options of `./launch.sh bench`."""

import argparse

from zerolab.measure.sweeps import SWEEPS
from zerolab.run.names import engines_of
from zerolab.run.shared_options import (
    ENGINE,
    RANKS,
    add_batch,
    add_engines,
    add_hardware,
    add_json,
    add_preset,
    add_seq,
    check_engines,
    check_seq,
    check_writable,
    make_parser,
    positive_int,
)

DESCRIPTION = f"""\
Measures the step times and the peak memory of several engines. The engines take
turns, one training step each, so that a disturbance of the machine disturbs all of
them. The command prints a table, which also compares each engine with the first one.
{ENGINE}

{RANKS}"""
EXAMPLES = """\
  ./launch.sh bench 2 --engines ddp,zero3,fsdp2
  ./launch.sh bench 2 --sweeps prefetch         # zero3 with several values of prefetch"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("bench [N]", DESCRIPTION, EXAMPLES)
    add_preset(parser)
    add_engines(parser, engines_of("bench"))
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
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--sweeps",
        nargs="?",
        const="",
        metavar="TEXT",
        help="instead of engines, compare several values of an option of an engine. The sweeps are: "
        f"{'; '.join(SWEEPS)}. With TEXT, run only the sweeps whose name contains it",
    )
    instead.add_argument(
        "--host",
        action="store_true",
        help="measure the time that Python needs for a step of a model with many small parameters",
    )
    options = parser.parse_args(argv)
    parser.beside("--host", "--rounds", "--json")
    parser.beside("--sweeps", "--preset", "--rounds", "--batch", "--seq", "--backend", "--device", "--json", "--anyway")
    check_engines(parser, options, engines_of("bench"))
    if options.sweeps is not None and not any(options.sweeps in name for name in SWEEPS):
        parser.error(f"no sweep has {options.sweeps!r} in its name. The sweeps are: {'; '.join(SWEEPS)}")
    check_seq(parser, options)
    check_writable("--json", options.json)
    return options
