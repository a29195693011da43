"""`./launch.sh plan --sweep`: the prediction along one option, as a figure, and where it turns."""

import argparse
import os
from bisect import bisect_left

from extra.planner.one_rank import BUCKETED, BY_UNIT
from extra.planner.plan_options import cluster_of, setup_of
from extra.planner.predict import Prediction, predict
from extra.planner.words import gpus
from zerolab.run.progress import with_progress

HIDDEN = 0.05  # communication is called hidden when less of the step than this is exposed
NODES = (1, 2, 4, 8, 16, 32, 64)
BANDWIDTHS = tuple(25 * 2**power for power in range(8))  # GB/s
FINE = tuple(25 * 1.01**power for power in range(489))  # the same range in steps of 1%
# option: its values, the field of `Setup`, and what they are.
ALONG = {
    "micro-batch": ((1, 2, 4, 8, 16), "micro_batch", "sequences per rank and backward"),
    "bucket": ((1, 5, 25, 100, 400, 1600), "bucket_mb", "a bucket, MiB"),
    "prefetch": ((0, 1, 2, 3, 4), "prefetch", "units that are gathered ahead"),
}

Points = list[tuple[float, Prediction]]


def bandwidth(options: argparse.Namespace, engine: str, gbps: float) -> Prediction:
    """With `gbps` GB/s in the network of every node, or in one node in the links."""
    name = "inter_gbps" if options.ranks > options.ranks_per_node else "intra_gbps"
    return predict(setup_of(options, engine), cluster_of(options, **{name: gbps}))


def points(options: argparse.Namespace, engine: str) -> Points:
    """(value of the option, prediction) of one engine."""
    if options.sweep == "bandwidth":
        return [(gbps, bandwidth(options, engine, gbps)) for gbps in BANDWIDTHS]
    values, field = [nodes * options.ranks_per_node for nodes in NODES], "ranks"
    if options.sweep != "ranks":
        values, field, _ = ALONG[options.sweep]
    found = []
    for value in with_progress(values, f"{engine}, {field}"):
        found.append((value, predict(setup_of(options, engine, **{field: value}), cluster_of(options))))
    return found


def along(options: argparse.Namespace) -> str:
    """The title of the first column of the printed points, with its unit."""
    network = "the network of a node" if options.ranks > options.ranks_per_node else "a GPU's links inside the node"
    others = {"bandwidth": f"bandwidth of {network}, GB/s per direction", "ranks": "GPUs in all"}
    return others.get(options.sweep) or ALONG[options.sweep][2]


def swept(options: argparse.Namespace) -> list[str]:
    """The engines on which the option has an effect. Raises ValueError if it has no effect on any chosen engine."""
    which = {"bucket": BUCKETED, "prefetch": BY_UNIT}.get(options.sweep, options.engines)
    engines = [name for name in options.engines if name in which]
    if not engines:
        raise ValueError(
            f"--sweep {options.sweep} is for {', '.join(which)}, got --engines {','.join(options.engines)}"
        )
    return engines


def break_even(kind: str, found: Points) -> str:
    """A sentence about where the curve turns."""
    if kind in ("bucket", "prefetch"):
        least = min(one.step for _, one in found)
        value = next(value for value, one in found if one.step <= least * 1.01)
        slowest = max(found, key=lambda point: point[1].step)
        return f"shortest step from {value:g} on; {slowest[0]:g} takes {slowest[1].step / least - 1:.0%} more"
    hidden = [f"{value:g}" for value, one in found if one.exposed < HIDDEN]
    return f"communication is hidden at {', '.join(hidden)}" if hidden else "communication is never hidden"


def enough(options: argparse.Namespace, engine: str) -> str:
    """A sentence with the bandwidth, to 1%, at which less than `HIDDEN` of the step is exposed."""
    place = bisect_left(FINE, True, key=lambda gbps: bandwidth(options, engine, gbps).exposed < HIDDEN)
    return f"hidden from {FINE[place]:.0f} GB/s on" if place < len(FINE) else f"not hidden even at {FINE[-1]:,.0f} GB/s"


def run(options: argparse.Namespace) -> dict:
    """Predict all points, print where the curves turn, draw the figure. Returns what --json writes."""
    from extra.planner import pictures  # only this function needs matplotlib
    from zerolab.measure import figures

    engines, rows, words = swept(options), {}, {}
    where = gpus("N" if options.sweep == "ranks" else options.ranks, cluster_of(options))
    print(f"{along(options)}; {where}:", flush=True)
    for engine in engines:
        found = points(options, engine)
        words[engine] = enough(options, engine) if options.sweep == "bandwidth" else break_even(options.sweep, found)
        rows[engine] = [{"at": value, **one.numbers()} for value, one in found]
        print(f"{engine}: {words[engine]}", flush=True)
        for value, one in found:
            fits = "" if one.fits else "  does not fit"
            print(f"  {value:>6g}  step {one.step * 1e3:,.1f} ms  exposed {one.exposed:.0%}  "
                  f"{one.tokens_per_s:,.0f} tokens/s/GPU{fits}")  # fmt: skip
    shape = f"{options.layers} blocks" if options.layers else options.preset or "7b"
    title = f"{shape}, {where}, {options.dtype}"
    results = {"predicted": True, "sweep": options.sweep, "title": title, "engines": rows, "break_even": words}
    os.makedirs(options.out, exist_ok=True)
    written = os.path.join(options.out, "plan-sweep.png")
    figures.save(pictures.sweep(results), written)
    print(f"predicted, not measured; written: {written}")
    return results
