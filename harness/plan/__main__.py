"""`./launch.sh plan`: the command. It predicts; nothing that it prints was measured."""

import contextlib
import json
import sys
import time
from dataclasses import asdict

from harness.plan import scale, sweep, validate, words
from harness.plan.options import arguments, check_ranks, cluster_of, different, setup_of
from harness.plan.predict import Prediction, predict
from harness.run import process_group


def as_json(found: Prediction) -> dict:
    """A prediction's numbers. Times in seconds, memory in bytes."""
    return {
        "engine": found.setup.engine,
        "ranks": found.setup.ranks,
        "peak_bytes": found.peak_bytes,
        "reserved_bytes": found.reserved_bytes,
        "needed_bytes": round(found.needed_bytes),
        "fits": found.fits,
        "step_s": found.step,
        "compute_s": found.times.compute,
        "exposed_s": found.times.exposed,
        "collectives_s": found.times.collectives,
        "tokens_per_s_per_gpu": found.tokens_per_s,
        "mfu": found.mfu,
    }


def plan(options) -> dict:
    """Predict every engine, print the table and the recommendation; returns what --json writes."""
    cluster, found = cluster_of(options), []
    config = options.config
    shape = f"{config.layers} blocks of width {config.width}, {config.seq} tokens per sequence"
    print(
        f"{shape}; {words.gpus(options.ranks, cluster)}, {options.precision}. Recording the engines' events:",
        flush=True,
    )
    if options.left_out:
        print(f"  {options.left_out}", flush=True)
    for number, engine in enumerate(options.engines, 1):
        print(f"  {number} of {len(options.engines)}: {engine} ... ", end="", flush=True)
        started = time.perf_counter()
        found.append(predict(setup_of(options, engine), cluster))
        print(f"{time.perf_counter() - started:.1f} s", flush=True)
    print(f"\nPredicted for {found[0].parameters / 1e9:.2f}e9 parameters:\n{words.table(found)}")
    lines = [words.recommendation(found, cluster)]
    if options.ranks > 1:
        chosen, alone = words.choose(found), len(found) == 1
        what, twice = _twice(options)
        doubled = [predict(setup_of(options, engine), twice) for engine in options.engines]
        lines.append(words.changed(chosen, words.choose(doubled), f"twice the bandwidth of the {what}", alone))
        half = options.ranks // 2
        # One engine alone has nobody to lose against, and is not recorded twice.
        with contextlib.suppress(ValueError):  # half of them may be no whole nodes
            check_ranks(half, options.ranks_per_node)
            engines = [] if alone else different(options.engines, half, options.ranks_per_node)
            fewer = [predict(setup_of(options, engine, ranks=half), cluster) for engine in engines]
            if fewer:
                lines.append(words.changed(chosen, words.choose(fewer), f"half the ranks ({half})"))
    print("\n" + "\n".join(lines) + "\n\n" + words.assumptions(cluster))
    return {"predicted": True, "recommendation": lines, "assumptions": asdict(cluster),
            "shape": asdict(config), "engines": [as_json(one) for one in found]}  # fmt: skip


def _twice(options):
    """(which bandwidth, the cluster with twice as much): the network's, or in one node the links'."""
    own = cluster_of(options)
    if options.ranks > options.ranks_per_node:
        return "network", cluster_of(options, inter_gbps=2 * own.between.bus)
    return "links", cluster_of(options, intra_gbps=2 * (own.intra_gbps or own.gpu.link_gbps))


def main() -> None:
    try:
        options = arguments()
        if options.validate:
            results = validate.run()
        elif options.scale:
            results = scale.run(options)
        elif options.sweep:
            results = sweep.run(options)
        else:
            results = plan(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if options.json:
        results["command"] = " ".join(["./launch.sh plan", *sys.argv[1:]])
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")
        print(f"\nwritten: {options.json}")


if __name__ == "__main__":
    process_group.run(main)
