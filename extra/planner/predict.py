"""A prediction of a step's time and memory: the real engine's events, replayed with a cluster's times."""

from dataclasses import dataclass, replace

from extra.planner.hardware import GB, Cluster
from extra.planner.recorder import record
from extra.planner.replay import Times, replay
from extra.planner.setup import Setup
from zerolab.measure.gpus import needed_bytes

RECORDED = 3  # micro-batches: the first, one in the middle, the last


@dataclass(frozen=True)
class Prediction:
    """For one engine. `peak_bytes` are live bytes, and `needed_bytes` what the GPU must have for them."""

    setup: Setup
    peak_bytes: int
    needed_bytes: float
    fits: bool
    times: Times

    @property
    def exposed(self) -> float:
        """The share of the step in which the GPU communicates and computes nothing."""
        return self.times.exposed / self.times.step

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and GPU."""
        return self.setup.tokens / self.times.step

    def numbers(self) -> dict:
        """For --json: times in seconds, memory in bytes, and `exposed` as a share."""
        return {
            "engine": self.setup.engine,
            "peak_bytes": self.peak_bytes,
            "needed_bytes": round(self.needed_bytes),
            "fits": self.fits,
            "step_s": self.times.step,
            "compute_s": self.times.compute,
            "communication_s": self.times.communication,
            "exposed": self.exposed,
            "tokens_per_s": self.tokens_per_s,
        }


def predict(setup: Setup, cluster: Cluster) -> Prediction:
    """Raises ValueError if the engine rejects the options."""
    recording = record(replace(setup, accumulate=min(setup.accumulate, RECORDED)))
    times = replay(recording.events, cluster)
    if setup.accumulate > RECORDED:  # all in the middle take as long
        shorter = replay(record(replace(setup, accumulate=RECORDED - 1)).events, cluster)
        more = setup.accumulate - RECORDED
        times = Times(*(last + more * (last - before) for before, last in zip(shorter, times)))
    needed = needed_bytes(recording.peak_bytes)
    return Prediction(setup, recording.peak_bytes, needed, needed <= cluster.gpu.memory_gb * GB, times)
