"""The options of `./launch.sh plan`, with a one-line error for each that cannot work."""

import argparse
import math
import os
from dataclasses import replace

from extra.planner.hardware import GPUS, NETWORKS, Cluster
from extra.planner.one_rank import ENGINES, RECOMPUTED, Setup
from zerolab.run.command_line import Parser
from zerolab.run.commands import check_writable
from zerolab.run.engines import ENGINES as REGISTRY
from zerolab.run.model import PRESETS, GPTConfig, preset

SWEEPS = ("ranks", "bandwidth", "micro-batch", "bucket", "prefetch")
SHAPE = ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "seq")
WHOLE = (*SHAPE, "ranks", "ranks_per_node", "micro_batch", "accumulate")  # from 1 on
ABOVE_0 = ("intra_GBps", "inter_GBps", "alpha_us", "bucket_mb", "efficiency")
CHOICES = {"gpu": GPUS, "network": NETWORKS, "dtype": ("fp32", "bf16"), "checkpoint_activations": RECOMPUTED,
           "sweep": SWEEPS}  # fmt: skip


def parser() -> Parser:
    made = Parser("plan [N]", description="How long a step would take on hardware that is not here.")
    add = made.add_argument
    add("--preset", default=None, help=f"model shape: {', '.join(PRESETS)} (default 7b)")
    for name, words in (
        ("layers", "blocks, instead of a preset; with --width, --heads, --vocab, --seq"),
        ("width", "width of the blocks"),
        ("heads", "heads of attention"),
        ("kv-heads", "heads of keys and values (default: as many)"),
        ("ffn", "width inside the MLP (default: 4 times the width)"),
        ("vocab", "tokens that the model knows"),
        ("seq", "tokens per sequence (default: the preset's)"),
    ):
        add(f"--{name}", type=int, help=words)
    add("--gated", action="store_true", help="a gated MLP: three weights and not two")
    add("--tied", action="store_true", help="embedding and head share one weight (presets do, other shapes do not)")
    add("--gpu", default="h100", help=f"{', '.join(GPUS)} (default h100)")
    add("ranks", metavar="N", nargs="?", type=int, default=64, help="GPUs in all (default 64)")
    add("--ranks-per-node", type=int, default=8, help="GPUs in a node (default 8)")
    add("--engines", default=",".join(ENGINES), help=f"any of {', '.join(ENGINES)} (default all)")
    add("--dtype", default="bf16", help="fp32 or bf16 over float32 gradients and weights (default bf16)")
    add("--micro-batch", type=int, default=1, help="sequences per rank and backward (default 1)")
    add("--accumulate", type=int, default=1, help="micro-batches per step (default 1)")
    add("--checkpoint-activations", default="none", help=f"{', '.join(RECOMPUTED)}: computed again in backward")
    add("--prefetch", type=int, default=1, help="units that zero3 and hybrid gather ahead (default 1)")
    add("--bucket-mb", type=float, help="MiB of a bucket of ddp, zero1 and zero2 (default: their own)")
    add("--intra-GBps", type=float, help="a GPU's links inside a node, GB/s per direction (default: the GPU's)")
    add("--network", help=f"between the nodes: {', '.join(NETWORKS)} (default infiniband)")
    add("--inter-GBps", type=float, help="instead of --network: what a ring across nodes reaches, GB/s")
    add("--alpha-us", type=float, help="instead of --network: microseconds of a hop in a collective across nodes")
    add("--efficiency", type=float, help="share of the peak of matrix products (default: the GPU's, see --validate)")
    add("--sweep", help=f"a figure along one of {', '.join(SWEEPS)}, and its break-even")
    add("--out", default="plans", help="folder for the figures of --sweep (default plans)")
    add("--validate", action="store_true", help="hold the planner against published measurements")
    add("--scale", action="store_true", help="7b and 70b on 8 to 4,096 GPUs")
    add("--json", help="write the results to this file")
    return made


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options, with `config` (the shape), `engines` and `left_out`. Raises ValueError if they cannot work."""
    line = parser()
    options = line.parse_args(argv)
    line.needs("--out", "--sweep")
    given = {name: value for name, value in vars(options).items() if value is not None}
    for name in given.keys() & {*WHOLE}:
        if not 1 <= given[name] <= 10**6:
            raise ValueError(f"{_flag(name)} must be from 1 to 1,000,000, got {given[name]}")
    for name in given.keys() & {*ABOVE_0}:
        if not (math.isfinite(given[name]) and given[name] > 0):
            raise ValueError(f"{_flag(name)} must be more than 0, got {given[name]:g}")
    for name in given.keys() & CHOICES.keys():
        _one_of(name, given[name], CHOICES[name])
    if given.get("efficiency", 1) > 1:
        raise ValueError(f"--efficiency is a share of the GPU's peak, at most 1, got {options.efficiency:g}")
    if options.prefetch < 0:
        raise ValueError(f"--prefetch must be 0 or more, got {options.prefetch}")
    if own := [name for name in ("alpha_us", "inter_GBps") if options.network and name in given]:
        raise ValueError(f"{_flag(own[0])} {given[own[0]]:g} is for a network of your own: leave out --network "
                         f"{options.network}, or give it alone")  # fmt: skip
    asked = [name for name in ("validate", "scale", "sweep") if getattr(options, name)]
    if len(asked) > 1:
        raise ValueError(f"--{asked[0]} and --{asked[1]} are two questions: ask one, and leave out the other")
    if options.sweep:
        try:
            os.makedirs(options.out, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out {options.out!r} must be a folder for the figures: {error.strerror}") from error
    options.network = options.network or "infiniband"
    options.engines = list(dict.fromkeys(name.strip() for name in options.engines.split(",") if name.strip()))
    for name in options.engines or [""]:
        _one_of("engines", name, ENGINES)
    check_ranks(options.ranks, options.ranks_per_node)
    options.left_out = None  # engines that are not planned, and why
    if options.sweep != "ranks" and not (options.validate or options.scale):
        asked, options.engines = options.engines, different(options.engines, options.ranks, options.ranks_per_node)
        if options.engines != asked:
            options.left_out = "hybrid: left out, one node: it would be zero3"
        if not options.engines:
            raise ValueError(
                f"--engines hybrid on one node (N = {options.ranks}, --ranks-per-node {options.ranks_per_node}) "
                "would be zero3: use --engines zero3, or more ranks than a node has"
            )
    GPUS[options.gpu].flops(options.dtype)
    check_writable("--json", options.json)
    options.config = _config(options)
    return options


def different(engines: list[str], ranks: int, per_node: int) -> list[str]:
    """The engines, without `hybrid` if all ranks are in one node, because it would be zero3 there."""
    return [name for name in engines if not REGISTRY[name].rows or ranks > per_node]


def check_ranks(ranks: int, per_node: int) -> None:
    """Raise ValueError if the nodes would have different numbers of ranks."""
    if ranks > per_node and ranks % per_node:
        raise ValueError(
            f"N = {ranks} ranks are not whole nodes of --ranks-per-node {per_node}: "
            f"use {ranks // per_node * per_node} or {-(-ranks // per_node) * per_node} ranks"
        )


def _flag(name: str) -> str:
    return "N" if name == "ranks" else f"--{name.replace('_', '-')}"


def _one_of(name: str, value: str, known) -> None:
    if value not in known:
        raise ValueError(f"{_flag(name)} must be one of {', '.join(known)}, got {value!r}")


def _config(options: argparse.Namespace) -> GPTConfig:
    given = {name: getattr(options, name) for name in SHAPE if getattr(options, name) is not None}
    own = [name for name in given if name != "seq"]
    if options.preset is not None or not own:
        name = options.preset or "7b"
        if own or options.gated or options.tied:
            shown = own[0] if own else "gated" if options.gated else "tied"
            raise ValueError(
                f"{_flag(shown)} belongs to a shape of your own: leave out --preset, and give --layers, --width, "
                "--heads, --vocab and --seq"
            )
        return replace(preset(name), **given)
    if missing := [f"--{name}" for name in ("layers", "width", "heads", "vocab", "seq") if name not in given]:
        raise ValueError(f"a shape of your own needs {', '.join(missing)} as well")
    return GPTConfig(**given, gated=options.gated, tied=options.tied, bias=False)


def setup_of(options: argparse.Namespace, engine: str, **changed) -> Setup:
    """The `Setup` of one engine with these options; `changed` replaces fields of it."""
    row = min(changed.get("ranks", options.ranks), options.ranks_per_node) if REGISTRY[engine].rows else None
    made = Setup(
        options.config, engine, options.ranks, options.dtype, options.micro_batch, options.accumulate,
        recompute=options.checkpoint_activations, prefetch=options.prefetch, bucket_mb=options.bucket_mb, row=row,
    )  # fmt: skip
    return replace(made, **changed)


def cluster_of(options: argparse.Namespace, **changed) -> Cluster:
    """The `Cluster` of these options; `changed` replaces fields of it."""
    made = Cluster(GPUS[options.gpu], options.ranks_per_node, options.intra_GBps, options.inter_GBps,
                   options.efficiency, options.network,
                   None if options.alpha_us is None else options.alpha_us * 1e-6)  # fmt: skip
    return replace(made, **changed)
