"""The options of `./launch.sh plan`, with a one-line error for each that cannot work."""

import argparse
import math
import os
from dataclasses import replace

from extra.planner import parser
from extra.planner.hardware import GPUS, Cluster
from extra.planner.one_rank import ENGINES, Setup
from zerolab.run.engines import ENGINES as REGISTRY
from zerolab.run.model import GPTConfig, preset

SHAPE = ("layers", "width", "heads", "kv_heads", "ffn", "vocab", "seq")
WHOLE = (*SHAPE, "ranks", "ranks_per_node", "micro_batch", "accumulate")  # from 1 on
ABOVE_0 = ("intra_GBps", "inter_GBps", "alpha_us", "bucket_mb", "efficiency")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options, with `config` (the shape), `engines` and `left_out`. Raises ValueError if they cannot work."""
    options = parser.arguments(argv)
    given = {name: value for name, value in vars(options).items() if value is not None}
    for name in given.keys() & {*WHOLE}:
        if not 1 <= given[name] <= 10**6:
            raise ValueError(f"{_flag(name)} must be from 1 to 1,000,000, got {given[name]}")
    for name in given.keys() & {*ABOVE_0}:
        if not (math.isfinite(given[name]) and given[name] > 0):
            raise ValueError(f"{_flag(name)} must be more than 0, got {given[name]:g}")
    if given.get("efficiency", 1) > 1:
        raise ValueError(
            f"--efficiency is a fraction of the GPU's peak, so it must be at most 1, got {options.efficiency:g}"
        )
    if options.prefetch < 0:
        raise ValueError(f"--prefetch must be 0 or more, got {options.prefetch}")
    if own := [name for name in ("alpha_us", "inter_GBps") if options.network and name in given]:
        raise ValueError(f"{_flag(own[0])} {given[own[0]]:g} describes your own network, so "
                         f"leave out --network {options.network}")  # fmt: skip
    asked = [name for name in ("validate", "scale", "sweep") if getattr(options, name)]
    if len(asked) > 1:
        raise ValueError(f"--{asked[0]} and --{asked[1]} cannot be combined: leave out one of them")
    if options.sweep:
        try:
            os.makedirs(options.out, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--out {options.out!r} must be a folder for the figures: {error.strerror}") from error
    options.network = options.network or "infiniband"
    options.engines = list(
        dict.fromkeys(name.strip() for name in (options.engines or ",".join(ENGINES)).split(",") if name.strip())
    )
    for name in options.engines or [""]:
        _one_of("engines", name, ENGINES)
    check_ranks(options.ranks, options.ranks_per_node)
    options.left_out = None  # engines that are not planned, and why
    if options.sweep != "ranks" and not (options.validate or options.scale):
        asked, options.engines = options.engines, different(options.engines, options.ranks, options.ranks_per_node)
        if options.engines != asked:
            options.left_out = "hybrid is left out, because on one node it would be zero3"
        if not options.engines:
            raise ValueError(
                f"--engines hybrid on one node (N = {options.ranks}, --ranks-per-node {options.ranks_per_node}) "
                "would be zero3: use --engines zero3, or more ranks than a node has"
            )
    GPUS[options.gpu].flops(options.dtype)
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
                f"{_flag(shown)} describes your own model: leave out --preset, and pass --layers, --width, "
                "--heads, --vocab and --seq"
            )
        return replace(preset(name), **given)
    if missing := [f"--{name}" for name in ("layers", "width", "heads", "vocab", "seq") if name not in given]:
        raise ValueError(f"your own model also needs {', '.join(missing)}")
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
