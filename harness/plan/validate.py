"""The planner held against published measurements: prediction, published value, error; what was fitted, and on what."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from harness.plan.events import COMPUTE, Collective
from harness.plan.hardware import BUS, BUS_BYTES, GB, GPUS, NETWORKS, NODES, Cluster, Network
from harness.plan.predict import Prediction, predict
from harness.plan.published import OUT_OF_MEMORY, ROWS, Row
from harness.plan.repeat import recording
from harness.plan.replay import replay

FITTED_UP_TO = 128  # GPUs
ALPHAS = tuple(microseconds * 1e-6 for microseconds in (4, 8, 12, 16, 20, 30))
CROWDINGS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)
TABLE_WEIGHT = 1 / 3  # the table's runs spread widely


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
    """The rows that a network may be fitted on: of 2 to 16 nodes of H100. None above 128 GPUs is ever looked at."""
    return [row for row in rows if row.network == network and row.gpu == "h100" and 8 < row.setup.ranks <= FITTED_UP_TO]


def wanted(row: Row) -> float:
    """Seconds of a step with the published tokens per second."""
    setup = row.setup
    return setup.micro_batch * setup.accumulate * (setup.seq or setup.config.seq) / row.tokens_per_s


def share_of_peak(row: Row, **assumed) -> float:
    """The efficiency with which the replay takes as long as published.

    A step is nearly a constant and a part that grows as 1 / efficiency: from two guesses the line tells the third.
    """
    events, cluster = recording(row.setup).events, replace(row.cluster, **assumed)
    guesses = [0.6, 0.5]
    steps = [replay(events, replace(cluster, efficiency=guess)).step for guess in guesses]
    for _ in range(3):
        (one, other), (late, later) = (1 / guesses[-2], 1 / guesses[-1]), steps[-2:]
        if abs(later - late) < 1e-6 * later:
            break
        guesses.append(1 / max(1.0, other + (wanted(row) - later) * (other - one) / (later - late)))
        steps.append(replay(events, replace(cluster, efficiency=guesses[-1])).step)
    return guesses[-1]


def fit(rows: Iterable[Row], gpu: str, **assumed) -> float | None:
    """The share of its peak that `gpu` reaches in matrix products: the median over its one-node rows; or None."""
    found = [share_of_peak(row, **assumed) for row in subset(rows, gpu)]
    return statistics.median(found) if found else None


def fit_moving(rows: Iterable[Row]) -> float:
    """The share of the memory's bandwidth with which InfiniBand's rows are met best, each with the peak's share to it."""

    def missed(moving: float) -> float:
        assumed = {"memory_efficiency": moving, "efficiency": fit(rows, "h100", memory_efficiency=moving)}
        return _mean(_error(row, **assumed) for row in on_network(rows, "infiniband"))

    return min((0.65, 0.75, 0.85), key=missed)


def _error(row: Row, **assumed) -> float:
    """The logarithm of the replayed step over the published one."""
    return math.log(replay(recording(row.setup).events, replace(row.cluster, **assumed)).step / wanted(row))


def _mean(errors) -> float:
    """Root of the mean of the squares: one large error weighs more than two of half its size."""
    return statistics.mean(error**2 for error in errors) ** 0.5


def fit_network(rows: Iterable[Row], name: str, **assumed) -> Network:
    """Latency and crowding of a network with which its rows, and NCCL's table for EFA, are met best.

    Its bandwidth is held, 7/8 of 400 GB/s: what is sent here hides behind the computation, and does not tell. Rings
    and trees crowd apart, as all-gathers and all-reduces differ in the table; DDP's rows tell of trees.
    """
    rows, held = on_network(rows, name), NETWORKS[name].bus

    def missed(network: Network, reduces: bool) -> float:
        errors = [_error(row, network=network, **assumed) for row in rows if (row.setup.engine == "ddp") == reduces]
        if name == "efa":
            errors += [TABLE_WEIGHT * error for error in table_errors(network, reduces)]
        return _mean(errors) if errors else 0.0

    def best(alpha: float) -> tuple[float, Network]:
        found = []
        for reduces in (False, True):
            tried = [(crowding, crowding) for crowding in (CROWDINGS if name == "efa" else (0.0,))]
            found.append(min((missed(Network(alpha, held, both), reduces), both[0]) for both in tried))
        (ring, in_ring), (tree, in_tree) = found
        return ring + tree, Network(alpha, held, (in_ring, in_tree))

    return min(map(best, ALPHAS), key=lambda pair: pair[0])[1]


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
    checks = []
    for row in rows:
        share = (efficiencies or {}).get(row.gpu, GPUS[row.gpu].efficiency)
        fitted = row in subset([row], row.gpu) or row in on_network([row], row.network)
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


