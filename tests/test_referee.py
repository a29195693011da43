"""The referee's proof in float64: wrong engines are found on any number of ranks, unusual correct ones match.

Each engine is the listing of docs/your-engine.md with some lines changed (pages_engine.py), in a file like a user's.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pages_engine import CORRECT, WRONG, changed

import fsdp2_compare as referee
from zerolab.measure import proof, referee_report
from zerolab.run import engine_file
from zerolab.run.data import load_text
from zerolab.run.engines import ENGINES
from zerolab.run.pool import run_on_ranks


def run(difference: float, float64: float | None, tolerance: float) -> dict:
    match = difference <= tolerance and (float64 is None or float64 <= proof.TOLERANCE)
    return {"difference": difference, "float64_difference": float64, "tolerance": tolerance, "match": match}


def test_the_verdict_has_what_is_proved_and_what_is_not():
    runs = {
        "ddp": run(0.0, 1e-15, 0.0),
        "zero1": run(0.0, 2e-15, 0.0),
        "single": run(2e-2, None, 0.1),
        "deepspeed1": run(1e-2, None, 0.1),
    }
    text = referee_report.verdict({"runs": runs, "dtype": "bf16", "steps": 3}, "ddp")
    assert text.startswith("MATCH: all 4 engines train alike.\nFloat64 pass: 4 steps of SGD")
    assert "whole batch: ddp, zero1. Their losses differ by at most 2e-15 (1e-12 is allowed)" in text
    assert "cannot train in float64: deepspeed1." in text
    assert "3 steps of AdamW in bfloat16. Losses are equal to ddp to the bit: zero1; within 2.0e-02 of ddp" in text
    assert "Not proved: the casts to bfloat16" in text
    late = {"resets_momentum": run(0.01, 1e-15, 1e-3)}  # after the steps of the proof
    runs |= {"adds_up": run(1e-6, 0.2, 1e-3), "diverges": run(float("nan"), 1e-15, 1e-3), **late}
    text = referee_report.verdict({"runs": runs, "dtype": "fp32", "steps": 3}, "ddp")
    wrong, diverges, resets, *others = text.splitlines()
    assert wrong.startswith("DOES NOT MATCH: adds_up does not compute what one process computes") and "by 0.2" in wrong
    assert diverges == "DOES NOT MATCH: diverges is off by nan from ddp in float32, allowed 0.001."
    assert resets == "DOES NOT MATCH: resets_momentum is off by 0.01 from ddp in float32, allowed 0.001."
    assert "MATCH: all" not in text
    naming = [line for line in others if any(name in line for name in ("adds_up", "diverges", "resets_momentum"))]
    (line,) = naming  # an engine that does not match is in no list of those that do
    assert line.startswith("The float64 pass did not find what is wrong with diverges, resets_momentum: ")


def difference(file: str, accumulate: int) -> float:
    """On one rank: what the referee's first pass finds of the engine in a file."""
    with mock.patch.dict(ENGINES):
        (name,) = engine_file.enter([file])
        options = referee.arguments(["--preset", "toy", "--engines", "ddp", "--accumulate", str(accumulate)])
        options.engines = [name]
        world = referee.World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", "")
        return referee.Referee(options, load_text(None, 32), world).prove()[name]


def found(folder, name: str, change: tuple[str, str], world_size: int, accumulate: int) -> float:
    (folder / f"{name}.py").write_text(changed(*change))
    everywhere = run_on_ranks(world_size, difference, file=str(folder / f"{name}.py"), accumulate=accumulate)
    assert len(set(everywhere)) == 1
    return everywhere[0]


# {engine: (ranks, micro-batches)}. Each needs something else of the proof: sums in float64, every parameter, several
# steps, the user's optimizer, every rank, every micro-batch.
WRONG_ON = {
    "reduces_in_float32": (3, 2),
    "leaves_out_a_bias": (3, 2),
    "forgets_momentum": (2, 1),
    "rate_off_by_1e-5": (3, 1),
    "no_weight_decay": (2, 2),
    "one_rank_does_not_count": (3, 1),
    "keeps_the_last_micro_batch": (2, 2),
}


@pytest.mark.parametrize("name", WRONG_ON)
def test_a_wrong_engine_is_found(tmp_path, name):
    """The one that sums and does not average is found by conformance: test_conform.py."""
    assert found(tmp_path, name, WRONG[name], *WRONG_ON[name]) > 100 * proof.TOLERANCE


CORRECT_ON = {
    "passes_gradients_around_a_ring": (3, 1),
    "splits_the_batch": (3, 2),
    "does_not_align": (2, 2),
    "keeps_buckets_of_its_own": (2, 1),
}


@pytest.mark.parametrize("name", CORRECT_ON)
def test_an_unusual_correct_engine_matches(tmp_path, name):
    """Sums in another order, more backwards than forwards, other places, an attribute that ours have, too."""
    assert found(tmp_path, name, CORRECT[name], *CORRECT_ON[name]) < proof.TOLERANCE / 10
