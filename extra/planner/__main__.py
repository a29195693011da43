"""`./launch.sh plan`: the command. It prints predictions. None of them was measured."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace

from extra.planner.hardware import GB, GPUS, NETWORKS, Cluster
from extra.planner.plan_options import arguments
from extra.planner.predict import Prediction, predict
from extra.planner.setup import Setup
from zerolab.measure import tables
from zerolab.measure.gpus import CONTEXT_BYTES, GAPS
from zerolab.run import engines, json_file, process_group
from zerolab.run.command_line import one_line
from zerolab.run.model import GPTConfig, number_of_parameters, preset
from zerolab.run.progress import with_progress

# The paper's ZeRO-1 is in the same table, so the chapter's title names it.
TITLES = {name: engine.title for name, engine in engines.ENGINES.items()} | {"zero1": "ZeRO-1 (the chapter's, 3Ψ)"}
SAME = 0.02  # step times that differ by less count as equal, because the model is not more accurate


def config_of(options: argparse.Namespace) -> GPTConfig:
    """The preset's shape, with what the options replace. Raises ValueError for heads that do not divide."""
    names = ("layers", "width", "heads", "vocab", "seq", "kv_heads", "ffn")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return replace(preset(options.preset), **given, gated=options.gated, tied=not options.untied)


def plan(options: argparse.Namespace) -> dict:
    """Predict every engine, print the table and the recommendation. Returns what --json writes."""
    config = config_of(options)
    cluster = Cluster(GPUS[options.gpu], options.ranks_per_node, NETWORKS[options.network], options.inter_GBps)
    print(f"{config.layers} blocks of width {config.width}, {number_of_parameters(config) / 1e9:.2f}e9 parameters, "
          f"{config.seq} tokens per sequence; {options.ranks} x {options.gpu}", flush=True)  # fmt: skip
    found = []
    for engine in with_progress(options.engines, "recording the events of a step"):
        setup = Setup(config, engine, options.ranks, options.micro_batch, options.accumulate,
                      options.checkpoint_activations, options.bucket_mb)  # fmt: skip
        found.append(predict(setup, cluster))
    sentence = recommendation(found)
    print("\n".join(table(found)))
    print("\n" + tables.wrapped(sentence + "\n\n" + assumptions(cluster, options.network)))
    return {"predicted": True, "recommendation": sentence, "assumptions": asdict(cluster),
            "shape": asdict(config), "engines": [one.numbers() for one in found]}  # fmt: skip


def table(predictions: Sequence[Prediction]) -> list[str]:
    """A row per engine. A GB has 10^9 bytes."""
    rows = [["engine", "live GB", "needed GB", "fits", "step ms", "exposed", "tokens/s/GPU"]]
    for found in predictions:
        rows.append([
            found.setup.engine, f"{found.peak_bytes / GB:.1f}", f"{found.needed_bytes / GB:.1f}",
            "yes" if found.fits else "no", f"{found.times.step * 1e3:,.0f}", f"{found.exposed:.0%}",
            f"{found.tokens_per_s:,.0f}",
        ])  # fmt: skip
    return tables.text(rows, rule=False)


def recommendation(predictions: Sequence[Prediction]) -> str:
    """Names the fastest engine that fits, and those that are as fast. If none fits, what would help."""
    fitting = [found for found in predictions if found.fits]
    if not fitting:
        least = min(predictions, key=lambda found: found.needed_bytes)
        needs = f"{TITLES[least.setup.engine]} needs the least, {least.needed_bytes / GB:.0f} GB"
        return (
            f"Nothing fits. {needs}. Try more ranks, a smaller micro-batch, shorter sequences or "
            "--checkpoint-activations."
        )
    fastest = min(fitting, key=lambda found: found.times.step)
    limit = fastest.times.step * (1 + SAME)
    equal = [TITLES[found.setup.engine] for found in fitting if found is not fastest and found.times.step <= limit]
    text = f"{TITLES[fastest.setup.engine]} is the fastest that fits."
    if equal:
        text += f" Within {SAME:.0%}, which counts as equal: {', '.join(equal)}."
    return text


def assumptions(cluster: Cluster, network: str) -> str:
    gpu, between = cluster.gpu, cluster.network
    crowding = f", and {between.crowding[0]:.0%} more for a byte with each further node" if between.crowding[0] else ""
    return "\n".join([
        "Predicted, not measured. Assumed:",
        f"  {gpu.name}: matrix products at {gpu.efficiency:.0%} of the peak, flash attention at {gpu.attention:.0%} at "
        f"best, the rest at {cluster.memory_efficiency:.0%} of {gpu.memory_gbps:,.0f} GB/s",
        f"  a collective takes hops x latency + bytes / bandwidth: in a node of {cluster.per_node} "
        f"{cluster.alpha_inside * 1e6:.1f} us and {gpu.gather:.0f} GB/s; across nodes ({network}) "
        f"{between.alpha * 1e6:g} us and {cluster.inter_gbps or between.bus:g} GB/s{crowding}",
        f"  needed: live bytes, {GAPS:.0%} for the allocator's gaps, {CONTEXT_BYTES / GB:.0f} GB for CUDA and NCCL",
        f"  fits: whether the GPU's {gpu.memory_gb:.0f} GB are enough; exposed: the share of the step in which it only "
        "waits for what is sent",
        "  every rank does the same at the same time: no stragglers, no loading of data, no checkpoints, no clipping",
    ])  # fmt: skip


@one_line(ValueError)
def main() -> None:
    options = arguments()
    results = plan(options)
    json_file.write(options.json, results | {"command": json_file.command("plan")})


if __name__ == "__main__":
    process_group.run(main)
