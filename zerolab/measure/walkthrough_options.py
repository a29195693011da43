"""The options of `./launch.sh zero1`, `zero2` and `zero3`. The first argument is the name of the chapter."""

import argparse
import sys

from zerolab.run.names import CHAPTERS
from zerolab.run.shared_options import (
    RANKS,
    add_hardware,
    add_preset,
    check_writable,
    make_parser,
    non_negative_float,
    non_negative_int,
    positive_int,
)

DESCRIPTION = f"""\
Trains a GPT with {{stage}}, as {{name}}.py implements it, for a few steps. It prints how
the model is divided among the ranks, and then the last step event by event: what the
rank computes, sends and frees, and how much memory is in use.

{RANKS}"""
EXAMPLES = """\
  ./launch.sh {name} 2
  ./launch.sh {name} 4 --preset toy --map"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    name, *words = sys.argv[1:] if argv is None else argv
    if name not in CHAPTERS:
        raise ValueError(f"the first argument must be one of {', '.join(CHAPTERS)}, got {name!r}")
    description = DESCRIPTION.format(name=name, stage=f"ZeRO-{name[-1]}")
    parser = make_parser(f"{name} [N]", description, EXAMPLES.format(name=name))
    add_preset(parser)
    parser.add_argument(
        "--steps", type=positive_int, default=5, help="the number of training steps, 2 or more (default 5)"
    )
    if name == "zero3":
        parser.add_argument(
            "--prefetch",
            type=non_negative_int,
            default=1,
            metavar="UNITS",
            help="the number of next units (transformer blocks) whose parameters are gathered while the current unit "
            "computes (default 1)",
        )
    else:
        parser.add_argument(
            "--bucket-mb",
            type=non_negative_float,
            default=2.0,
            metavar="MIB",
            help="the largest size in MiB of a bucket, which is a group of parameters that are sent together; with 0 "
            "each parameter is its own bucket (default 2.0)",
        )
    parser.add_argument(
        "--map",
        action="store_true",
        help="list all parameters with the ranks that own them, and not only the first six",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="also write a trace of one more step to this file, which chrome://tracing and ui.perfetto.dev can show",
    )
    add_hardware(parser)
    options = parser.parse_args(words)
    options.chapter = name
    if options.steps < 2:  # the first creates the optimizer's state, the last is printed event by event
        parser.error(f"--steps must be 2 or more, got {options.steps}")
    check_writable("--trace", options.trace)
    return options
