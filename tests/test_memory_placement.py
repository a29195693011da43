"""The dry run of hybrid sharding and of offload: who sends what along which dimension, and what lies where."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from types import SimpleNamespace
from unittest import mock

import parts
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.measure import memory
from harness.measure.fake_ranks import fake_ranks
from harness.measure.parts import GRADIENTS, HELD, IN_FLIGHT, OPTIMIZER, PARAMETERS, PARTS
from harness.run.model import PRESETS


@cache
def dry(name: str, *argv: str) -> dict:
    return memory.measure_alone(name, memory.arguments(list(argv)))


@cache
def layout(stage: str, preset: str, ranks: int) -> dict:
    """Elements with padding: the largest "unit" or bucket, "root", "whole" and "shard" in all; "pieces" counted."""
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    with fake_ranks(ranks), FakeTensorMode(allow_non_fake_inputs=True):
        engine = parts.STAGES[stage](memory.make_model(PRESETS[preset], torch.device("cpu")), adamw)
        root = sum(bucket.numel for bucket in engine.root.buckets) if stage == "zero3" else 0
        units = getattr(engine, "units", [])
        return {
            "unit": max((bucket.numel for unit in units for bucket in unit.buckets), default=0),
            "root": root,
            "whole": sum(bucket.numel for bucket in engine.buckets),
            "shard": sum(bucket.shard_numel for bucket in engine.buckets),
            "shards": [bucket.shard_numel for bucket in engine.buckets],
            "pieces": sum(len(bucket.pieces) for bucket in engine.buckets),
        }


# Hybrid sharding.

STAGES_AND_FSDP2 = {"zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "fsdp2": "zero3", "fsdp2_no_reshard": "zero2"}


@pytest.mark.parametrize(
    "name, replicas, shards",
    [*((name, 2, 4) for name in STAGES_AND_FSDP2), *((name, 4, 2) for name in ("zero1", "fsdp2"))],
)
def test_elements_sent_by_dimension(name, replicas, shards):
    argv = ["--preset", "toy"]
    row = dry(name, *argv, "--ranks", str(replicas * shards), "--replicas", str(replicas))
    alone = dry(name, *argv, "--ranks", str(shards))
    found = layout(STAGES_AND_FSDP2[name], "toy", shards)
    times = {"zero1": 3, "zero2": 2, "zero3": 3 - found["root"] / found["whole"]}[STAGES_AND_FSDP2[name]]
    expected = {
        "row": times * found["whole"] * (shards - 1) / shards,
        "across replicas": 2 * found["shard"] * (replicas - 1) / replicas,
    }
    sent = {where: number for where, number in row["sent_elements_by_dimension"].items() if number}
    assert sent == {where: number for where, number in expected.items() if number}
    assert sum(sent.values()) == row["sent_elements"]
    # What a rank holds is that of one row alone. ZeRO-1 alone has the replicas' mean beside the row's whole gradients.
    more = 4 * found["shard"] if name == "zero1" else 0
    assert row["held_bytes"] == {**alone["held_bytes"], GRADIENTS: alone["held_bytes"][GRADIENTS] + more}
    assert row["difference_bytes"] == row["step_counters_bytes"], "the formula beside it is another one"
    if row["state_peak_formula"] and shards > 1:
        assert row["state_peak_bytes"] == pytest.approx(row["state_peak_formula_bytes"], rel=0.01)


def test_replicas_leave_ddp_as_it_is():
    argv = ["--preset", "toy", "--ranks", "4"]
    assert dry("ddp", *argv, "--replicas", "2") == dry("ddp", *argv)
    assert dry("ddp", *argv)["sent_elements_by_dimension"] == {"all ranks": 2 * 34_688 * 3 / 4}


def test_the_table_by_dimension(capsys, monkeypatch):
    argv = ["--preset", "toy", "--ranks", "6", "--replicas", "2", "--engines", "ddp,zero2,fsdp2"]
    monkeypatch.setattr("sys.argv", ["memory", *argv])
    memory.main()
    text = capsys.readouterr().out
    table = text.partition("Elements sent in 2 rows of S = 3 ranks")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table[2:]] == ["ddp", "zero2", "fsdp2"]
    for line in table[2:]:
        numbers = dry(line.split()[0], *argv[:6])["sent_elements_by_dimension"]
        assert all(f"{number:,}" in line for number in numbers.values()), line
    assert "2.000 Ψ/S (R-1)/R" in table[3]


def test_a_torch_without_such_an_accelerator_is_named(monkeypatch):
    monkeypatch.delattr("torch.utils.backend_registration._setup_privateuseone_for_python_backend")
    with pytest.raises(ValueError, match="torch 2.11 to 2.15"):
        memory.arguments(["--offload"])


# Offload. The fake GPU stays registered in its process for good, so it has one of its own.


def on_a_fake_gpu(name: str, argv: Sequence[str]) -> dict:
    """The row of `./launch.sh memory --offload ARGV` for one engine."""
    return memory.measure_alone(name, memory.arguments(["--offload", *argv]))


def with_an_allocator(name: str, argv: list[str], peak: int) -> dict:
    """The same row where the device has an allocator that says that its peak was `peak` bytes."""
    allocator = SimpleNamespace(
        memory_allocated=lambda: 0, reset_peak_memory_stats=lambda: None, max_memory_allocated=lambda: peak
    )
    with mock.patch.object(memory, "allocator_of", lambda device: allocator):
        return on_a_fake_gpu(name, argv)


@pytest.fixture(scope="module")
def offload():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        run = cache(lambda name, *argv: process.submit(on_a_fake_gpu, name, argv).result())
        run.process = process
        yield run


def assert_placed(row: dict, plain: dict, stage: str, found: dict) -> None:
    """`row` is a run with offload in float32, and `plain` the same run without; sizes in bytes, to the byte."""
    whole, shard = 4 * found["whole"], 4 * found["shard"]
    # What is cut is on the host: three times as many numbers as are gathered, and AdamW's counters.
    host = {PARAMETERS: shard, GRADIENTS: shard, OPTIMIZER: 2 * shard + 4 * found["pieces"]}
    assert row["host"]["held_bytes"] == host
    # And never anything else, not for a moment: nothing of the whole goes there.
    assert row["host"]["most_beside_bytes"] == 0
    assert row["host"]["peak_parts"] == host and row["host"]["peak_bytes"] == sum(host.values())
    device = {PARAMETERS: 0 if stage == "zero3" else whole, GRADIENTS: whole if stage == "zero1" else 0, OPTIMIZER: 0}
    assert row["held_bytes"] == device
    # At the worst moment the device has what it has without offload, and of all that is held what is whole; and the
    # shard of the gradients that is being reduced, which without offload is held.
    assert row["peak_where"] == plain["peak_where"]
    for part in PARTS:
        here, there = (run["peak_parts"].get(part, 0) for run in (row, plain))
        if part in HELD:
            assert here == device[part], part
        elif part == IN_FLIGHT:
            assert here - there in ((0, 4 * found["unit"] // round(whole / shard)) if stage == "zero3" else (0,))
        else:
            assert here == there, part
    assert row["peak_bytes"] < plain["peak_bytes"] == sum(plain["peak_parts"].values())
    assert row["sent_by_collective"] == plain["sent_by_collective"]


@pytest.mark.parametrize("stage", parts.STAGES)
@pytest.mark.parametrize("preset, ranks", (pytest.param("tiny", 8, marks=pytest.mark.thorough), ("toy", 3)))
def test_what_is_cut_is_on_the_host_and_the_rest_on_the_device(offload, stage, preset, ranks):
    argv = ["--preset", preset, "--ranks", str(ranks)]
    row, found = offload(stage, *argv), layout(stage, preset, ranks)
    assert_placed(row, dry(stage, *argv), stage, found)
    if preset == "tiny":  # no bucket needs padding
        assert sum(row["host"]["held_bytes"].values()) - 4 * found["pieces"] == 16 * 4_837_376 / 8
        assert row["state_peak_bytes"] == pytest.approx(row["state_peak_formula_bytes"], rel=0.001)


@pytest.mark.parametrize("more", ([], ["--replicas", "2", "--precision", "bf16"]), ids=str)
@pytest.mark.parametrize("stage", parts.STAGES)
def test_fsdp2_with_the_same_policy(offload, stage, more):
    """It has the same bytes on the host, and ZeRO-3 needs no more on the device than one unit's gradient shard."""
    argv = ["--preset", "toy", "--ranks", "8", *more]
    ours, theirs = offload(stage, *argv), offload("fsdp2", *argv)
    for row in (ours, theirs):
        assert row["difference_bytes"] == 0 and row["host"]["difference_bytes"] == row["host"]["step_counters_bytes"]
        assert row["host"]["most_beside_bytes"] <= 100
    without_counters = [row["host"]["formula_bytes"] for row in (ours, theirs)]
    assert without_counters[0] == without_counters[1] == 16 * 34_688 / (4 if "--replicas" in more else 8)
    if stage == "zero3":
        shard = 4 * layout("zero3", "toy", 8)["unit"] // (4 if "--replicas" in more else 8)
        assert ours["peak_bytes"] <= theirs["peak_bytes"] + shard


