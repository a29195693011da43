"""Managed by nobody

Symptom: The losses differ, the first one only on rank 1. There is one all-gather and one reduce-scatter less, and the
optimizer holds less.

Clue: Which parameters are in no unit?

Hint: `ZeRO3.partition` in zero3.py, in step 0.

Answer: Each block becomes a unit, and the parameters outside all blocks are forgotten: the embeddings and the last
norm. They are not broadcast, not reduced, and not in the optimizer. Each rank keeps its own initial values forever.

Unnoticed: The blocks learn, so the loss falls. An embedding with random values works quite well, and every list of the
units looks complete.

Read: zero3.py, `parameters_by_unit`: the root has the parameters that are in no unit.
"""

from zero3 import ZeRO3

STAGE = "zero3"
DIFFERS = {
    "losses",
    "parameters held",
    "gradients held",
    "optimizer held",
    "gathered at once in forward",
    "sent",
    "reduce-scatters",
    "all-gathers",
    "reductions inside backward",
}
CAUGHT_BY = "tests/conformance/test_values.py::test_trains_as_one_process"


class WithoutRoot(ZeRO3):
    def partition(self, modules):
        units = []
        for index, module in enumerate(modules):
            units += self.make_units(f"block {index}", module, list(module.named_parameters()))
        return units


def build(model, optimizer, device):
    return WithoutRoot(model, optimizer)
