"""Two opinions about a norm

Symptom: The gradient norm differs between the ranks, and the losses differ from the second step on.

Clue: There is one all-gather less per step. What must the ranks exchange before they clip?

Hint: `clip_grad_norm_` in zerolab/engine/clipping.py.

Answer: Every rank clips by the norm of its shards only. The correct norm is the norm of all shards together: the
squares must be summed over the ranks. Otherwise each rank scales its shards by a different factor.

Unnoticed: Logs usually come from rank 0, and its norm looks plausible. Clipping too little is rarely fatal.

Read: zerolab/engine/clipping.py, `clip_grad_norm_`: `all_gather`.
"""

import torch

from zero3 import ZeRO3
from zerolab.engine import ZeRO3Engine
from zerolab.teach.museum.loop import sgd

STAGE = "engines"
DIFFERS = {"losses", "norms", "all-gathers", "sent"}
CAUGHT_BY = "tests/conformance/test_loops.py::test_clipping_takes_the_norm_of_the_whole_model"
MAX_NORM = 0.5
make_optimizer = sgd


class ClipShards(ZeRO3):
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        return torch.nn.utils.clip_grad_norm_([unit.shard for unit in self.units], max_norm, norm_type)


def build(model, optimizer, device):
    return ClipShards(model, optimizer)


def correct(model, optimizer, device):
    return ZeRO3Engine(model, optimizer)
