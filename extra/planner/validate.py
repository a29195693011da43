"""Compare the planner with published measurements: prediction, published value, error, and what was fitted on what."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import permutations

from extra.planner.events import COMPUTE, Collective
from extra.planner.hardware import BUS, BUS_BYTES, GB, GPUS, NETWORKS, NODES, Cluster, Network
from extra.planner.predict import predict
from extra.planner.published import OUT_OF_MEMORY, ROWS, TORCHTITAN, Row
from extra.planner.repeat import recording
from extra.planner.replay import replay
from zerolab.measure import tables

FITTED_UP_TO = 128  # GPUs
ALPHAS = tuple(microseconds * 1e-6 for microseconds in (4, 8, 12, 16, 20))
CROWDINGS = tuple(percent / 100 for percent in range(16, 48, 4))
OFF, MEMORY_OFF = 0.10, 0.08  # errors beyond these are named
NOISE = 0.03  # published throughputs that differ by less count as equal
TABLE_WEIGHT = 1 / 8  # of a point of NCCL's table, whose runs spread widely; a published row weighs 1

# The fits, and the rows that they use.


def subset(rows: Iterable[Row], gpu: str) -> list[Row]:
    """The rows that the efficiency of `gpu` may be fitted on: only one node, whose network is the links."""
    return [row for row in rows if row.gpu == gpu and row.one_node and not row.long]


def on_network(rows: Iterable[Row], network: str) -> list[Row]:
    """The rows for fitting a network. Rows with more than 128 GPUs are never used.

    For InfiniBand these are rows whose model and batch ran on several numbers of GPUs, including one node, because the
    network causes the loss from one to the next. The Playbook has no such rows, so EFA has all rows of 4 and 16 nodes.
    """
    rows = [row for row in rows if row.network == network and row.gpu == "h100" and row.source != TORCHTITAN]
    rows = [row for row in rows if row.setup.ranks <= FITTED_UP_TO and not row.long]
    if network == "efa":
        return [row for row in rows if not row.one_node]
    return [row for row in rows if sum(_alike(row) == _alike(other) for other in rows) > 1]


def _alike(row: Row):
    return replace(row.setup, ranks=1)


def _late(row: Row, **assumed) -> float:
    """The logarithm of the replayed step over the published one."""
    step = replay(recording(row.setup).events, replace(row.cluster, **assumed)).step
    return math.log(step * row.tokens_per_s / row.setup.tokens)


def _mean(errors: Iterable[float]) -> float:
    """Root mean square: one large error weighs more than two errors of half its size."""
    return statistics.mean(error**2 for error in errors) ** 0.5


def share_of_peak(row: Row) -> float:
    """The efficiency for which the replay takes as long as published, to a thousandth, found by bisection."""
    low, high = 0.2, 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if _late(row, efficiency=middle) > 0 else (low, middle)
    return (low + high) / 2


def fit(rows: Iterable[Row], gpu: str) -> float | None:
    """The share of its peak that `gpu` reaches in matrix products: the median over its one-node rows, or None."""
    found = [share_of_peak(row) for row in subset(rows, gpu)]
    return statistics.median(found) if found else None


def fit_latency(rows: Iterable[Row], name: str, efficiency: float) -> Network:
    """The network with the latency for which similar rows lose as much throughput with more GPUs as published.

    Its bandwidth is fixed at 7/8 of 400 GB/s, because computation hides the bytes, so the rows cannot determine it.
    """
    rows = on_network(rows, name)

    def missed(alpha: float) -> float:
        late = {row: _late(row, alpha=alpha, efficiency=efficiency) for row in rows}
        levels = {_alike(row): statistics.mean(late[one] for one in rows if _alike(one) == _alike(row)) for row in rows}
        return _mean(late[row] - levels[_alike(row)] for row in rows)

    return replace(NETWORKS[name], alpha=min(ALPHAS, key=missed))


def fit_crowding(rows: Iterable[Row], name: str, efficiency: float) -> Network:
    """The network with the crowding under which its rows and NCCL's table are matched best. The latency is fixed.

    Rings and trees have separate values, because all-gathers and all-reduces differ in the table. DDP's rows use trees.
    """
    rows, own = on_network(rows, name), NETWORKS[name]

    def best(reduces: bool) -> float:
        def missed(crowding: float) -> float:
            network = replace(own, crowding=(crowding, crowding))
            late = [_late(row, network=network, efficiency=efficiency) for row in rows
                    if (row.setup.engine == "ddp") == reduces]  # fmt: skip
            return _mean(late + [TABLE_WEIGHT * error for error in table_errors(network, reduces)])

        return min(CROWDINGS, key=missed)

    return replace(own, crowding=(best(False), best(True)))


def table_errors(network: Network, reduces: bool) -> list[float]:
    """Logarithms of predicted over measured times for NCCL's table on `network`, on 2 to 64 nodes."""
    kind, errors = "all-reduce" if reduces else "all-gather", []
    for nodes, bus in list(zip(NODES, BUS[kind]))[1:]:
        collective = Collective(COMPUTE, kind, int(BUS_BYTES), 8 * nodes, 1, "")
        sent = (2 if reduces else 1) * (1 - 1 / collective.ranks) * BUS_BYTES
        seconds = Cluster(GPUS["h100"], network=network).collective_seconds(collective)
        errors.append(math.log(seconds * bus * GB / sent))
    return errors


