"""A router's loss

Symptom: Each rank stops in its first backward, at a weight without memory.

Clue: It stops at the router, whose loss is not an output of its block. On which paths can backward reach a unit?

Hint: `ZeRO3.unpack` in zero3.py, in step 2.

Answer: This stage has only the hooks on a unit's outputs to notice that backward has reached the unit. The loss that a
block keeps in an attribute is not an output, and backward reaches this loss first. So the router's weights are read
while their unit is freed. Autograd asks for every weight that it saved, on every path, so `unpack` misses none of them.

Unnoticed: A model without such a loss trains correctly. With prefetch there may even be no error: the unit's gather is
in flight, nobody has waited for it, and backward reads whatever is in memory.

Read: zero3.py, `unpack` and `on_output`, and the comment above them.
"""

import torch
from torch import nn

from zero3 import ZeRO3
from zerolab.teach.museum import loop
from zerolab.teach.museum.loop import SHAPE

STAGE = "zero3"
DIFFERS = {"error"}
CAUGHT_BY = "tests/conformance/test_models.py::test_unusual_graphs"


class Routed(nn.Module):
    """A block with a router that keeps its loss in an attribute, like a mixture of experts."""

    def __init__(self, block):
        super().__init__()
        self.block = block
        self.router = nn.Linear(SHAPE.width, 4)

    def forward(self, x):
        x = self.block(x)
        self.extra_loss = torch.softmax(self.router(x), -1).mean((0, 1)).square().sum()
        return x


def make_model(seed):
    model = loop.make_model(seed)
    model.blocks = nn.ModuleList(Routed(block) for block in model.blocks)
    loop.reinitialize(model, seed)
    return model


class OutputsOnly(ZeRO3):
    def unpack(self, saved):
        tensor, version = saved
        return tensor


def build(model, optimizer, device):
    return OutputsOnly(model, optimizer, prefetch=0)


def correct(model, optimizer, device):
    return ZeRO3(model, optimizer, prefetch=0)
