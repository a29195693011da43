"""The options of `./launch.sh plan`, as they are typed. plan_options.py checks them together."""

import argparse

from extra.planner.hardware import GPUS, NETWORKS
from zerolab.run.names import PRESETS, engines_of
from zerolab.run.shared_options import ENGINE, add_json, check_engines, check_writable, make_parser, preset

DESCRIPTION = f"""\
Predicts the step time and the memory of engines on GPUs that you do not have, prints a
table, and recommends an engine. Nothing is measured on these GPUs.
{ENGINE}"""
EXAMPLES = """\
  ./launch.sh plan                     # 7B parameters on 64 H100
  ./launch.sh plan 128 --preset 70b --gpu a100 --checkpoint-activations blocks
  ./launch.sh plan --engines zero3 --sweep bandwidth"""


RECOMPUTED = ("none", "blocks", "selective")  # activations
SWEEPS = ("ranks", "bandwidth", "micro-batch", "bucket", "prefetch")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("plan [N]", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add("--preset", type=preset, help=f"the size of the GPT: {', '.join(PRESETS)} (default 7b)")
    add(
        "--layers",
        type=int,
        help="the number of transformer blocks of your own model, instead of --preset; --width, --heads, --vocab and "
        "--seq are then required",
    )
    add("--width", type=int, help="the width of the blocks of your own model")
    add("--heads", type=int, help="the number of attention heads of your own model")
    add("--kv-heads", type=int, help="the number of heads for keys and values (default: the same as --heads)")
    add("--ffn", type=int, metavar="WIDTH", help="the width inside the MLP (default: 4 times --width)")
    add("--vocab", type=int, help="the size of the vocabulary of your own model")
    add("--seq", type=int, metavar="TOKENS", help="tokens per sequence (default: the most that the preset allows)")
    add("--gated", action="store_true", help="your own model has gated MLPs, with three weights instead of two")
    add(
        "--tied",
        action="store_true",
        help="the embedding and the head of your own model share one weight, as in all presets",
    )
    add("--gpu", choices=GPUS, default="h100", help="the type of the GPUs (default h100)")
    add("ranks", metavar="N", nargs="?", type=int, default=64, help="the number of GPUs (default 64)")
    add("--ranks-per-node", type=int, default=8, metavar="GPUS", help="the number of GPUs in a node (default 8)")
    add(
        "--engines",
        metavar="NAME,NAME",
        help=f"predict only these engines (default: {', '.join(engines_of('plan'))})",
    )
    add(
        "--dtype",
        choices=("fp32", "bf16"),
        default="bf16",
        help="the dtype of the computation; gradients and the optimizer's weights are float32 (default bf16)",
    )
    add(
        "--micro-batch",
        type=int,
        default=1,
        metavar="SEQUENCES",
        help="the number of sequences that each rank trains on in one backward (default 1)",
    )
    add("--accumulate", type=int, default=1, metavar="COUNT", help="the number of micro-batches in a step (default 1)")
    add(
        "--checkpoint-activations",
        choices=RECOMPUTED,
        default="none",
        help="the activations that are not kept, but computed again in backward (default none)",
    )
    add(
        "--prefetch",
        type=int,
        default=1,
        metavar="UNITS",
        help="the number of next units (blocks) that zero3 and hybrid gather while the current unit computes "
        "(default 1)",
    )
    add(
        "--bucket-mb",
        type=float,
        metavar="MIB",
        help="the largest size of a bucket of ddp, zero1 and zero2 in MiB (default: the engine's)",
    )
    add(
        "--intra-GBps",
        type=float,
        metavar="GBPS",
        help="the bandwidth of a GPU's links inside a node, in GB/s per direction (default: the GPU's)",
    )
    add("--network", choices=NETWORKS, help="the network between nodes (default infiniband)")
    add(
        "--inter-GBps",
        type=float,
        metavar="GBPS",
        help="instead of --network: the bandwidth that a ring of GPUs across nodes reaches, in GB/s",
    )
    add(
        "--alpha-us",
        type=float,
        metavar="US",
        help="instead of --network: the latency of each hop of a collective across nodes, in microseconds",
    )
    add(
        "--efficiency",
        type=float,
        metavar="FRACTION",
        help="the fraction of the GPU's peak speed that matrix products reach (default: a value for each type of "
        "GPU, see extra/planner/README.md)",
    )
    add(
        "--sweep",
        choices=SWEEPS,
        help="draw the step time against this quantity, and print where two engines are equally fast",
    )
    add("--out", default="plans", metavar="FOLDER", help="the folder for the figures of --sweep (default plans)")
    add("--validate", action="store_true", help="compare predictions of this planner with published measurements")
    add("--scale", action="store_true", help="predict step times of the presets 7b and 70b on 8 to 4,096 GPUs")
    add_json(parser)
    options = parser.parse_args(argv)
    parser.needs("--out", "--sweep")
    check_engines(parser, options)
    check_writable("--json", options.json)
    return options