# Rows and their predictions.


def size_of(row: Row) -> str:
    """The kind of a row. Rows that no fit uses are separate."""
    if row.long:
        return "sequences beyond 4,096"
    if row.one_node:
        return "one node"
    return "16 to 128 GPUs" if row.setup.ranks <= FITTED_UP_TO else "256 and 512 GPUs"


def check(row: Row, efficiency: float) -> dict:
    """A published row and its prediction. An error of +0.1 means that the prediction is 10% too high."""
    setup, found = row.setup, predict(row.setup, replace(row.cluster, efficiency=efficiency))
    peak = found.reserved_bytes if row.reserved else found.peak_bytes  # of the kind that the source prints
    peak += 2 * found.parameters * row.keeps_low
    return {
        "model": row.model,
        "gpu": row.gpu,
        "gpus": setup.ranks,
        "network": row.network,
        "engine": setup.engine,
        "micro_batch": setup.micro_batch,
        "accumulate": setup.accumulate,
        "seq": setup.config.seq,
        "recompute": setup.recompute,
        "source": row.source,
        "size": size_of(row),
        "fitted": row in subset(ROWS, row.gpu) or row in on_network(ROWS, row.network),
        "published_tokens_per_s": row.tokens_per_s,
        "predicted_tokens_per_s": round(found.tokens_per_s, 1),
        "error": round(found.tokens_per_s / row.tokens_per_s - 1, 8),
        "published_peak_bytes": row.peak_bytes,
        "predicted_peak_bytes": peak,
        "memory_error": row.peak_bytes and round(peak / row.peak_bytes - 1, 8),
    }


def order(checks: list[dict]) -> list[tuple[dict, dict]]:
    """The pairs of rows that differ only in the engine, if the first is published as faster by more than the noise."""

    def place(one: dict) -> tuple:
        return tuple(one[key] for key in ("model", "gpu", "gpus", "micro_batch", "accumulate", "seq"))

    return [
        (one, other) for one, other in permutations(checks, 2) if place(one) == place(other)
        and one["published_tokens_per_s"] > other["published_tokens_per_s"] * (1 + NOISE)
    ]  # fmt: skip


def errors_of(checks: list[dict], which: str = "error") -> dict:
    """The number of rows with an error, and the median and largest absolute error."""
    errors = [abs(one[which]) for one in checks if one[which] is not None]
    return {"rows": len(errors), "median": statistics.median(errors), "largest": max(errors)}


def groups(checks: list[dict]) -> list[dict]:
    """The errors of tokens per second by source and size."""
    found: dict[tuple, list[dict]] = {}
    for one in checks:
        found.setdefault((one["source"].split(",")[0], one["size"]), []).append(one)
    return [{"source": source, "size": size, "fitted": sum(one["fitted"] for one in some), **errors_of(some)}
            for (source, size), some in found.items()]  # fmt: skip


def missed(checks: list[dict]) -> list[str]:
    """The names of rows with an unusually large error. There the model is wrong, or the run was unusual."""
    sentences = []
    for one in checks:
        where = "{model}, {gpus} GPUs, {engine}, {micro_batch} x {accumulate}, {seq:,} tokens".format_map(one)
        if abs(one["error"]) > OFF:
            sentences.append(f"{where}: throughput {one['error']:+.1%}")
        if abs(one["memory_error"] or 0) > MEMORY_OFF:
            sentences.append(f"{where}: memory {one['memory_error']:+.1%}")
    return sentences


