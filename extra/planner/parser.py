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
    parser = Parser("plan [N]", description="How long a step would take on hardware that is not here.")
    add = parser.add_argument
    add("--preset", type=preset, help=f"model shape: {', '.join(PRESETS)} (default 7b)")
    add("--layers", type=int, help="blocks, instead of a preset; with --width, --heads, --vocab, --seq")
    add("--width", type=int, help="width of the blocks")
    add("--heads", type=int, help="heads of attention")
    add("--kv-heads", type=int, help="heads of keys and values (default: as many)")
    add("--ffn", type=int, help="width inside the MLP (default: 4 times the width)")
    add("--vocab", type=int, help="tokens that the model knows")
    add("--seq", type=int, help="tokens per sequence (default: the preset's)")
    add("--gated", action="store_true", help="a gated MLP: three weights and not two")
    add("--tied", action="store_true", help="embedding and head share one weight (presets do, other shapes do not)")
    add("--gpu", choices=GPUS, default="h100", help="(default h100)")
    add("ranks", metavar="N", nargs="?", type=int, default=64, help="GPUs in all (default 64)")
    add("--ranks-per-node", type=int, default=8, help="GPUs in a node (default 8)")
    add("--engines", metavar="NAME,NAME", help="plan only these (an unknown name prints the list)")
    add("--dtype", choices=("fp32", "bf16"), default="bf16", help="over float32 gradients and weights (default bf16)")
    add("--micro-batch", type=int, default=1, help="sequences per rank and backward (default 1)")
    add("--accumulate", type=int, default=1, help="micro-batches per step (default 1)")
    recomputed = ("none", "blocks", "selective")
    add("--checkpoint-activations", choices=recomputed, default="none", help="computed again in backward")
    add("--prefetch", type=int, default=1, help="units that zero3 and hybrid gather ahead (default 1)")
    add("--bucket-mb", type=float, help="MiB of a bucket of ddp, zero1 and zero2 (default: their own)")
    add("--intra-GBps", type=float, help="a GPU's links inside a node, GB/s per direction (default: the GPU's)")
    add("--network", choices=("infiniband", "roce", "efa"), help="between the nodes (default infiniband)")
    add("--inter-GBps", type=float, help="instead of --network: what a ring across nodes reaches, GB/s")
    add("--alpha-us", type=float, help="instead of --network: microseconds of a hop in a collective across nodes")
    add("--efficiency", type=float, help="share of the peak of matrix products (default: the GPU's, see --validate)")
    sweeps = ("ranks", "bandwidth", "micro-batch", "bucket", "prefetch")
    add("--sweep", choices=sweeps, help="a figure along this, and its break-even")
    add("--out", default="plans", help="folder for the figures of --sweep (default plans)")
    add("--validate", action="store_true", help="hold the planner against published measurements")
    add("--scale", action="store_true", help="7b and 70b on 8 to 4,096 GPUs")
    add_json(parser)
    options = parser.parse_args(argv)
    parser.needs("--out", "--sweep")
    check_engines(parser, options)
    check_writable("--json", options.json)
    return options
