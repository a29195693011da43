"""The options of `./launch.sh plan`."""

import argparse

from extra.planner.hardware import GPUS, NETWORKS
from zerolab.run.names import engines_of
from zerolab.run.shared_options import (
    ENGINE,
    add_checkpoint_activations,
    add_engines,
    add_json,
    add_preset,
    add_seq,
    check_engines,
    check_writable,
    make_parser,
    non_negative_float,
    positive_int,
    split,
)

DESCRIPTION = f"""\
Predicts the step time and the memory of engines on GPUs that you do not have, prints a
table, and recommends an engine. Nothing is measured on these GPUs. Computation and
gathered parameters are in bfloat16. {ENGINE}"""
EXAMPLES = """\
  ./launch.sh plan                     # 7B parameters on 64 H100; half a minute
  ./launch.sh plan 128 --preset 70b --gpu a100 --checkpoint-activations
  ./launch.sh plan 8 --layers 16 --width 2048 --heads 32 --kv-heads 8 --ffn 8192 --gated"""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("plan [N]", DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "ranks", metavar="N", nargs="?", type=positive_int, default=64, help="the number of GPUs (default 64)"
    )
    add_preset(parser, "7b")
    for name in ("layers", "width", "heads", "vocab"):
        parser.add_argument(f"--{name}", type=positive_int, help=f"the model's {name} (default: the preset's)")
    parser.add_argument(
        "--kv-heads", type=positive_int, help="the number of heads for keys and values (default: the same as --heads)"
    )
    parser.add_argument(
        "--ffn", type=positive_int, metavar="WIDTH", help="the width inside the MLP (default: 4 times --width)"
    )
    parser.add_argument("--gated", action="store_true", help="the MLPs have three weights instead of two, as in Llama")
    parser.add_argument("--untied", action="store_true", help="the embedding and the head do not share their weight")
    add_seq(parser)
    parser.add_argument("--gpu", choices=GPUS, default="h100", help="the type of the GPUs (default h100)")
    parser.add_argument(
        "--ranks-per-node",
        type=positive_int,
        default=8,
        metavar="GPUS",
        help="the number of GPUs in a node (default 8)",
    )
    parser.add_argument(
        "--network", choices=NETWORKS, default="infiniband", help="the network between nodes (default infiniband)"
    )
    parser.add_argument(
        "--inter-GBps",
        type=non_negative_float,
        metavar="GBPS",
        help="the bandwidth that a ring of GPUs across nodes reaches, in GB/s (default: the network's, 350)",
    )
    add_engines(parser, engines_of("plan"))
    parser.add_argument(
        "--micro-batch",
        type=positive_int,
        default=1,
        metavar="SEQUENCES",
        help="the number of sequences that each rank trains on in one backward (default 1)",
    )
    parser.add_argument(
        "--accumulate", type=positive_int, default=1, metavar="COUNT", help="the number of micro-batches (default 1)"
    )
    add_checkpoint_activations(parser)
    parser.add_argument(
        "--bucket-mb",
        type=non_negative_float,
        metavar="MIB",
        help="the largest size of a bucket of ddp, zero1 and zero2 in MiB (default: the engine's)",
    )
    add_json(parser)
    options = parser.parse_args(argv)
    if options.ranks > 10**6:
        parser.error(f"N must be at most 1,000,000 ranks, got {options.ranks}")
    per_node = options.ranks_per_node
    if options.ranks > per_node and options.ranks % per_node:
        parser.error(f"N must be a multiple of --ranks-per-node {per_node}, or less than it, got {options.ranks}")
    if options.inter_GBps == 0:
        parser.error("--inter-GBps must be more than 0")
    check_engines(parser, options, engines_of("plan"))
    options.engines = list(engines_of("plan")) if options.engines is None else split(options.engines)
    check_writable("--json", options.json)
    return options
