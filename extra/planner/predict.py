"""A prediction of a step's time and memory: the real engine's events, replayed with a cluster's times."""

from dataclasses import dataclass

from extra.planner.allocator import reserved_bytes
from extra.planner.hardware import GB, Cluster
from extra.planner.one_rank import Setup
from extra.planner.repeat import recording
from extra.planner.replay import Times, replay
from zerolab.measure.gpus import flops_per_token, needed_bytes


@dataclass(frozen=True)
class Prediction:
    """For one engine: seconds, bytes, tokens per second and GPU. None of it was measured.

    `peak_bytes` counts live storages, from the dry run's ledger. `reserved_bytes` is what torch's allocator would
    reserve for them, and `needed_bytes` the live bytes with the assumed overhead. `mfu` is the share of the GPU's peak
    by the PaLM paper's count of FLOPs, which does not count recomputation.
    """

    setup: Setup
    parameters: int
    peak_bytes: int
    reserved_bytes: int
    needed_bytes: float
    fits: bool
    times: Times
    tokens_per_s: float
    mfu: float

    @property
    def step(self) -> float:
        return self.times.step

    @property
    def exposed(self) -> float:
        """The share of the step in which the GPU communicates and computes nothing."""
        return self.times.exposed / self.times.step

    def numbers(self) -> dict:
        """For --json: times in seconds, memory in bytes, and `exposed` as a share."""
        return {
            "engine": self.setup.engine,
            "ranks": self.setup.ranks,
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "needed_bytes": round(self.needed_bytes),
            "fits": self.fits,
            "step_s": self.step,
            "compute_s": self.times.compute,
            "collectives_s": self.times.collectives,
            "exposed": self.exposed,
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
        }


def predict(setup: Setup, cluster: Cluster) -> Prediction:
    """Raise ValueError if the engine rejects the options, or if the GPU does not support the precision."""
    cluster.gpu.flops(setup.precision)
    events = recording(setup)
    times = replay(events.events, cluster)
    peak = events.peak_bytes()
    needed = needed_bytes(peak)
    tokens = setup.tokens / times.step
    each = flops_per_token(setup.config, events.parameters, setup.config.seq)
    mfu = tokens * each / cluster.gpu.flops(setup.precision)
    fits = needed <= cluster.gpu.memory_gb * GB
    return Prediction(setup, events.parameters, peak, reserved_bytes(events), needed, fits, times, tokens, mfu)
