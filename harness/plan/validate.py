"""The planner held against published measurements: prediction, published value, error; what was fitted, and on what."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from harness.measure import tables
from harness.plan.events import COMPUTE, Collective
from harness.plan.hardware import BUS, BUS_BYTES, GB, GPUS, NETWORKS, NODES, Cluster, Network
from harness.plan.predict import Prediction, predict
from harness.plan.published import OUT_OF_MEMORY, ROWS, TORCHTITAN, Row
from harness.plan.repeat import recording
from harness.plan.replay import replay

FITTED_UP_TO = 128  # GPUs
ALPHAS = tuple(microseconds * 1e-6 for microseconds in (4, 8, 12, 16, 20))
CROWDINGS = tuple(percent / 100 for percent in range(16, 48, 4))
OFF, MEMORY_OFF = 0.10, 0.08  # errors beyond these are named
TABLE_WEIGHT = 1 / 8  # the table's runs spread widely


@dataclass(frozen=True)
class Check:
    """A published row, what is predicted for it, and whether its throughput was used in the fit."""

    row: Row
    prediction: Prediction
    fitted: bool

    @property
    def error(self) -> float:
        """Of tokens per second: +0.1 is a prediction of 10% too many."""
        return self.prediction.tokens_per_s / self.row.tokens_per_s - 1

    @property
    def memory_error(self) -> float | None:
        return self.row.peak_bytes and self.peak_bytes / self.row.peak_bytes - 1

    @property
    def peak_bytes(self) -> int:
        """Of the kind that the source prints."""
        return self.prediction.reserved_bytes if self.row.reserved else self.prediction.peak_bytes


def subset(rows: Iterable[Row], gpu: str) -> list[Row]:
    """The rows that the efficiency of `gpu` may be fitted on: those of one node, whose network is the links alone."""
    return [row for row in rows if row.gpu == gpu and row.one_node and not row.long]


def on_network(rows: Iterable[Row], network: str) -> list[Row]:
    """The rows that a network may be fitted on. None above 128 GPUs is ever looked at.

    For InfiniBand those of which the same model and batch ran on several numbers of GPUs, one node counting too: what
    it loses from one to the next is the network's. The Playbook has no such rows, so for EFA all of 4 and 16 nodes.
    """
    rows = [row for row in rows if row.network == network and row.gpu == "h100" and row.source != TORCHTITAN]
    rows = [row for row in rows if row.setup.ranks <= FITTED_UP_TO and not row.long]
    if network == "efa":
        return [row for row in rows if not row.one_node]
    return [row for row in rows if sum(_alike(row) == _alike(other) for other in rows) > 1]


def _alike(row: Row):
    return replace(row.setup, ranks=1)


def wanted(row: Row) -> float:
    """Seconds of a step with the published tokens per second."""
    setup = row.setup
    return setup.micro_batch * setup.accumulate * (setup.seq or setup.config.seq) / row.tokens_per_s


def share_of_peak(row: Row) -> float:
    """The efficiency with which the replay takes as long as published.

    A step is nearly a constant and a part that grows as 1 / efficiency: from two guesses the line tells the third.
    """
    events, cluster = recording(row.setup).events, row.cluster
    guesses = [0.6, 0.5]
    steps = [replay(events, replace(cluster, efficiency=guess)).step for guess in guesses]
    for _ in range(3):
        (one, other), (late, later) = (1 / guesses[-2], 1 / guesses[-1]), steps[-2:]
        if abs(later - late) < 1e-6 * later:
            break
        guesses.append(1 / max(1.0, other + (wanted(row) - later) * (other - one) / (later - late)))
        steps.append(replay(events, replace(cluster, efficiency=guesses[-1])).step)
    return guesses[-1]


def fit(rows: Iterable[Row], gpu: str) -> float | None:
    """The share of its peak that `gpu` reaches in matrix products: the median over its one-node rows; or None."""
    found = [share_of_peak(row) for row in subset(rows, gpu)]
    return statistics.median(found) if found else None


def _error(row: Row, **assumed) -> float:
    """The logarithm of the replayed step over the published one."""
    return math.log(replay(recording(row.setup).events, replace(row.cluster, **assumed)).step / wanted(row))


def _mean(errors) -> float:
    """Root of the mean of the squares: one large error weighs more than two of half its size."""
    return statistics.mean(error**2 for error in errors) ** 0.5


def fit_latency(rows: Iterable[Row], name: str, efficiency: float) -> Network:
    """The network with the latency under which rows that are alike lose as much from more GPUs as published.

    Its bandwidth is held, 7/8 of 400 GB/s: what is sent hides behind the computation, and does not tell.
    """
    rows = on_network(rows, name)

    def missed(alpha: float) -> float:
        errors = {row: _error(row, alpha=alpha, efficiency=efficiency) for row in rows}
        middles = {_alike(row): statistics.mean(errors[one] for one in rows if _alike(one) == _alike(row))
                   for row in rows}  # fmt: skip
        return _mean([errors[row] - middles[_alike(row)] for row in rows])

    return replace(NETWORKS[name], alpha=min(ALPHAS, key=missed))


def fit_crowding(rows: Iterable[Row], name: str, efficiency: float) -> Network:
    """The network with the latency and the crowding under which its rows and NCCL's table are met best.

    Rings and trees crowd apart, as all-gathers and all-reduces differ in the table; DDP's rows tell of trees.
    """
    rows = on_network(rows, name)

    def missed(network: Network, reduces: bool) -> float:
        errors = [_error(row, network=network, efficiency=efficiency) for row in rows
                  if (row.setup.engine == "ddp") == reduces]  # fmt: skip
        return _mean(errors + [TABLE_WEIGHT * error for error in table_errors(network, reduces)])

    own = NETWORKS[name]
    return replace(own, crowding=tuple(
        min(CROWDINGS, key=lambda one: missed(replace(own, crowding=(one, one)), reduces)) for reduces in (False, True)
    ))  # fmt: skip


def table_errors(network: Network, reduces: bool) -> list[float]:
    """Logarithms of what NCCL's table should take on `network`, over what it took, on 2 to 64 nodes."""
    kind, errors = "all-reduce" if reduces else "all-gather", []
    for nodes, bus in list(zip(NODES, BUS[kind]))[1:]:
        collective = Collective(COMPUTE, kind, int(BUS_BYTES), 8 * nodes, 1, "")
        sent = (2 if reduces else 1) * (1 - 1 / collective.ranks) * BUS_BYTES
        seconds = Cluster(GPUS["h100"], network=network).collective_seconds(collective)
        errors.append(math.log(seconds * bus * GB / sent))
    return errors


