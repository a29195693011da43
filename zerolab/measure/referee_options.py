"""The options of `./launch.sh compare`."""

import argparse
from pathlib import Path

from zerolab.run.command_line import Parser
from zerolab.run.shared_options import (
    add_accumulate,
    add_batch,
    add_checkpoint_activations,
    add_dtype,
    add_engine_file,
    add_engines,
    add_hardware,
    add_json,
    add_preset,
    add_seq,
    add_steps,
    add_training,
    check_batch,
    check_engines,
    check_folder,
    check_seq,
    check_writable,
    non_negative_int,
    rank_and_seconds,
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        "compare [N]",
        description="Trains one GPT on N ranks under DDP, the three ZeRO stages and FSDP2, and compares losses, "
        "memory, traffic and time.",
    )
    add_preset(parser)
    add_engines(parser)
    add_engine_file(parser)
    add_steps(parser, 40)
    parser.add_argument(
        "--timed-steps",
        type=non_negative_int,
        default=12,
        help="how many steps of each engine are timed; 0 times none (default 12)",
    )
    add_dtype(parser)
    add_seq(parser)
    add_batch(parser, 4)
    add_accumulate(parser)
    add_checkpoint_activations(parser)
    add_training(parser)
    parser.add_argument(
        "--slow-rank",
        type=rank_and_seconds,
        metavar="RANK:SECONDS",
        help="delay a rank in every timed step; 1:0.05 delays rank 1 by 0.05 seconds",
    )
    add_hardware(parser)
    add_json(parser)
    parser.add_argument(
        "--breakdown",
        action="store_true",
        help="also print how long each rank computes, waits and communicates in a step",
    )
    parser.add_argument(
        "--quick", action="store_true", help="train a toy model for a few steps, which takes less than a minute"
    )
    options = parser.parse_args(argv)
    if options.quick:  # other defaults; what was typed still counts
        parser.set_defaults(preset="toy", steps=5, timed_steps=5)
        options = parser.parse_args(argv)
    check_engines(parser, options)
    check_seq(parser, options)
    check_batch(parser, options)
    for name in ("slow_rank", "breakdown"):
        if getattr(options, name) and not options.timed_steps:
            option = f"--{name.replace('_', '-')}"
            parser.error(f"{option} needs timed steps, and --timed-steps 0 leaves none: leave out one of them")
    check_writable("--json", options.json)
    if options.json is None:
        check_folder(Path("runs"), "--json FILE")
    return options
