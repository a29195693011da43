"""Random training programs compute what one process computes in float64 (random_programs.py)."""

import dataclasses
import runpy
from unittest.mock import patch

import pytest
from random_models import Model, Part
from random_programs import Program, as_script, draw, kind_of, report_of, run_on_rank, shorten

from zero1 import ZeRO1
from zerolab.run.pool import run_on_ranks

USUAL = range(24)  # each stage and engine on 1, 2, 3 and 4 ranks
MORE = range(24, 320)


@pytest.mark.parametrize("seed", [*USUAL, *(pytest.param(seed, marks=pytest.mark.long) for seed in MORE)])
def test_a_program_computes_what_one_process_computes(seed):
    report = report_of(seed)
    assert not report, report


TRAINING = Program(
    "zero1.py",
    2,
    Model((Part("attention"), Part("turned", returns="dataclass"))),
    operations=(("forward", 1), ("backward", 1, ""), ("step",), ("zero_grad",), ("evaluate", 2, True)),
)


def test_a_stage_that_is_wrong_is_found():
    """Gradients that are summed and never averaged."""
    run_on_ranks(2, run_without_average)


def run_without_average():
    def finish_reduce(self, bucket):
        bucket.shard.grad = bucket.gradient[bucket.own]

    assert run_on_rank(TRAINING) == ""
    with patch.object(ZeRO1, "finish_reduce", finish_reduce), pytest.raises(AssertionError, match="an evaluation"):
        run_on_rank(TRAINING)


def test_a_failing_program_is_made_as_small_as_possible():
    """Say that every program fails that steps after a backward, in a network with a frozen attention."""

    def run(program):
        names = [name for name, *_ in program.operations]
        frozen = any(part.kind == "attention" and part.frozen for part in program.model.parts)
        fails = frozen and "backward" in names and "step" in names[names.index("backward") :]
        return ("AssertionError: the loss of batch 1 differs by 0.1" if fails else ""), False

    model = Model((Part("attention", "first", "inside"), Part("linear", side_loss="kept")), tied=True)
    program = dataclasses.replace(TRAINING, model=model, optimizer="adamw", options={"bucket_mb": 0})
    small, _ = shorten(program, run(program)[0], 60, run)
    assert small == Program(
        "zero1.py", 1, Model((Part("attention", "first"),)), operations=(("backward", 1, ""), ("step",))
    )


def test_kinds_of_failures():
    """A shorter program must fail in the same way, not with the same numbers."""
    assert kind_of("the loss of batch 1: differs by 0.1") == kind_of("the loss of batch 2: differs by 2e-05")
    assert kind_of("the loss of batch 1: differs by 0.1") != kind_of("an evaluation: differs by 0.1")


def test_what_is_printed_can_be_run(tmp_path):
    """A printed program is the same program."""
    for seed in USUAL:
        (tmp_path / "program.py").write_text(as_script(draw(seed)))
        assert runpy.run_path(str(tmp_path / "program.py"))["program"] == draw(seed)
