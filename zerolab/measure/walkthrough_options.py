"""The options of `./launch.sh zero1`, `zero2` and `zero3`. The first word is the chapter."""

import argparse
import sys

from zerolab.run.command_line import Parser
from zerolab.run.names import CHAPTERS
from zerolab.run.shared_options import (
    add_accumulate,
    add_batch,
    add_checkpoint_activations,
    add_hardware,
    add_preset,
    add_training,
    check_batch,
    check_writable,
    non_negative_float,
    non_negative_int,
    positive_int,
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    name, *words = sys.argv[1:] if argv is None else argv
    if name not in CHAPTERS:
        raise ValueError(f"the first word must be one of {', '.join(CHAPTERS)}, got {name!r}")
    parser = Parser(
        f"{name} [N]",
        description=f"Trains a GPT with {name}.py for a few steps, and prints the last one event by event.",
    )
    add_preset(parser)
    parser.add_argument("--steps", type=positive_int, default=5, help="number of training steps, 2 or more (default 5)")
    add_batch(parser, 4)
    add_accumulate(parser)
    if name == "zero3":
        parser.add_argument(
            "--prefetch", type=non_negative_int, default=1, help="how many units are gathered ahead (default 1)"
        )
    else:
        parser.add_argument(
            "--bucket-mb",
            type=non_negative_float,
            default=2.0,
            help="the size of a bucket in MiB; 0 makes one bucket per parameter (default 2.0)",
        )
    add_checkpoint_activations(parser)
    add_training(parser)
    parser.add_argument("--map", action="store_true", help="print for every parameter which ranks own it")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write a trace of step 0 and of one more step to this file, for Chrome or Perfetto",
    )
    add_hardware(parser)
    options = parser.parse_args(words)
    options.chapter = name
    if options.steps < 2:  # the first creates the optimizer's state, the last is printed event by event
        parser.error(f"--steps must be 2 or more, got {options.steps}")
    check_batch(parser, options)
    check_writable("--trace", options.trace)
    return options
