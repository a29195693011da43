"""The options of `./launch.sh memory`."""

import argparse

from zerolab.run.names import engines_of
from zerolab.run.shared_options import (
    ENGINE,
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
    make_parser,
    positive_int,
)

DESCRIPTION = f"""\
Prints how many bytes one of N ranks (processes that train together) keeps, needs at
most, and sends in a training step, for each engine. The command needs neither the other
ranks nor a GPU, because it is a dry run: it takes two steps on fake tensors, which
have shapes but no memory. {ENGINE}"""
EXAMPLES = """\
  ./launch.sh memory                   # 7B parameters on 8 ranks; half a minute
  ./launch.sh memory 256 --preset 70b --dtype bf16
  ./launch.sh memory --up-to 1024      # 1, 2, 4, ... 1,024 ranks"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("memory [N]", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "ranks", metavar="N", nargs="?", type=int, help="the number of ranks, 1 to 1,000,000 (default 8)"
    )
    parser.add_argument(
        "--up-to",
        type=positive_int,
        metavar="RANKS",
        help="instead of N: print only the peaks of memory, for 1, 2, 4 and so on up to this number of ranks",
    )
    add_preset(parser, "7b")
    add_engines(parser, engines_of("memory"))
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
        help="fake allocates nothing; cuda (or xpu on Intel's GPUs) runs rank 0 on one GPU, and allocates the memory "
        "of this rank (default fake)",
    )
    options = parser.parse_args(argv)
    check_engines(parser, options, engines_of("memory"))
    check_seq(parser, options)
    check_batch(parser, options)
    if options.up_to and options.ranks:
        parser.error(f"--up-to {options.up_to} chooses the numbers of ranks: leave out N, which is {options.ranks}")
    if options.ranks is None:
        options.ranks = 8
    if not 1 <= options.ranks <= 10**6:
        parser.error(f"N must be 1 to 1,000,000 ranks, got {options.ranks}")
    check_writable("--json", options.json)
    return options
