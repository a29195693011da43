"""The dry run: an article's gigabytes, formulas of the peak, the stand-in for DDP, replicas, offload, and refusals."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.measure import memory
from harness.measure.fake_ranks import fake_ranks
from harness.measure.memory_parts import GRADIENTS, HELD, IN_FLIGHT, OPTIMIZER, PARAMETERS, PARTS, PartsLedger
from harness.properties import parts
from harness.run.model import PRESETS, next_token_loss
from harness.teach.articles.on_memory import dry as articles_dry

RESULTS = Path(__file__).parent.parent / "results"


def dry(name: str, *argv: str, device: str = "fake") -> dict:
    options = memory.arguments(list(argv))
    options.device = device
    with fake_ranks(options.ranks):
        return memory.measure(name, options)


@pytest.mark.parametrize(
    "name, gigabytes",
    (*(pytest.param(*row, marks=pytest.mark.thorough) for row in (("zero1", 63), ("zero2", 38.5))), ("zero3", 14)),
)
def test_the_articles_table_of_7b_on_8_gpus(name, gigabytes):
    row = articles_dry(name)  # run once for this and for the articles' tests
    written = json.loads((RESULTS / "memory-7b-8ranks.json").read_text())["engines"][name]
    for key in ("held_bytes", "formula_bytes", "state_peak_bytes", "state_peak_formula_bytes", "sent_bytes"):
        assert row[key] == written[key], f"{key} in results/ is not what the code gives"
    held = sum(row["held_bytes"].values())
    assert held == pytest.approx(gigabytes * 1e9, rel=0.005)
    # All that the formula does not say: AdamW's counters, 4 bytes each. No bucket of this model needs padding.
    assert held - row["formula_bytes"] == row["difference_bytes"] == row["step_counters_bytes"] > 0
    assert row["state_peak_bytes"] == pytest.approx(row["state_peak_formula_bytes"], rel=0.01)


@pytest.mark.parametrize(
    "stage, own, ranks",
    [
        ("zero1", {"bucket_mb": 25}, 2),
        *(("zero2", {"bucket_mb": size}, 100) for size in (0, 1, 25)),
        ("zero2", {"bucket_mb": 1}, 2),
        *(("zero3", {"prefetch": ahead}, 100) for ahead in (0, 1, 3)),
    ],
    ids=str,
)
def test_the_peak_is_what_its_formula_says(stage, own, ranks):
    config = PRESETS["tiny"]
    adamw = partial(torch.optim.AdamW, lr=1e-3, foreach=False)
    with fake_ranks(ranks), FakeTensorMode(allow_non_fake_inputs=True), PartsLedger() as ledger:
        model = memory.make_model(config, torch.device("cpu"))
        values = memory.letters(model, ranks, **own)
        engine = parts.STAGES[stage](model, adamw, **own)
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        engine.training_step(tokens, tokens, next_token_loss)
        ledger.begin(engine)
        engine.training_step(tokens, tokens, next_token_loss)
    state = ledger.peak_moment(of=lambda moment: moment.state).state
    assert state == pytest.approx(memory.evaluate(memory.PEAK_FORMULAS[stage], **values), rel=0.01)
    # With two tokens there is hardly anything else, so this is the peak itself.
    assert ledger.peak == pytest.approx(state, rel=0.03)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_the_peak_of_several_backwards_is_what_its_formula_says(stage):
    row = dry(stage, "--preset", "tiny", "--ranks", "4", "--seq", "2", "--micro-batch", "1", "--accumulate", "3")
    assert row["state_peak_bytes"] == pytest.approx(row["state_peak_formula_bytes"], rel=0.005)


@pytest.mark.parametrize(
    "ranks, more",
    (
        (1, []),
        pytest.param(3, ["--precision", "bf16"], marks=pytest.mark.thorough),
        pytest.param(8, ["--checkpoint-activations", "--batch", "3"], marks=pytest.mark.thorough),
    ),
    ids=str,
)
def test_zero3_peaks_no_higher_than_fsdp2(ranks, more):
    argv = ["--preset", "tiny", "--ranks", str(ranks), "--seq", "16", *more]
    ours, theirs = dry("zero3", *argv), dry("fsdp2", *argv)
    assert ours["peak_bytes"] <= theirs["peak_bytes"]
    assert ours["sent_bytes"] <= theirs["sent_bytes"]


@pytest.mark.parametrize(
    "name, preset, more",
    [*(("ddp", "tiny", more) for more in ([], ["--precision", "bf16"], ["--checkpoint-activations"])),
     *((stage, "toy", []) for stage in parts.STAGES)],
    ids=str,
)  # fmt: skip
def test_fake_tensors_and_the_stand_in_for_ddp_take_what_real_ones_take(name, preset, more):
    argv = ["--preset", preset, "--ranks", "3", "--batch", "2", *more]
    fake, real = dry(name, *argv), dry(name, *argv, device="cpu")
    if name == "ddp":
        assert fake.pop("stand_in") and fake["sent"][0]["count"] > 1
        assert real["peak_where"].pop("module") == f"module.{fake['peak_where'].pop('module')}"  # one more around it
        fake.pop("curve"), real.pop("curve")
    assert fake == real


def test_the_table_and_its_json(tmp_path, capsys, monkeypatch):
    file = tmp_path / "memory.json"
    monkeypatch.setattr("sys.argv", ["memory", "--preset", "toy", "--ranks", "4", "--json", str(file)])
    memory.main()
    text, results = capsys.readouterr().out, json.loads(file.read_text())
    assert results["ranks"] == 4 and tuple(results["engines"]) == memory.registry.named("memory")
    for name, row in results["engines"].items():
        assert set(row["held_bytes"]) == set(HELD) and set(row["peak_parts"]) <= set(PARTS) and name in text
        assert sum(row["peak_parts"].values()) == row["peak_bytes"], "every byte of the peak has a name"
        assert row["state_peak_bytes"] <= row["peak_bytes"]
        assert row["peak_where"]["step"][0] in "12345", row["peak_where"]
        assert sum(one["bytes"] for one in row["sent"]) == pytest.approx(row["sent_bytes"], abs=3)
    assert "ddp (stand-in)" in text and "ddp (stand-in): from 24 GB on" in text


@pytest.mark.parametrize("name, sent", (("ddp", 2), ("zero1", 3), ("zero2", 2), ("fsdp2_no_reshard", 2)))
def test_traffic_in_elements_does_not_depend_on_the_precision(name, sent):
    """bfloat16 halves the bytes of a gather, and sends as many elements."""
    low = dry(name, "--preset", "toy", "--ranks", "4", "--precision", "bf16")
    full = dry(name, "--preset", "toy", "--ranks", "4")
    assert low["sent_elements"] == pytest.approx(sent * 34_688 * 3 / 4, rel=0.01)
    assert full["sent_elements"] == pytest.approx(low["sent_elements"], rel=0.01)
    assert (low["sent_bytes"] < full["sent_bytes"]) == (name != "ddp")


def test_which_gpu_is_enough():
    at_most = (24 - 2) * 10**9 / 1.05  # live bytes; 5% for gaps and 2 GB for CUDA and NCCL are assumed beside them
    assert memory.fits_on(at_most - 1) == [24, 40, 80, 141]
    assert memory.fits_on(at_most + 1) == [40, 80, 141]
    assert memory.fits_on(139 * 10**9) == []


def test_out_of_memory_is_a_row(monkeypatch):
    def full(name, options, device):
        if name == "ddp":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 500.00 MiB. GPU 0 has 1 GiB.")
        return plain(name, options, device)

    plain = memory._measure
    monkeypatch.setattr(memory, "_measure", full)
    results = memory.measure_all(memory.arguments(["--preset", "toy", "--engines", "ddp,zero3"]))
    assert results["engines"]["ddp"] == {"out_of_memory": "CUDA out of memory"}
    assert "ddp: OUT OF MEMORY here. CUDA out of memory" in memory.report(results)
    assert "zero3: from 24 GB on" in memory.report(results)


def test_a_dry_run_keeps_what_it_has_after_each_engine():
    kept = []
    options = memory.arguments(["--preset", "toy", "--ranks", "2", "--engines", "zero1,zero3"])
    last = memory.measure_all(options, keep=lambda found: kept.append(json.loads(json.dumps(found))))
    assert [list(found["engines"]) for found in kept] == [["zero1"], ["zero1", "zero3"]]
    assert kept[-1] == json.loads(json.dumps(last))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="torch sees no GPU"):
        memory.arguments(["--device", "cuda"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", memory.registry.named("memory"))
def test_real_allocations_are_close_to_the_dry_run(name):
    argv = ["--preset", "small", "--ranks", "4"]
    fake, real = dry(name, *argv), dry(name, *argv, device="cuda")
    assert real["held_bytes"] == fake["held_bytes"]
    assert real["peak_bytes"] == pytest.approx(fake["peak_bytes"], rel=0.05)


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


def elements_by_dimension(row: dict) -> Counter:
    sent = Counter()
    for one in row["sent"]:
        sent[one["where"]] += one["elements"]
    return +sent


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
    sent = elements_by_dimension(row)
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
    assert elements_by_dimension(dry("ddp", *argv)) == {"all ranks": 2 * 34_688 * 3 / 4}


def test_the_table_by_dimension(capsys, monkeypatch):
    argv = ["--preset", "toy", "--ranks", "6", "--replicas", "2", "--engines", "ddp,zero2,fsdp2"]
    monkeypatch.setattr("sys.argv", ["memory", *argv])
    memory.main()
    text = capsys.readouterr().out
    _, titles, ddp, zero2, fsdp2, grid = text.partition("Sent by one rank")[2].partition("\n\n")[0].splitlines()
    assert re.split("  +", titles) == ["engine", "together", "row", "across replicas", "all ranks"]
    assert ddp.startswith("ddp") and ddp.endswith("(2.000 Ψ (N-1)/N) in 1") and "2.000 Ψ/S (R-1)/R" in zero2
    for name, line in (("zero2", zero2), ("fsdp2", fsdp2)):
        assert line.startswith(name)
        for elements in elements_by_dimension(dry(name, *argv[:6])).values():
            assert f" {4 * elements / 1e6:.3f} (" in line
    assert "R = 2 rows of S = 3 ranks" in grid


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
    assert row["sent"] == plain["sent"]


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
