"""What the three chapters promise. Every rank has its own data in every test.

`ranks` is the number of processes that run the body of a test at the same time.
"""

import pytest
import torch

from helpers import (
    Blocks, Dtypes, Frozen, MOMENTUM, Nested, Pair, Recomputed, Recorder, Tied, Tiny, Twice, on_every_rank, seeded,
)
from zero1 import ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3

STAGES = pytest.mark.parametrize("stage", [ZeRO1, ZeRO2, ZeRO3])
RANKS = pytest.mark.parametrize("ranks", [2, *[pytest.param(n, marks=pytest.mark.long) for n in (1, 3, 4)]])
MODELS = [Blocks, Tied, Frozen, Recomputed, Twice, Tiny, Dtypes, Nested]


@RANKS
@STAGES
@pytest.mark.parametrize("make", MODELS)
@on_every_rank
def test_trains_as_one_process(ranks, stage, make):
    """Losses and weights equal those of one process that trains on the batches of all ranks."""
    Pair(stage, seeded(make)).train()
