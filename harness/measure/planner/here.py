"""`./launch.sh plan --here`: two CPU ranks of this machine, replayed with rates measured in the same run.

Rates and step times are measured; the replay beside them is a prediction. What differs is what the model leaves out.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from harness.measure import bench
from harness.measure.planner.engines import Setup
from harness.measure.planner.events import Collective, Operation
from harness.measure.planner.repeat import recording
from harness.measure.planner.replay import replay
from harness.run import process_group
from harness.run.model import GPTConfig

RANKS = 2
ENGINES = ("ddp", "zero1", "zero2", "fsdp2_no_reshard", "zero3", "fsdp2")
SIZES = (2**12, 2**16, 2**20, 2**22, 2**24)  # bytes
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Rates:
    """What a rank of this machine reaches: FLOP/s of products, bytes/s of memory, seconds of a tiny operation.

    `collectives`: kind -> seconds at each of `SIZES`. A CPU has no queue: an operation is over when it returns.
    """

    flops: float
    memory: float
    kernel: float
    collectives: dict[str, list[float]]
    launch: float = 0.0
    issue: float = 0.0
    slowdown: float = 0.0

    def seconds(self, operation: Operation) -> float:
        return self.kernel + operation.nbytes / self.memory + operation.flops / self.flops

    def collective_seconds(self, collective: Collective) -> float:
        """On the line between the two sizes around it, both axes logarithmic; beyond the ends in proportion."""
        times, nbytes = self.collectives.get(collective.kind, self.collectives["all-gather"]), collective.nbytes
        if nbytes <= SIZES[0]:
            return times[0]
        if nbytes >= SIZES[-1]:
            return times[-1] * nbytes / SIZES[-1]
        place = next(i for i, size in enumerate(SIZES) if size >= nbytes)
        share = math.log(nbytes / SIZES[place - 1]) / math.log(SIZES[place] / SIZES[place - 1])
        return times[place - 1] ** (1 - share) * times[place] ** share


def _seconds(run, rounds: int = 7) -> float:
    """The median time of `run()`, all ranks at once."""
    times = []
    for turn in range(-1, rounds):
        dist.barrier()
        started = time.perf_counter()
        run()
        if turn >= 0:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure_rates(config: GPTConfig, tokens: int) -> dict:
    """The rates of this rank while the others measure theirs: `Rates` as a dictionary. A collective."""
    wide = 4 * config.width
    a, b = torch.randn(tokens, config.width), torch.randn(config.width, wide)
    flops = 20 * 2 * tokens * config.width * wide / _seconds(lambda: [a @ b for _ in range(20)])
    big = torch.randn(tokens, 4 * wide)
    memory = 10 * 3 * big.numel() * 4 / _seconds(lambda: [torch.add(big, big) for _ in range(10)])
    tiny = torch.zeros(1)
    kernel = _seconds(lambda: [tiny + tiny for _ in range(1000)]) / 1000
    collectives = {"all-reduce": [], "all-gather": [], "reduce-scatter": []}
    for size in SIZES:
        whole, part = torch.zeros(size // 4), torch.zeros(size // 4 // dist.get_world_size())
        collectives["all-reduce"].append(_seconds(lambda whole=whole: dist.all_reduce(whole)))
        collectives["all-gather"].append(_seconds(lambda w=whole, p=part: dist.all_gather_single(w, p)))
        collectives["reduce-scatter"].append(_seconds(lambda w=whole, p=part: dist.reduce_scatter_single(p, w)))
    return {"flops": flops, "memory": memory, "kernel": kernel, "collectives": collectives}


def _on_a_rank(file: str) -> None:
    """What torchrun starts: measure, and write the results to `file`."""
    options = bench.arguments(["--device", "cpu", "--engines", ",".join(ENGINES)])
    me = process_group.start("gloo", "cpu")
    rates = measure_rates(_config(options), options.batch * options.seq)
    times = bench.step_times(options, me)
    if me.rank == 0:
        Path(file).write_text(json.dumps({"rates": rates, "ms": times, "hardware": process_group.hardware(me.device)}))
    process_group.stop()


def _config(options) -> GPTConfig:
    return GPTConfig(options.layers, options.width, options.heads, options.vocab, options.seq, tied=False)


def compare(measured: dict) -> list[dict]:
    """A row per engine: the measured step beside the replay with the measured rates."""
    options, rates, rows = bench.arguments([]), Rates(**measured["rates"]), []
    for engine, times in measured["ms"].items():
        setup = Setup(_config(options), engine, RANKS, "fp32", options.batch)
        found = replay(recording(setup).events, rates)
        middle = statistics.median(times)
        rows.append({
            "engine": engine, "measured_ms": middle, "lowest_ms": min(times), "highest_ms": max(times),
            "predicted_ms": found.step * 1e3, "error": found.step * 1e3 / middle - 1,
            "predicted_exposed_ms": found.exposed * 1e3,
        })  # fmt: skip
    return rows


def summary(rows: list[dict]) -> str:
    """How far the replay is off, without signs, beside how far the measured steps of one engine are apart."""
    off = [abs(row["error"]) for row in rows]
    spread = statistics.median(row["highest_ms"] / row["lowest_ms"] - 1 for row in rows)
    return (
        f"median difference {statistics.median(off):.0%}, largest {max(off):.0%}; "
        f"the steps themselves spread by {spread:.0%} between the lowest and the highest (median of the engines)"
    )


def run() -> dict:
    """Start the ranks, measure, replay, print; returns what --json writes."""
    print(f"Measuring on {RANKS} CPU ranks over gloo: rates, then the steps of all engines in turn ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "measured.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        done = subprocess.run([*command, "-m", __spec__.name, file], cwd=ROOT)
        if done.returncode:
            raise ValueError(f"the ranks that measure ended with status {done.returncode}, see above")
        measured = json.loads(Path(file).read_text())
    rates, rows = measured["rates"], compare(measured)
    print(f"\n{measured['hardware']}: products {rates['flops'] / 1e9:.0f} GFLOP/s, memory {rates['memory'] / 1e9:.1f} "
          f"GB/s, a tiny operation {rates['kernel'] * 1e6:.1f} us (each measured, both ranks at once)")  # fmt: skip
    print(f"\n{'engine':<20}{'measured ms':>12}{'lowest':>9}{'highest':>9}{'replayed ms':>13}{'difference':>12}")
    for row in rows:
        print(f"{row['engine']:<20}{row['measured_ms']:>12.1f}{row['lowest_ms']:>9.1f}{row['highest_ms']:>9.1f}"
              f"{row['predicted_ms']:>13.1f}{row['error']:>+12.0%}")  # fmt: skip
    print(
        f"\n{summary(rows)}\n\n"
        "The replay leaves out: the engines' Python, AdamW's several kernels on a CPU (it counts one), cores that\n"
        "gloo's threads take from the computation, caches, and memory that is touched for the first time."
    )
    return measured | {"ranks": RANKS, "torch": torch.__version__, "rows": rows}


if __name__ == "__main__":
    _on_a_rank(sys.argv[1])
