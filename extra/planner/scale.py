"""`./launch.sh plan --scale`: predictions for 8 to 4,096 GPUs on two networks, next to published measurements."""

import argparse
from dataclasses import replace

from extra.planner.one_rank import Setup
from extra.planner.plan_options import cluster_of
from extra.planner.predict import predict
from extra.planner.published import ROWS, Row
from extra.planner.words import gpus
from zerolab.run.model import preset
from zerolab.run.names import engines_of
from zerolab.run.progress import with_progress

RANKS = (8, 32, 128, 512, 2048, 4096)
ENGINES = engines_of("scale")
PRESETS = ("7b", "70b")
COVERED = {
    "infiniband": 512,
    "efa": 128,
}  # GPUs of the largest published row; beyond it there is nothing to compare with
# Models that others ran on several numbers of GPUs with the same micro-batch: (model, engine, sequences).
CURVES = (("MPT 1B", "fsdp2_no_reshard", 12), ("MPT 7B", "fsdp2", 6), ("1.34B", "zero1_2psi", 1),
          ("3.57B", "zero1_2psi", 1))  # fmt: skip


def curve(rows: list[Row]) -> dict:
    """Tokens per second and GPU of one published model: predicted everywhere, and published where it ran.

    The sequences per step stay what they were, as long as each GPU has one micro-batch.
    """
    first, points = rows[0], []
    measured = {row.setup.ranks: row.tokens_per_s for row in rows}
    times = first.setup.accumulate * first.setup.ranks
    for ranks in sorted({*RANKS, *measured}):
        accumulate = max(1, times // ranks) if first.setup.accumulate > 1 else 1
        found = predict(replace(first.setup, ranks=ranks, accumulate=accumulate), first.cluster)
        points.append({"ranks": ranks, "predicted": found.tokens_per_s, "published": measured.get(ranks)})
    rates = ", ".join(f"{one['predicted']:,.0f} on {one['ranks']}" for one in points)
    print(f"{first.model} on {first.network}, tokens/s/GPU: {rates}", flush=True)
    return {"model": first.model, "engine": first.setup.engine, "network": first.network, "points": points}


def run(options: argparse.Namespace) -> dict:
    """Predict all points. Blocks are recomputed, because 70B would not fit otherwise. Returns what --json writes."""
    cluster, points = cluster_of(options), []
    print(f"{gpus('N', cluster)} in nodes of {cluster.per_node}, {options.dtype}; {options.micro_batch} "
          "sequence(s) of 2,048 tokens per rank, blocks recomputed; all predicted:", flush=True)  # fmt: skip
    for name in PRESETS:
        for engine in with_progress(ENGINES, f"planned of {name}"):
            for ranks in RANKS:
                setup = Setup(preset(name), engine, ranks, options.dtype, options.micro_batch, recompute="blocks")
                for network in COVERED:
                    found = predict(setup, replace(cluster, network=network))
                    points.append({"preset": name, "network": network, **found.numbers()})
                    fits = f"{found.peak_bytes / 1e9:.1f} GB live{'' if found.fits else ', does not fit'}"
                    print(f"{name} {engine} {ranks:>5} GPUs, {network}: step {found.step * 1e3:,.0f} ms, exposed "
                          f"{found.exposed:.0%}, {fits}", flush=True)  # fmt: skip
    curves = []
    for model, engine, sequences in CURVES:
        rows = [row for row in ROWS if row.model == model and row.gpu == "h100" and row.setup.engine == engine]
        curves.append(curve([row for row in rows if row.setup.micro_batch == sequences]))
    about = {"gpu": options.gpu, "precision": options.dtype, "micro_batch": options.micro_batch}
    about |= {"memory_gb": cluster.gpu.memory_gb, "covered": COVERED}
    return {"predicted": True, **about, "points": points, "curves": curves}
