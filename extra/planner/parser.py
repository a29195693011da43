"""The options of `./launch.sh plan`, as they are typed. plan_options.py checks them together."""

import argparse

from extra.planner.hardware import GPUS
from zerolab.run.command_line import Parser
from zerolab.run.names import PRESETS
from zerolab.run.shared_options import (
    add_json,
    check_engines,
    check_writable,
    preset,
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("plan [N]", description="Predicts how long a training step takes on hardware that you do not have.")
    add = parser.add_argument
    add("--preset", type=preset, help=f"the size of the model: {', '.join(PRESETS)} (default 7b)")
    add("--layers", type=int, help="number of blocks, instead of a preset; needs --width, --heads, --vocab and --seq")
    add("--width", type=int, help="width of the blocks")
    add("--heads", type=int, help="number of attention heads")
    add("--kv-heads", type=int, help="number of heads of keys and values (default: the same as --heads)")
    add("--ffn", type=int, help="width inside the MLP (default: 4 times the width)")
    add("--vocab", type=int, help="size of the vocabulary")
    add("--seq", type=int, help="tokens per sequence (default: the preset's)")
    add("--gated", action="store_true", help="use a gated MLP, which has three weights instead of two")
    add("--tied", action="store_true", help="embedding and head share one weight, as they do in the presets")
    add("--gpu", choices=GPUS, default="h100", help="the type of the GPUs (default h100)")
    add("ranks", metavar="N", nargs="?", type=int, default=64, help="the number of GPUs (default 64)")
    add("--ranks-per-node", type=int, default=8, help="the number of GPUs in a node (default 8)")
    add("--engines", metavar="NAME,NAME", help="predict only these engines; an unknown name prints the list")
    add(
        "--dtype",
        choices=("fp32", "bf16"),
        default="bf16",
        help="the dtype of the computation; gradients and weights are float32 (default bf16)",
    )
    add("--micro-batch", type=int, default=1, help="sequences per rank in each backward (default 1)")
    add("--accumulate", type=int, default=1, help="micro-batches per step (default 1)")
    recomputed = ("none", "blocks", "selective")
    add(
        "--checkpoint-activations",
        choices=recomputed,
        default="none",
        help="which activations are computed again in backward (default none)",
    )
    add("--prefetch", type=int, default=1, help="how many units the engines zero3 and hybrid gather ahead (default 1)")
    add("--bucket-mb", type=float, help="the size of a bucket in MiB for ddp, zero1 and zero2 (default: the engine's)")
    add(
        "--intra-GBps",
        type=float,
        help="bandwidth of a GPU's links inside a node, in GB/s per direction (default: the GPU's)",
    )
    add("--network", choices=("infiniband", "roce", "efa"), help="the network between the nodes (default infiniband)")
    add(
        "--inter-GBps", type=float, help="instead of --network: the bandwidth that a ring across nodes reaches, in GB/s"
    )
    add(
        "--alpha-us",
        type=float,
        help="instead of --network: the latency of a hop in a collective across nodes, in microseconds",
    )
    add(
        "--efficiency",
        type=float,
        help="the fraction of the GPU's peak that matrix products reach (default: the GPU's, see --validate)",
    )
    sweeps = ("ranks", "bandwidth", "micro-batch", "bucket", "prefetch")
    add(
        "--sweep",
        choices=sweeps,
        help="draw how the step time depends on this, and print where two engines are equally fast",
    )
    add("--out", default="plans", help="the folder for the figures of --sweep (default plans)")
    add("--validate", action="store_true", help="compare the planner's predictions with published measurements")
    add("--scale", action="store_true", help="predict 7b and 70b on 8 to 4,096 GPUs")
    add_json(parser)
    options = parser.parse_args(argv)
    parser.needs("--out", "--sweep")
    check_engines(parser, options)
    check_writable("--json", options.json)
    return options