def check_all(rows: Iterable[Row] = ROWS, efficiencies: dict[str, float] | None = None) -> list[Check]:
    """Every row, predicted with the efficiencies given (default: those that are in the table of GPUs)."""
    checks, rows = [], list(rows)
    for row in rows:
        share = (efficiencies or {}).get(row.gpu, GPUS[row.gpu].efficiency)
        fitted = row in subset(rows, row.gpu) or row in on_network(rows, row.network)
        checks.append(Check(row, predict(row.setup, replace(row.cluster, efficiency=share)), fitted))
    return checks


NOISE = 0.03  # published throughputs that differ by less are not said to differ


def order(checks: list[Check]) -> list[tuple[Check, Check]]:
    """The pairs of engines, with all else equal, of which one is published as faster by more than the noise."""
    pairs = []
    for one in checks:
        for other in checks:
            a, b = one.row.setup, other.row.setup
            same = one.row.model == other.row.model and one.row.gpu == other.row.gpu and a.ranks == b.ranks
            same = same and (a.micro_batch, a.accumulate) == (b.micro_batch, b.accumulate) and a.engine != b.engine
            if same and one.row.tokens_per_s > other.row.tokens_per_s * (1 + NOISE):
                pairs.append((one, other))
    return pairs


def size_of(row: Row) -> str:
    """Rows of one kind: what nothing is fitted on stands apart."""
    if row.long:
        return "sequences beyond 4,096"
    if row.one_node:
        return "one node"
    return "16 to 128 GPUs" if row.setup.ranks <= FITTED_UP_TO else "256 and 512 GPUs"


def groups(checks: list[Check]) -> list[dict]:
    """The errors of tokens per second by source and size, without signs."""
    found: dict[tuple, list[Check]] = {}
    for check in checks:
        found.setdefault((check.row.source.split(",")[0], size_of(check.row)), []).append(check)
    return [
        {"source": source, "size": size, "rows": len(some), "fitted": sum(check.fitted for check in some),
         "median": statistics.median(abs(check.error) for check in some),
         "largest": max(abs(check.error) for check in some)} for (source, size), some in found.items()
    ]  # fmt: skip


def missed(checks: list[Check]) -> list[str]:
    """The rows that are off by more than is hoped for, named: the model is wrong there, or the run was odd."""
    said = []
    for check in checks:
        row, setup = check.row, check.row.setup
        where = f"{row.model}, {setup.ranks} GPUs, {setup.engine}, {setup.micro_batch} x {setup.accumulate}"
        if abs(check.error) > OFF:
            said.append(f"{where}, {setup.config.seq:,} tokens: throughput {check.error:+.1%}")
        if row.peak_bytes and abs(check.memory_error) > MEMORY_OFF:
            said.append(f"{where}: memory {check.memory_error:+.1%}")
    return said


def as_json(check: Check) -> dict:
    setup, row = check.row.setup, check.row
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
        "fitted": check.fitted,
        "published_tokens_per_s": row.tokens_per_s,
        "predicted_tokens_per_s": round(check.prediction.tokens_per_s, 1),
        "error": round(check.error, 8),
        "published_peak_bytes": row.peak_bytes,
        "reserved": row.reserved,
        "predicted_peak_bytes": check.peak_bytes,
        "memory_error": None if check.memory_error is None else round(check.memory_error, 8),
        "predicted_exposed": round(check.prediction.exposed, 4),
    }


