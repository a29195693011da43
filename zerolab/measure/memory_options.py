"""The options of `./launch.sh memory`."""

import argparse

from zerolab.run.command_line import Parser
from zerolab.run.shared_options import (
    add_accumulate,
    add_batch,
    add_checkpoint_activations,
    add_dtype,
    add_engines,
    add_json,
    add_preset,
    add_seq,
    check_batch,
    check_engines,
    check_seq,
    check_writable,
    positive_int,
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        "memory [N]",
        description="Reports what one rank of N would hold and send. "
        "It is a dry run on fake tensors, so it needs no GPU.",
    )
    parser.add_argument(
        "ranks", metavar="N", nargs="?", type=int, help="the number of ranks, 1 to 1,000,000 (default 8)"
    )
    parser.add_argument(
        "--up-to",
        type=positive_int,
        metavar="N",
        help="instead of N: report only the peaks, for 1, 2, 4, ... up to this number of ranks",
    )
    add_preset(parser, "7b")
    add_engines(parser)
    add_dtype(parser)
    add_seq(parser)
    add_batch(parser, 1)
    add_accumulate(parser)
    add_checkpoint_activations(parser)
    add_json(parser)
    parser.add_argument(
        "--device",
        choices=("fake", "cuda", "xpu"),
        default="fake",
        help="fake allocates nothing; cuda (or xpu) allocates the memory of rank 0 on one GPU",
    )
    options = parser.parse_args(argv)
    check_engines(parser, options)
    check_seq(parser, options)
    check_batch(parser, options)
    if options.up_to and options.ranks:
        parser.error(f"--up-to {options.up_to} chooses the numbers of ranks: leave out the {options.ranks} before it")
    if options.ranks is None:
        options.ranks = 8
    if not 1 <= options.ranks <= 10**6:
        parser.error(f"N must be 1 to 1,000,000 ranks, got {options.ranks}")
    check_writable("--json", options.json)
    return options