def as_json(check: Check) -> dict:
    setup, row = check.row.setup, check.row
    return {
        "model": row.model,
        "gpu": row.gpu,
        "gpus": setup.ranks,
        "engine": setup.engine,
        "micro_batch": setup.micro_batch,
        "accumulate": setup.accumulate,
        "recompute": setup.recompute,
        "source": row.source,
        "fitted": check.fitted,
        "published_tokens_per_s": row.tokens_per_s,
        "predicted_tokens_per_s": round(check.prediction.tokens_per_s, 1),
        "error": round(check.error, 8),
        "published_peak_bytes": row.peak_bytes,
        "predicted_peak_bytes": check.prediction.peak_bytes,
        "memory_error": None if check.memory_error is None else round(check.memory_error, 8),
        "predicted_exposed": round(check.prediction.exposed, 4),
    }


def summary(checks: list[Check]) -> dict:
    """Medians and largest of the errors, without signs. Throughput: of the rows that were not fitted, and of all."""
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
        "memory_within_10": sum(error <= 0.1 for error in memory),
        "pairs": len(pairs),
        "pairs_right": len(right),
        "out_of_memory": len(unfit),
        "out_of_memory_right": sum(not found.fits for found in unfit),
    }


def run() -> dict:
    """Fit, predict all rows, print them; returns what --json writes."""
    print("Recording the events of every published row (some minutes) ...", flush=True)
    shares = {gpu: fit(ROWS, gpu) for gpu in dict.fromkeys(row.gpu for row in ROWS)}
    checks = check_all(ROWS, {gpu: share for gpu, share in shares.items() if share})
    head = f"{'model':<13}{'GPUs':>5} {'engine':<17}{'batch':>6} {'published':>10}{'predicted':>10}{'error':>8}"
    print(
        f"\nTokens per second and GPU; peak in GB of 10^9 bytes.\n{head} {'published':>10}{'predicted':>10}{'error':>8}"
    )
    for check in checks:
        setup, row = check.row.setup, check.row
        line = f"{row.model:<13}{setup.ranks:>5} {setup.engine:<17}{f'{setup.micro_batch}x{setup.accumulate}':>6} "
        line += f"{row.tokens_per_s:>10,.0f}{check.prediction.tokens_per_s:>10,.0f}{check.error:>+8.1%} "
        if row.peak_bytes:
            line += f"{row.peak_bytes / GB:>10.1f}{check.prediction.peak_bytes / GB:>10.1f}{check.memory_error:>+8.1%}"
        print(line + ("  throughput used in the fit" if check.fitted else ""))
    found = summary(checks)
    for gpu, share in shares.items():
        used = len(subset(ROWS, gpu))
        print(f"fitted: {gpu} reaches {share:.1%} of its peak (median over {used} one-node rows); "
              f"the table of GPUs has {GPUS[gpu].efficiency:.1%}")  # fmt: skip
    print(
        f"Throughput of the {found['predicted_rows']} rows that were not fitted: median error {found['median']:.1%}, "
        f"largest {found['largest']:.1%}. Memory of {found['memory_rows']} rows: median {found['memory_median']:.1%}, "
        f"largest {found['memory_largest']:.1%}, {found['memory_within_10']} within 10%. Which engine is faster: "
        f"{found['pairs_right']} of {found['pairs']} pairs. What does not fit: {found['out_of_memory_right']} of "
        f"{found['out_of_memory']}."
    )
    return {"efficiency": shares, "summary": found, "rows": [as_json(check) for check in checks]}
