"""`./launch.sh plan --sweep`: the prediction along one option, as a figure, and where it turns."""

import argparse
import os

from harness.plan.one_rank import BUCKETED, BY_UNIT
from harness.plan.options import cluster_of, setup_of
from harness.plan.predict import Prediction, predict
from harness.plan.words import gpus

HIDDEN = 0.05  # communication is called hidden when less of the step than this is exposed
NODES = (1, 2, 4, 8, 16, 32, 64)
MICRO_BATCHES = (1, 2, 4, 8, 16)
BUCKETS = (1, 5, 25, 100, 400, 1600)  # MiB
PREFETCH = (0, 1, 2, 3, 4)
BANDWIDTHS = tuple(25 * 2**power for power in range(8))  # GB/s

Points = list[tuple[float, Prediction]]


def points(options: argparse.Namespace, engine: str) -> Points:
    """(value of the option, prediction) of one engine."""
    kind, cluster = options.sweep, cluster_of(options)
    if kind == "bandwidth":
        return [(gbps, predict(setup_of(options, engine), _with_bandwidth(options, gbps))) for gbps in BANDWIDTHS]
    values, field = {
        "ranks": ([nodes * options.ranks_per_node for nodes in NODES], "ranks"),
        "micro-batch": (MICRO_BATCHES, "micro_batch"),
        "bucket": (BUCKETS, "bucket_mb"),
        "prefetch": (PREFETCH, "prefetch"),
    }[kind]
    return [(value, predict(setup_of(options, engine, **{field: value}), cluster)) for value in values]


def _with_bandwidth(options: argparse.Namespace, gbps: float):
    """The network of every node, or in one node the links, with `gbps` GB/s."""
    name = "inter_gbps" if options.ranks > options.ranks_per_node else "intra_gbps"
    return cluster_of(options, **{name: gbps})


def _along(options: argparse.Namespace) -> str:
    """What the first column of the printed points is, with its unit."""
    network = "the network of a node" if options.ranks > options.ranks_per_node else "a GPU's links inside the node"
    return {
        "bandwidth": f"bandwidth of {network}, GB/s per direction",
        "ranks": "GPUs in all",
        "micro-batch": "sequences per rank and backward",
        "bucket": "a bucket, MiB",
        "prefetch": "units that are gathered ahead",
    }[options.sweep]


def swept(options: argparse.Namespace) -> list[str]:
    """The engines on which the option has an effect. Raises ValueError if none of those asked for has it."""
    which = {"bucket": BUCKETED, "prefetch": BY_UNIT}.get(options.sweep, options.engines)
    engines = [name for name in options.engines if name in which]
    if not engines:
        raise ValueError(f"--sweep {options.sweep} is for {', '.join(which)}, got --engine {options.engine}")
    return engines


def break_even(kind: str, found: Points) -> str:
    """Where the curve turns, in words."""
    if kind in ("bucket", "prefetch"):
        least = min(one.step for _, one in found)
        value = next(value for value, one in found if one.step <= least * 1.01)
        unit = " MiB" if kind == "bucket" else ""
        slowest = max(found, key=lambda point: point[1].step)
        gain = slowest[1].step / least - 1
        return f"shortest step from {value:g}{unit} on; {slowest[0]:g}{unit} takes {gain:.0%} more"
    hidden = [value for value, one in found if one.exposed < HIDDEN]
    if kind == "ranks":
        late = [value for value, one in found if one.exposed >= HIDDEN]
        return f"hidden up to {max(hidden):g} ranks" + (
            f", exposed from {min(late):g} on" if late else "") if hidden else "never hidden"  # fmt: skip
    if not hidden:
        value, last = found[-1]
        return f"not hidden even at {value:g}: {last.exposed:.0%} of the step is exposed"
    return f"hidden from {min(hidden):g} on"


def exact_bandwidth(options: argparse.Namespace, engine: str) -> float | None:
    """GB/s at which less than `HIDDEN` of the step is exposed, to 1%; None if no bandwidth of the sweep is enough."""
    setup = setup_of(options, engine)

    def hides(gbps: float) -> bool:
        return predict(setup, _with_bandwidth(options, gbps)).exposed < HIDDEN

    low, high = BANDWIDTHS[0], BANDWIDTHS[-1]
    if not hides(high):
        return None
    while high > low * 1.01 and not hides(low):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if hides(middle) else (middle, high)
    return low if hides(low) else high


def run(options: argparse.Namespace) -> dict:
    """Predict all points, say where the curves turn, draw the figure; returns what --json writes."""
    from harness.measure import pictures_of_plans, style  # matplotlib is needed here alone

    engines, rows, words = swept(options), {}, {}
    if options.left_out:
        print(options.left_out, flush=True)
    where = gpus("N" if options.sweep == "ranks" else options.ranks, cluster_of(options))
    print(f"{_along(options)}; {where}:", flush=True)
    for engine in engines:
        found = points(options, engine)
        words[engine] = break_even(options.sweep, found)
        if options.sweep == "bandwidth" and (gbps := exact_bandwidth(options, engine)) is not None:
            words[engine] = f"hidden from {gbps:.0f} GB/s on"
        rows[engine] = [
            {"at": value, "step_s": one.step, "exposed": one.exposed, "tokens_per_s": one.tokens_per_s,
             "peak_bytes": one.peak_bytes, "fits": one.fits} for value, one in found
        ]  # fmt: skip
        print(f"{engine}: {words[engine]}", flush=True)
        for value, one in found:
            fits = "" if one.fits else "  does not fit"
            print(f"  {value:>6g}  step {one.step * 1e3:,.1f} ms  exposed {one.exposed:.0%}  "
                  f"{one.tokens_per_s:,.0f} tokens/s/GPU{fits}")  # fmt: skip
    shape = f"{options.layers} blocks" if options.layers else options.preset or "7b"
    title = f"{shape}, {where}, {options.precision}"
    results = {"predicted": True, "sweep": options.sweep, "title": title, "engines": rows, "break_even": words}
    os.makedirs(options.out, exist_ok=True)
    written = style.save(pictures_of_plans.sweep, results, os.path.join(options.out, "plan-sweep"))
    print("predicted, not measured; written: " + ", ".join(written))
    return results
