"""The benchmark: what it compares, and that each way of it runs. (No test asserts a time.)"""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zerolab.measure import bench, bench_options
from zerolab.measure.sweeps import SWEEPS
from zerolab.run.data import Batches
from zerolab.run.pool import run_on_ranks
from zerolab.run.process_group import World


def test_ratios_are_of_steps_of_one_round():
    """A disturbance affects a whole round, so times are divided by another engine's time in the same round."""
    times = {"ddp": [0.01, 0.02, 0.09], "zero3": [0.03, 0.01, 0.045], "fsdp2": [0.06, 0.06, 0.06]}
    rows = bench.rows_of_times(times)
    assert [row["ratio"] for row in rows.values()] == [1, 0.5, 3]
    assert rows["zero3"] == {"ratio": 0.5, "step_ms": 30, "step_ms_lowest": 10, "step_ms_highest": 45}
    lines = bench.table_of_steps("engine", rows).splitlines()
    assert lines[1].split()[:4] == ["ddp", "20.0", "10.0", "90.0"]
    assert lines[2].split()[:4] == ["zero3", "30.0", "10.0", "45.0"]


def swept() -> dict[str, dict[str, dict]]:
    """What is measured of every sweep."""
    options = bench_options.arguments(["--preset", "toy", "--rounds", "1"])
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", "")
    batch = Batches(torch.arange(1000) % 250, options.batch, options.seq, 0, world.device)(0, world.rank)
    return {sweep: bench.measure_together(variants, batch, options, world) for sweep, variants in SWEEPS.items()}


@pytest.mark.thorough
def test_every_sweep_runs_and_its_choices_differ_in_their_labels():
    found = run_on_ranks(2, swept)[0]

    def of(sweep: str, what: str) -> list[int]:
        return [row[what] for row in found[sweep].values()]

    for sweep in ("bucket size, zero1", "bucket size, zero2", "units"):
        collectives = of(sweep, "collectives")  # larger buckets and units: fewer
        assert collectives == sorted(collectives, reverse=True) and collectives[0] > collectives[-1], sweep
    for sweep in ("prefetch", "activations"):
        assert len({*zip(of(sweep, "collectives"), of(sweep, "sent_bytes"))}) == 1, sweep  # the order or the time only
    kept, recomputed = of("activations", "peak_bytes")
    assert recomputed < kept


def test_the_hosts_part_has_all_engines_that_run_without_others(tmp_path, monkeypatch):
    file, few = tmp_path / "host.json", [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)]
    monkeypatch.setattr(bench, "many_small_parameters", lambda: nn.Sequential(*copy.deepcopy(few)))
    monkeypatch.setattr("gc.disable", lambda: None)
    bench.main(["--host", "--rounds", "1", "--json", str(file)])
    rows = json.loads(file.read_text())["host"]
    assert {"plain", "ddp", "zero1", "zero2", "zero3", "zero3 engine", "fsdp2"} <= {*rows}
    assert all(row["step_ms"] > 0 for row in rows.values())
