"""The planner held against published measurements: prediction, published value, error; what was fitted, and on what."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from harness.plan.hardware import GB, GPUS
from harness.plan.predict import Prediction, predict
from harness.plan.published import OUT_OF_MEMORY, ROWS, Row
from harness.plan.repeat import recording
from harness.plan.replay import replay


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
        return self.row.peak_bytes and self.prediction.peak_bytes / self.row.peak_bytes - 1


def subset(rows: Iterable[Row], gpu: str) -> list[Row]:
    """The rows that the efficiency of `gpu` may be fitted on: those of one node, whose network is the links alone."""
    return [row for row in rows if row.gpu == gpu and row.one_node]


def fit(rows: Iterable[Row], gpu: str) -> float | None:
    """The share of its peak that `gpu` reaches in matrix products, by the median of its one-node rows; or None.

    For each row the share with which the replay gives the published tokens per second, by bisection.
    """
    found = []
    for row in subset(rows, gpu):
        events, setup = recording(row.setup).events, row.setup
        tokens = setup.micro_batch * setup.accumulate * (setup.seq or setup.config.seq)
        low, high = 0.1, 1.0
        for _ in range(12):
            middle = (low + high) / 2
            slow = tokens / replay(events, replace(row.cluster, efficiency=middle)).step < row.tokens_per_s
            low, high = (middle, high) if slow else (low, middle)
        found.append((low + high) / 2)
    return statistics.median(found) if found else None


def check_all(rows: Iterable[Row] = ROWS, efficiencies: dict[str, float] | None = None) -> list[Check]:
    """Every row, predicted with the efficiencies given (default: those that are in the table of GPUs)."""
    checks = []
    for row in rows:
        share = (efficiencies or {}).get(row.gpu, GPUS[row.gpu].efficiency)
        checks.append(Check(row, predict(row.setup, replace(row.cluster, efficiency=share)), row.one_node))
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