def summary(checks: list[dict]) -> dict:
    pairs, unfit = order(checks), [predict(row.setup, row.cluster) for row in OUT_OF_MEMORY]
    return {
        "unfitted": errors_of([one for one in checks if not one["fitted"]]),
        "all": errors_of(checks),
        "memory": errors_of(checks, "memory_error"),
        "memory_within": sum(abs(one["memory_error"] or 1) <= MEMORY_OFF for one in checks),
        "pairs": len(pairs),
        "pairs_right": sum(one["predicted_tokens_per_s"] > other["predicted_tokens_per_s"] for one, other in pairs),
        "out_of_memory": len(unfit),
        "out_of_memory_right": sum(not found.fits for found in unfit),
        "groups": groups(checks),
        "missed": missed(checks),
    }


# Sentences and tables, for a terminal and for README.md.


def table(checks: list[dict]) -> list[list[str]]:
    """Published and predicted values, a row per published measurement. A star marks rows used in a fit."""
    cells = "{model} | {gpus} {gpu} | `{engine}` | {micro_batch} x {accumulate}{tokens} | "
    cells += "{published_tokens_per_s:,.0f} | {predicted_tokens_per_s:,.0f} | {error:+.1%}{star} | {memory}"
    rows = ["model | GPUs | engine | batch | published | predicted | error | GB: published / predicted"]
    for one in checks:
        memory, unusual = "", one["source"].startswith("llm") and one["seq"] != 2048
        if one["published_peak_bytes"]:
            published, predicted = (one[f"{whose}_peak_bytes"] / GB for whose in ("published", "predicted"))
            memory = f"{published:.1f} / {predicted:.1f} ({one['memory_error']:+.1%})"
        more = {"star": " *" * one["fitted"], "tokens": f", {one['seq']:,}" * unusual, "memory": memory}
        rows.append(cells.format_map(one | more))
    return [row.split(" | ") for row in rows]


def table_of_groups(found: list[dict]) -> list[list[str]]:
    cells = "{source} | {size} | {rows} | {fitted} | {median:.1%} | {largest:.1%}"
    titles = "source | size | rows | of them fitted | median error | largest"
    return [row.split(" | ") for row in (titles, *map(cells.format_map, found))]


def in_sentences(results: dict) -> list[str]:
    """The errors and what was fitted."""
    found, networks = results["summary"], []
    errors = {of: "median error {median:.1%}, largest {largest:.1%} ({rows} rows)".format_map(found[of])
              for of in ("unfitted", "all", "memory")}  # fmt: skip
    fitted = ", ".join(f"`{gpu}` {share:.1%}" for gpu, share in results["efficiency"].items())
    for name, network in results["networks"].items():
        networks.append(f"`{name}` {network['alpha'] * 1e6:.0f} us per hop")
        if any(network["crowding"]):
            ring, tree = network["crowding"]
            networks.append(f"there each further node makes a byte {ring:.0%} slower in a ring, {tree:.0%} in a tree")
    return [
        f"Tokens per second, rows not used in a fit: {errors['unfitted']}. All rows: {errors['all']}.",
        f"Memory: {errors['memory']}, {found['memory_within']} within {MEMORY_OFF:.0%}.",
        f"The faster of two engines, if only the engine differs and the published values differ by more than "
        f"{NOISE:.0%}: {found['pairs_right']} of {found['pairs']} predicted correctly.",
        f"Runs that did not fit: {found['out_of_memory_right']} of {found['out_of_memory']} predicted correctly.",
        f"Fitted: the share of the peak in matrix products, {fitted}; the networks, {', '.join(networks)}.",
    ]


def run() -> dict:
    """Fit, predict all rows, print them. Returns what --json writes."""
    for number, row in enumerate(ROWS, 1):
        print(f"\rRecording the events of every published row: {number} of {len(ROWS)} ", end="", flush=True)
        recording(row.setup)
    print("\nFitting ...", flush=True)
    shares = {gpu: fit(ROWS, gpu) for gpu in dict.fromkeys(row.gpu for row in ROWS)}
    networks = fit_latency(ROWS, "infiniband", shares["h100"]), fit_crowding(ROWS, "efa", shares["h100"])
    checks = [check(row, shares[row.gpu]) for row in ROWS]
    results = {
        "efficiency": shares,
        "networks": dict(zip(("infiniband", "efa"), map(asdict, networks))),
        "summary": summary(checks),
        "rows": checks,
    }
    print("\nTokens per second and GPU; peak in GB of 10^9 bytes. *: used in a fit")
    print("\n".join([*tables.text(table(checks)), "", *tables.text(table_of_groups(results["summary"]["groups"])), ""]))
    print(f"Errors of more than {OFF:.0%} in throughput or {MEMORY_OFF:.0%} in memory:")
    print("\n".join([f"  {one}" for one in results["summary"]["missed"]] or ["  none"]))
    print("\n".join(in_sentences(results)))
    return results