def test_the_tables_of_device_and_host(offload, capsys):
    options = memory.arguments(["--preset", "toy", "--offload"])
    assert "ddp" not in options.engines and {*parts.STAGES, "fsdp2"} < {*options.engines}  # DDP has no offload
    options.engines = ["zero1", "fsdp2"]
    engines = {name: offload(name, "--preset", "toy") for name in options.engines}
    conditions = {"preset": "toy", "precision": "fp32", "offload": True, "ranks": 8, "replicas": 1}
    text = memory.report({"parameters": 34_688, **conditions, "engines": engines})
    on_host = text.partition("Held on the host")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[4] for line in on_host[2:4]] == [f"{16 * 34_688 / 8 / 1e6:.3f}"] * 2
    on_device = text.partition("Held on the device")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[4] for line in on_device[2:4]] == [f"{8 * 34_688 / 1e6:.3f}", "0.000"]


def test_the_allocators_peak_stands_beside_the_devices_and_not_the_hosts(offload):
    argv = ["--preset", "toy", "--ranks", "3"]
    row = offload.process.submit(with_an_allocator, "zero2", argv, 12_345).result()
    plain = offload("zero2", *argv)
    assert row["peak_bytes"] == 12_345 and row["ledger_peak_bytes"] == plain["peak_bytes"]
    assert row["host"] == plain["host"] and row["host"]["peak_bytes"] != plain["peak_bytes"]


@pytest.mark.parametrize("stage", parts.STAGES)
@pytest.mark.parametrize("preset, ranks", (pytest.param("tiny", 8, marks=pytest.mark.thorough), ("toy", 3)))
def test_pinned_buffers_are_powers_of_two(offload, stage, preset, ranks):
    """One of parameters and one of gradients for each bucket's shard."""
    row, shards = offload(stage, "--preset", preset, "--ranks", str(ranks)), layout(stage, preset, ranks)["shards"]
    expected = sum(2 * next(2**power for power in range(64) if 2**power >= 4 * shard) for shard in shards)
    held = row["host"]["held_bytes"]
    assert row["host"]["pinned_bytes"] == expected > held[PARAMETERS] + held[GRADIENTS]
