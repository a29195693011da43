"""The planner held against published measurements: prediction, published value, error; what was fitted, and on what."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from harness.measure.planner.hardware import GPUS
from harness.measure.planner.predict import Prediction, predict
from harness.measure.planner.published import GIB, OUT_OF_MEMORY, ROWS, TORCHTITAN, Row
from harness.measure.planner.repeat import recording
from harness.measure.planner.replay import replay


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
