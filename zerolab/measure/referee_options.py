"""The options of `./launch.sh compare`."""

import argparse

from zerolab.run.names import engines_of
from zerolab.run.shared_options import (
    ENGINE,
    RANKS,
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
    check_batch,
    check_engines,
    check_seq,
    check_writable,
    machines,
    make_parser,
    non_negative_int,
    rank_and_seconds,
)

DESCRIPTION = f"""\
Trains the same GPT on the same data with PyTorch's DDP and FSDP2, with the three
ZeRO stages, and with other engines, one after the other. The command prints whether
the losses match, and a table of losses, memory, traffic and step times.
{ENGINE}

{RANKS}"""
EXAMPLES = """\
  ./launch.sh compare                  # eight engines; two minutes on two CPU cores
  ./launch.sh compare --quick          # a toy model; less than a minute
  ./launch.sh compare 4 --engines ddp,zero3,fsdp2 --dtype bf16"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("compare [N]", DESCRIPTION, EXAMPLES)
    add_preset(parser)
    add_engines(parser, engines_of("compare"))
    add_engine_file(parser)
    add_steps(parser, 40)
    parser.add_argument(
        "--timed-steps",
        type=non_negative_int,
        default=12,
        metavar="STEPS",
        help="the number of steps of each engine that are timed, after the training; 0 turns this off (default 12)",
    )
    add_dtype(parser)
    add_seq(parser)
    add_batch(parser, 4)
    add_accumulate(parser)
    add_checkpoint_activations(parser)
    parser.add_argument(
        "--slow-rank",
        type=rank_and_seconds,
        metavar="RANK:SECONDS",
        help="delay one rank at the start of every timed step; for example 1:0.05 delays rank 1 by 0.05 seconds",
    )
    add_hardware(parser)
    add_json(parser)
    parser.add_argument(
        "--breakdown",
        action="store_true",
        help="also print how long each rank computes, waits for other ranks, and communicates in a step",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="change the defaults to --preset toy --steps 5 --timed-steps 5, which takes less than a minute",
    )
    options = parser.parse_args(argv)
    if options.quick:  # other defaults; what was typed still counts
        parser.set_defaults(preset="toy", steps=5, timed_steps=5)
        options = parser.parse_args(argv)
    check_engines(parser, options)
    check_seq(parser, options)
    check_batch(parser, options)
    for name in ("slow_rank", "breakdown"):
        option = f"--{name.replace('_', '-')}"
        if getattr(options, name) and not options.timed_steps:
            parser.error(
                f"{option} needs timed steps, but --timed-steps 0 leaves none: leave out one of the two options"
            )
        if getattr(options, name) and machines() > 1:
            parser.error(f"{option} compares the clocks of the ranks, so it works on one machine only: unset NNODES")
    check_writable("--json", options.json)
    return options
