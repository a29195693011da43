"""Random training programs compute what one process computes in float64 (random_programs.py)."""

import runpy
from unittest.mock import patch

import pytest
from random_models import Model, Part
from random_programs import Program, as_script, draw, report_of, run_on_rank

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

    run_on_rank(TRAINING)
    with patch.object(ZeRO1, "finish_reduce", finish_reduce), pytest.raises(AssertionError, match="an evaluation"):
        run_on_rank(TRAINING)


def test_what_is_printed_can_be_run(tmp_path):
    """A printed program is the same program."""
    for seed in USUAL:
        (tmp_path / "program.py").write_text(as_script(draw(seed)))
        assert runpy.run_path(str(tmp_path / "program.py"))["program"] == draw(seed)
