"""The calmest gradients

Symptom: Every gradient norm is 0, and the losses differ from the second step on.

Clue: Where are the gradients when backward is over?

Hint: `Reduction` and `take_gradients` in zero2.py, and what `param.grad` is after backward.

Answer: `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)` looks at `param.grad`. In ZeRO-2 the gradients have
moved into the shards during backward, so it finds none. It returns 0 and clips nothing.

Unnoticed: In torch it is not an error to clip parameters without gradients. A norm of 0 in a log looks like a broken
metric. `ZeRO2Engine` raises an error when somebody reads a `param.grad` that has moved.

Read: zerolab/engine/clipping.py, `clip_grad_norm_`; zerolab/engine/parameters.py, `EngineParameter`.
"""

import torch

from zero2 import ZeRO2
from zerolab.engine import ZeRO2Engine
from zerolab.teach.museum.loop import sgd

STAGE = "engines"
DIFFERS = {"losses", "norms", "all-gathers", "sent"}
CAUGHT_BY = "tests/conformance/test_loops.py::test_clipping_takes_the_norm_of_the_whole_model"
MAX_NORM = 0.5
make_optimizer = sgd


class ClipParameters(ZeRO2):
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)


def build(model, optimizer, device):
    return ClipParameters(model, optimizer)


def correct(model, optimizer, device):
    return ZeRO2Engine(model, optimizer)
