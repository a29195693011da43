"""The dry run: an article's gigabytes, formulas of the peak, the stand-in for DDP, the table, and refusals."""

import argparse
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zerolab.measure import dry_run, gpus, memory, memory_formulas
from zerolab.measure.fake_ranks import fake_ranks
from zerolab.measure.ledger import HELD, PARTS, PartsLedger
from zerolab.measure.memory import all_tables
from zerolab.measure.watched_step import watched_step
from zerolab.run import enough_memory, names
from zerolab.run.engines import CHAPTERS
from zerolab.run.model import GPTConfig, next_token_loss, number_of_parameters, preset
from zerolab.teach.articles.runs import dry_run as dry_run_of_articles

thorough = partial(pytest.param, marks=pytest.mark.thorough)
RESULTS = Path(__file__).parent.parent / "results"


def dry(name: str, *argv: str, device: str = "fake") -> dict:
    options = memory.arguments(list(argv))
    options.device = device
    return memory.measure_alone(name, options)


@pytest.mark.parametrize(
    "name, gigabytes",
    (thorough("zero1", 63), thorough("zero2", 38.5), thorough("zero3", 14)),
)
def test_the_articles_table_of_7b_on_8_gpus(name, gigabytes):
    row = dry_run_of_articles(name)  # run once for this and for the articles' tests
    written = json.loads((RESULTS / "memory-7b-8ranks.json").read_text())["engines"]
    assert json.loads(json.dumps(row)) == written[name], "results/ is not what the code gives"
    assert written["zero3"]["peak_bytes"] <= written["fsdp2"]["peak_bytes"]
    held = sum(row["held_bytes"].values())
    assert held == pytest.approx(gigabytes * 1e9, rel=0.005)
    # All that the formula does not say: AdamW's counters, 4 bytes each. No bucket of this model needs padding.
    assert held - row["formula_bytes"] == row["difference_bytes"] == row["step_counters_bytes"] > 0
    assert row["state_peak_bytes"] == pytest.approx(row["state_peak_formula_bytes"], rel=0.01)


@pytest.mark.parametrize(
    "stage, own, ranks",
    [
        ("zero1", {"bucket_mb": 25}, 2),
        ("zero2", {"bucket_mb": 1}, 100),
        ("zero3", {"prefetch": 1}, 100),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, thorough(False)])
def test_the_peak_is_what_its_formula_says(stage, own, ranks, tied):
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with fake_ranks(ranks), FakeTensorMode(allow_non_fake_inputs=True), PartsLedger() as ledger:
        model = dry_run.make_model(GPTConfig(4, 256, 4, seq=64, tied=tied), torch.device("cpu"))
        letters = memory_formulas.letters(model, ranks, **own)
        engine = CHAPTERS[stage](model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), **own)
        engine.training_step(tokens, tokens, next_token_loss)
        with watched_step(engine, ledger) as seen:
            engine.training_step(tokens, tokens, next_token_loss)
    state = ledger.peak_moment(of=lambda moment: moment.state).state
    formula = memory_formulas.PEAKS[stage].bytes(letters)
    if stage == "zero3" and not tied:
        formula += model.head.weight.nbytes  # H of zero3.py's head: the root's first gradient waits for its last
    assert state == pytest.approx(formula, rel=0.01)
    # With two tokens there is hardly anything else, so this is the peak itself.
    assert seen.peak == pytest.approx(state, rel=0.03)


@pytest.mark.long
def test_zero3_peaks_no_higher_than_fsdp2():
    """From two ranks on. On one rank AdamW's temporary copies of a unit's flat shard are the peak."""
    argv = ["--preset", "tiny", "2", "--seq", "16"]
    ours, theirs = dry("zero3", *argv), dry("fsdp2", *argv)
    assert ours["peak_bytes"] <= theirs["peak_bytes"]
    assert ours["sent_bytes"] <= theirs["sent_bytes"]


@pytest.mark.parametrize(
    "name, preset",
    [pytest.param("ddp", "tiny", marks=pytest.mark.long), *(thorough(stage, "toy") for stage in CHAPTERS)],
)
def test_fake_tensors_and_the_stand_in_for_ddp_take_what_real_ones_take(name, preset):
    argv = ["--preset", preset, "3", "--batch", "2"]
    fake, real = dry(name, *argv), dry(name, *argv, device="cpu")
    if name == "ddp":
        assert fake.pop("stand_in") and fake["sent"]["all-reduce"]["count"] > 1
        assert real["peak_where"].pop("module") == f"module.{fake['peak_where'].pop('module')}"  # one more around it
        fake.pop("curve"), real.pop("curve")
    assert fake == real


