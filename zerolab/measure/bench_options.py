"""The options of `./launch.sh bench`."""

import argparse

from zerolab.measure.sweeps import SWEEPS
from zerolab.run.command_line import Parser
from zerolab.run.names import PRESETS, SHAPE
from zerolab.run.shared_options import (
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
    positive_int,
    vocabulary,
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        "bench [N]",
        description="Measures step times and peaks of engines, or of options, which train one step each in turn.",
    )
    add_preset(parser)
    parser.add_argument("--layers", type=positive_int, help="number of blocks, instead of the preset's")
    parser.add_argument("--width", type=positive_int, help="width of the blocks, instead of the preset's")
    parser.add_argument("--heads", type=positive_int, help="number of attention heads, instead of the preset's")
    parser.add_argument(
        "--vocab", type=vocabulary, help="size of the vocabulary, 256 or more, because the text is bytes"
    )
    add_engines(parser)
    add_engine_file(parser)
    parser.add_argument(
        "--rounds", type=positive_int, default=15, help="how many steps of each engine are timed (default 15)"
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
        metavar="WORDS",
        help="measure what the options cost; with WORDS only some of them, such as --sweeps prefetch",
    )
    instead.add_argument(
        "--host",
        nargs="?",
        const="",
        metavar="ENGINE",
        help="measure Python's own time per step, with many small parameters; "
        "with ENGINE, also print where this time is spent",
    )
    instead.add_argument(
        "--ratios",
        nargs="+",
        type=existing_file,
        metavar="FILE",
        help="print ratios of step times from files that compare --json has written",
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
        parser.error(f"--sweeps {options.sweeps!r} is in none of: {'; '.join(SWEEPS)}")
    if options.host:
        check_engines(parser, argparse.Namespace(engines=options.host))
    check_seq(parser, options)
    options.shape = {name: getattr(options, name) for name in SHAPE if getattr(options, name) is not None}
    shape = PRESETS[options.preset] | options.shape
    if shape["width"] % shape["heads"]:
        parser.error(f"the width must be a multiple of the heads, got width {shape['width']}, heads {shape['heads']}")
    check_writable("--json", options.json)
    return options
