"""Tests of the exercise zero1_2psi: step 3 by a reduce-scatter."""

import pytest

from zerolab.run.counterparts import ZeRO1By2Psi
from zerolab.teach.check.helpers import on_ranks, same_memory, same_training
from zerolab.teach.check.test_zero1 import TRAININGS


@pytest.mark.parametrize("at", TRAININGS)
@on_ranks
def test_training(stage, at):
    same_training(stage, ZeRO1By2Psi, at, **TRAININGS[at])


@on_ranks
def test_memory(stage):
    same_memory(stage, ZeRO1By2Psi)