@pytest.mark.long
def test_the_table_and_its_json(tmp_path, capsys, monkeypatch):
    file = tmp_path / "memory.json"
    monkeypatch.setattr("sys.argv", ["memory", "--preset", "toy", "4", "--json", str(file)])
    memory.main()
    text, results = capsys.readouterr().out, json.loads(file.read_text())
    assert results["ranks"] == 4 and tuple(results["engines"]) == names.engines_of("memory")
    for name, row in results["engines"].items():
        assert set(row["held_bytes"]) == set(HELD) and set(row["peak_parts"]) <= set(PARTS) and name in text
        assert sum(row["peak_parts"].values()) == row["peak_bytes"], "every byte of the peak has a name"
        assert row["state_peak_bytes"] <= row["peak_bytes"]
        assert row["peak_where"]["step"][0] in "12345", row["peak_where"]
        assert sum(one["bytes"] for one in row["sent"].values()) == pytest.approx(row["sent_bytes"], abs=3)
    assert "ddp (stand-in)" in text and "ddp (stand-in): from 24 GB on" in text


def test_traffic_in_elements_does_not_depend_on_the_precision():
    """bfloat16 halves the bytes of a gather, and sends as many elements: three times Ψ (N-1)/N in ZeRO-1."""
    low = dry("zero1", "--preset", "toy", "4", "--dtype", "bf16")
    full = dry("zero1", "--preset", "toy", "4")
    assert low["sent_elements"] == pytest.approx(3 * 34_688 * 3 / 4, rel=0.01)
    assert full["sent_elements"] == pytest.approx(low["sent_elements"], rel=0.01)
    assert low["sent_bytes"] < full["sent_bytes"]


# 5% for gaps and 2 GB for CUDA and NCCL are assumed, so a GPU of 24 GB has room for 22e9 / 1.05 bytes.
@pytest.mark.parametrize(
    "peak, fits", [(20_952_380_951, [24, 40, 80, 141]), (20_952_380_953, [40, 80, 141]), (139e9, [])]
)
def test_which_gpu_is_enough(peak, fits):
    assert gpus.fits_on(peak) == fits


def test_out_of_memory_is_a_row(monkeypatch):
    def full(name, options, device):
        if name == "ddp":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 500.00 MiB. GPU 0 has 1 GiB.")
        return plain(name, options, device)

    plain = dry_run.watched_row
    monkeypatch.setattr(dry_run, "watched_row", full)
    options = memory.arguments(["--preset", "toy", "--engines", "ddp,zero3"])
    results = memory.measure_all(options)
    assert results["engines"]["ddp"] == {"out_of_memory": "CUDA out of memory"}
    text = all_tables(results)
    assert "ddp: OUT OF MEMORY here. CUDA out of memory" in text
    assert text.index("zero3: from 24 GB on") < text.index("Held by one rank")  # the answer comes first


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="torch sees no GPU"):
        memory.arguments(["--device", "cuda"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", names.engines_of("memory"))
def test_real_allocations_are_close_to_the_dry_run(name):
    argv = ["--preset", "small", "4"]
    fake, real = dry(name, *argv), dry(name, *argv, device="cuda")
    assert real["held_bytes"] == fake["held_bytes"]
    assert real["peak_bytes"] == pytest.approx(fake["peak_bytes"], rel=0.05)


def test_a_models_parameters_are_counted_without_building_it():
    for name, shape in names.PRESETS.items():
        assert enough_memory.parameters(shape) == number_of_parameters(preset(name)), name


def test_what_does_not_fit_is_refused_and_the_largest_preset_that_does_is_named(monkeypatch):
    options = argparse.Namespace(preset="medium", timed_steps=0, anyway=False)
    need = 2 * enough_memory.needed(options, "medium", ["ddp", "zero3"], 2)
    assert need == 2 * 16 * number_of_parameters(preset("medium"))  # DDP's, which is the larger one
    monkeypatch.setattr(enough_memory, "free_bytes", lambda: need)
    enough_memory.refuse_too_large(options, ["ddp", "zero3"], 2, 2)
    monkeypatch.setattr(enough_memory, "free_bytes", lambda: need - 1)
    with pytest.raises(ValueError, match=r"2 rank\(s\) need 9.7 GB or more, .* use --preset small, or --anyway"):
        enough_memory.refuse_too_large(options, ["ddp", "zero3"], 2, 2)
    options.anyway = True
    enough_memory.refuse_too_large(options, ["ddp", "zero3"], 2, 2)


def test_engines_that_are_timed_together_need_their_states_together():
    options = argparse.Namespace(timed_steps=3)
    need = enough_memory.needed(options, "70b", ["ddp", "zero3"], 4)
    assert need == 16 * number_of_parameters(preset("70b")) * (1 + 1 / 4)
