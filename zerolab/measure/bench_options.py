"""The options of `./launch.sh bench`."""

import argparse

from zerolab.measure.sweeps import SWEEPS
from zerolab.run.names import PRESETS, SHAPE, engines_of
from zerolab.run.shared_options import (
    ENGINE,
    RANKS,
    add_batch,
    add_engine_file,
    add_engines,
    add_hardware,
    add_json,
    add_preset,
    add_seq,
    check_engines,
    check_seq,
    check_writable,
    existing_file,
    make_parser,
    positive_int,
    vocabulary,
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
    parser.add_argument("--layers", type=positive_int, help="the number of transformer blocks (default: the preset's)")
    parser.add_argument(
        "--width", type=positive_int, help="the width of the blocks, a multiple of --heads (default: the preset's)"
    )
    parser.add_argument("--heads", type=positive_int, help="the number of attention heads (default: the preset's)")
    parser.add_argument(
        "--vocab",
        type=vocabulary,
        help="the size of the vocabulary, 256 or more because each byte is a token (default: the preset's)",
    )
    add_engines(parser, engines_of("bench"))
    add_engine_file(parser)
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
        nargs="?",
        const="",
        metavar="ENGINE",
        help="measure the time that Python needs for a step of a model with many small parameters; with ENGINE, also "
        "print the functions in which this engine spends most of the time",
    )
    instead.add_argument(
        "--ratios",
        nargs="+",
        type=existing_file,
        metavar="FILE",
        help="measure nothing, and print ratios of step times, such as zero1 / ddp, from these files, which compare "
        "--json has written",
    )
    options = parser.parse_args(argv)
    parser.beside("--ratios")
    parser.beside("--host", "--rounds", "--json")
    shape = [f"--{name}" for name in SHAPE]
    parser.beside(
        "--sweeps", "--preset", *shape, "--rounds", "--batch", "--seq", "--backend", "--device", "--json", "--anyway"
    )
    check_engines(parser, options)
    if options.sweeps is not None and not any(options.sweeps in name for name in SWEEPS):
        parser.error(f"no sweep has {options.sweeps!r} in its name. The sweeps are: {'; '.join(SWEEPS)}")
    if options.host:
        check_engines(parser, argparse.Namespace(engines=options.host))
    check_seq(parser, options)
    options.shape = {name: getattr(options, name) for name in SHAPE if getattr(options, name) is not None}
    shape = PRESETS[options.preset] | options.shape
    if shape["width"] % shape["heads"]:
        parser.error(f"--width must be a multiple of --heads, got width {shape['width']}, heads {shape['heads']}")
    check_writable("--json", options.json)
    return options
