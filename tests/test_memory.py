"""The dry run: an article's gigabytes, the formulas of the peak, the stand-in for DDP, and what it refuses."""

import json
from functools import partial
from pathlib import Path

import parts
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.measure import memory
from harness.measure.fake_ranks import fake_ranks
from harness.measure.parts import HELD, PARTS, PartsLedger
from harness.run.model import PRESETS, next_token_loss
from harness.teach.articles.memory import dry as articles_dry

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


@pytest.mark.parametrize("more", ([], ["--precision", "bf16"], ["--checkpoint-activations"]), ids=str)
def test_the_stand_in_is_ddp_byte_for_byte(more):
    argv = ["--preset", "tiny", "--ranks", "2", "--batch", "2", *more]
    stand_in, real = dry("ddp", *argv), dry("ddp", *argv, device="cpu")
    assert stand_in.pop("stand_in") and "stand_in" not in real
    where = [row["peak_where"].pop("module") for row in (stand_in, real)]
    assert where[1] == f"module.{where[0]}"  # DDP wraps the model in one more
    for row in (stand_in, real):
        row.pop("curve")
    assert stand_in == real
    assert stand_in["collectives"]["all-reduce"] > 1 and sum(stand_in["peak_parts"].values()) == stand_in["peak_bytes"]


@pytest.mark.parametrize("stage", parts.STAGES)
def test_fake_tensors_take_what_real_ones_take(stage):
    argv = ["--preset", "toy", "--ranks", "3", "--batch", "2"]
    fake, real = dry(stage, *argv), dry(stage, *argv, device="cpu")
    assert fake == real


def test_activations_follow_batch_and_sequence():
    def activations(*argv):
        row = dry("zero2", "--preset", "toy", *argv)
        return max(row["curve"]["activations"])

    one = activations("--batch", "1", "--seq", "16")
    assert activations("--batch", "4", "--seq", "16") == pytest.approx(4 * one, rel=0.1)  # the curve is rounded
    assert activations("--batch", "1", "--seq", "32") == pytest.approx(2 * one, rel=0.1)  # the curve is rounded
    assert activations("--batch", "1", "--seq", "16", "--checkpoint-activations") < 0.5 * one


def test_the_table_and_its_json(tmp_path, capsys, monkeypatch):
    file = tmp_path / "memory.json"
    monkeypatch.setattr("sys.argv", ["memory", "--preset", "toy", "--ranks", "4", "--json", str(file)])
    memory.main()
    text, results = capsys.readouterr().out, json.loads(file.read_text())
    assert results["ranks"] == 4 and tuple(results["engines"]) == memory.registry.named("memory")
    for name, row in results["engines"].items():
        assert set(row["held_bytes"]) == set(HELD) and set(row["peak_parts"]) <= set(PARTS) and name in text
        assert sum(row["peak_parts"].values()) == row["peak_bytes"], "every byte of the peak has a name"
        assert sum(row["state_peak_parts"].values()) == row["state_peak_bytes"] <= row["peak_bytes"]
        assert row["peak_where"]["step"][0] in "12345", row["peak_where"]
        assert sum(row["sent_by_collective"].values()) == pytest.approx(row["sent_bytes"], abs=3)
    assert "ddp (stand-in)" in text and "24 GB: ddp is the first that fits" in text


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
    assert "24 GB: zero3 is the first that fits" in memory.report(results)


@pytest.mark.parametrize(
    "argv, said",
    (
        (["--preset", "8b"], ["'8b'", "70b"]),
        (["--precision", "fp8"], ["'fp8'", "fp32 or bf16"]),
        (["--ranks", "0"], ["--ranks", "0"]),
        (["--up-to", "0"], ["--up-to", "0"]),
        (["--seq", "4096"], ["4096", "2048"]),
        (["--engines", "zero4"], ["'zero4'", "zero3"]),
        (["--device", "tpu"], ["'tpu'", "fake or cuda"]),
        (["--replicas", "0"], ["--replicas", "0"]),
        (["--replicas", "3"], ["--replicas", "3", "8"]),
        (["--replicas", "2", "--up-to", "8"], ["--replicas", "--up-to"]),
        (["--offload", "--engines", "ddp"], ["'ddp'", "--offload", "zero1"]),
        (["--json", "/nowhere/x.json"], ["/nowhere/x.json"]),
        (["--json", "/"], ["'/'"]),
    ),
)
def test_bad_input_is_named(argv, said):
    with pytest.raises(ValueError) as error:
        memory.arguments(argv)
    assert all(word in str(error.value) for word in said), error.value


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
