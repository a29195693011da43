"""`./launch.sh plan --scale`: the presets 7b and 70b on 8 to 4,096 GPUs, on paper."""

import argparse
import time

from harness.plan.one_rank import Setup
from harness.plan.options import cluster_of
from harness.plan.predict import predict
from harness.plan.words import gpus
from harness.run.model import preset

RANKS = (8, 32, 128, 512, 2048, 4096)
ENGINES = ("zero1_2psi", "zero2", "zero3")
PRESETS = ("7b", "70b")


def run(options: argparse.Namespace) -> dict:
    """Predict all points; blocks are recomputed, as 70B would not fit otherwise. Returns what --json writes."""
    cluster, points = cluster_of(options), []
    print(f"{gpus('N', cluster)} in nodes of {cluster.per_node}, {options.precision}; {options.micro_batch} "
          "sequence(s) of 2,048 tokens per rank, blocks recomputed; all predicted:", flush=True)  # fmt: skip
    for name in PRESETS:
        for engine in ENGINES:
            for ranks in RANKS:
                started = time.perf_counter()
                setup = Setup(preset(name), engine, ranks, options.precision, options.micro_batch, recompute="blocks")
                found = predict(setup, cluster)
                points.append({
                    "preset": name, "engine": engine, "ranks": ranks, "step_s": found.step, "exposed": found.exposed,
                    "peak_bytes": found.peak_bytes, "fits": found.fits, "tokens_per_s": found.tokens_per_s,
                })  # fmt: skip
                took = time.perf_counter() - started
                fits = f"{found.peak_bytes / 1e9:.1f} GB live{'' if found.fits else ', does not fit'}"
                print(f"{name} {engine} {ranks:>5} GPUs: step {found.step * 1e3:,.0f} ms, exposed {found.exposed:.0%}, "
                      f"{fits}  (predicted in {took:.1f} s)", flush=True)  # fmt: skip
    about = {"gpu": options.gpu, "precision": options.precision, "micro_batch": options.micro_batch}
    return {"predicted": True, **about, "memory_gb": cluster.gpu.memory_gb, "points": points}