def summary(checks: list[Check]) -> dict:
    """Medians and largest of the errors, without signs."""
    outside = [abs(check.error) for check in checks if not check.fitted]
    everywhere = [abs(check.error) for check in checks]
    memory = [abs(check.memory_error) for check in checks if check.memory_error is not None]
    pairs = order(checks)
    right = [pair for pair in pairs if pair[0].prediction.tokens_per_s > pair[1].prediction.tokens_per_s]
    unfit = [predict(row.setup, row.cluster) for row in OUT_OF_MEMORY]
    return {
        "predicted_rows": len(outside),
        "median": statistics.median(outside),
        "largest": max(outside),
        "rows": len(everywhere),
        "median_of_all": statistics.median(everywhere),
        "largest_of_all": max(everywhere),
        "memory_rows": len(memory),
        "memory_median": statistics.median(memory),
        "memory_largest": max(memory),
        "memory_within_8": sum(error <= MEMORY_OFF for error in memory),
        "pairs": len(pairs),
        "pairs_right": len(right),
        "out_of_memory": len(unfit),
        "out_of_memory_right": sum(not found.fits for found in unfit),
        "groups": groups(checks),
        "missed": missed(checks),
    }


def run() -> dict:
    """Fit, predict all rows, print them; returns what --json writes."""
    for number, row in enumerate(ROWS, 1):
        print(f"\rRecording the events of every published row: {number} of {len(ROWS)} ", end="", flush=True)
        recording(row.setup)
    print("\nFitting ...", flush=True)
    shares = {gpu: fit(ROWS, gpu) for gpu in dict.fromkeys(row.gpu for row in ROWS)}
    networks = {"infiniband": fit_latency(ROWS, "infiniband", shares["h100"]),
                "efa": fit_crowding(ROWS, "efa", shares["h100"])}  # fmt: skip
    checks = check_all(ROWS, shares)
    lines = [("model", "GPUs", "engine", "batch", "seq", "published", "predicted", "error", "GB", "predicted", "error")]
    for check in checks:
        setup, row = check.row.setup, check.row
        memory = ("", "", "")
        if row.peak_bytes:
            memory = f"{row.peak_bytes / GB:.1f}", f"{check.peak_bytes / GB:.1f}", f"{check.memory_error:+.1%}"
        lines.append((
            row.model, f"{setup.ranks}", setup.engine, f"{setup.micro_batch}x{setup.accumulate}", f"{setup.config.seq}",
            f"{row.tokens_per_s:,.0f}", f"{check.prediction.tokens_per_s:,.0f}",
            f"{check.error:+.1%}{' *' * check.fitted}", *memory,
        ))  # fmt: skip
    found = summary(checks)
    print("\nTokens per second and GPU; peak in GB of 10^9 bytes. *: used in a fit")
    print("\n".join(tables.text(lines)) + "\n")
    for group in found["groups"]:
        print(f"{group['source']}, {group['size']}: {group['rows']} rows, {group['fitted']} of them fitted; median "
              f"error {group['median']:.1%}, largest {group['largest']:.1%}")  # fmt: skip
    print(f"Named, as they miss throughput by more than {OFF:.0%} or memory by more than {MEMORY_OFF:.0%}:")
    print("\n".join(f"  {one}" for one in found["missed"]) or "  none")
    for gpu, share in shares.items():
        print(f"fitted: {gpu} reaches {share:.1%} of its peak (median over {len(subset(ROWS, gpu))} one-node rows); "
              f"the table of GPUs has {GPUS[gpu].efficiency:.1%}")  # fmt: skip
    for name, network in networks.items():
        table = " and NCCL's table" if name == "efa" else ""
        print(f"fitted: {name} {_numbers(network)}, on {len(on_network(ROWS, name))} rows of at most {FITTED_UP_TO} "
              f"GPUs{table}; in use {_numbers(NETWORKS[name])}")  # fmt: skip
    print(
        f"Throughput of the {found['predicted_rows']} rows that were not fitted: median error "
        f"{found['median']:.1%}, largest {found['largest']:.1%}. Memory of {found['memory_rows']} rows: median "
        f"{found['memory_median']:.1%}, largest {found['memory_largest']:.1%}, {found['memory_within_8']} within "
        f"{MEMORY_OFF:.0%}. Which engine is faster: {found['pairs_right']} of {found['pairs']} pairs. What does not "
        f"fit: {found['out_of_memory_right']} of {found['out_of_memory']}."
    )
    return {
        "efficiency": shares,
        "networks": {name: asdict(network) for name, network in networks.items()},
        "summary": found,
        "rows": [as_json(check) for check in checks],
    }


def _numbers(network: Network) -> str:
    ring, tree = network.crowding
    crowds = f", crowding {ring:.0%} per node in a ring and {tree:.0%} in a tree" if ring else ""
    return f"{network.alpha * 1e6:.0f} us per hop, {network.bus:.0f} GB/s held{crowds}"
