"""`./launch.sh plan`: the command. It prints predictions. None of them was measured."""

import time
from dataclasses import asdict, replace

from extra.planner import scale, sweep, validate, words
from extra.planner.hardware import Cluster
from extra.planner.plan_options import arguments, cluster_of, different, setup_of
from extra.planner.predict import Prediction, predict
from zerolab.measure import tables
from zerolab.run import json_file, process_group
from zerolab.run.command_line import one_line
from zerolab.run.progress import with_progress


def plan(options) -> dict:
    """Predict every engine, print the table and the recommendation; returns what --json writes."""
    cluster, found, config = cluster_of(options), [], options.config
    shape = f"{config.layers} blocks of width {config.width}, {config.seq} tokens per sequence"
    where = f"{words.gpus(options.ranks, cluster)}, {options.dtype}"
    print(f"{shape}; {where}. Recording the engines' events:", flush=True)
    for number, engine in enumerate(options.engines, 1):
        print(f"  {number} of {len(options.engines)}: {engine} ... ", end="", flush=True)
        started = time.perf_counter()
        found.append(predict(setup_of(options, engine), cluster))
        print(f"{time.perf_counter() - started:.1f} s", flush=True)
    print("Recording what twice the bandwidth and half the ranks would change", flush=True)
    print(f"\nPredicted for {found[0].parameters / 1e9:.2f}e9 parameters:\n{words.table(found)}")
    lines = [words.recommendation(found, cluster), *_otherwise(options, cluster, words.choose(found))]
    print("\n" + tables.wrapped("\n".join(lines) + "\n\n" + words.assumptions(cluster)))
    return {"predicted": True, "recommendation": lines, "assumptions": asdict(cluster),
            "shape": asdict(config), "engines": [one.numbers() for one in found]}  # fmt: skip


def _otherwise(options, cluster: Cluster, chosen: Prediction | None) -> list[str]:
    """Sentences with the recommendation for twice the bandwidth, and for half the ranks."""
    if options.ranks == 1:
        return []
    if options.ranks > options.ranks_per_node:
        what, twice = "network", replace(cluster, inter_gbps=2 * cluster.between.bus)
    else:
        what, twice = "links", replace(cluster, intra_gbps=2 * (cluster.intra_gbps or cluster.gpu.link_gbps))
    alone = len(options.engines) == 1
    engines = with_progress(options.engines, "twice the bandwidth")
    doubled = words.choose([predict(setup_of(options, engine), twice) for engine in engines])
    sentences = [words.changed(chosen, doubled, f"twice the bandwidth of the {what}", alone)]
    half, per_node = options.ranks // 2, options.ranks_per_node
    # A single engine has no competitor, so it is not recorded twice. And half of the ranks may not be whole nodes.
    if not alone and (half <= per_node or half % per_node == 0):
        fewer = [predict(setup_of(options, engine, ranks=half), cluster)
                 for engine in with_progress(different(options.engines, half, per_node), "half the ranks")]  # fmt: skip
        sentences.append(words.changed(chosen, words.choose(fewer), f"half the ranks ({half})"))
    return sentences


@one_line(ValueError)
def main() -> None:
    options = arguments()
    if options.left_out:
        print(options.left_out, flush=True)
    if options.validate:
        results = validate.run()
    elif options.scale:
        results = scale.run(options)
    elif options.sweep:
        results = sweep.run(options)
    else:
        results = plan(options)
    if options.json:
        json_file.write(options.json, results | {"command": json_file.command("plan")})


if __name__ == "__main__":
    process_group.run(main)
