"""Equal to the last digit

Symptom: All losses are equal. The optimizer holds more, and the peaks are higher.

Clue: By which factor is it more? What does the optimizer update?

Hint: `ZeRO1.take_over_optimizer` in zero1.py, in step 0.

Answer: The optimizer keeps the whole parameters. Their gradients are also whole, and hold the mean over all ranks. So
every rank updates all parameters, and the all-gather sends values that every rank already has. This is DDP with more
traffic.

Unnoticed: Every test of the losses passes, to the last bit. Only somebody who counts bytes sees that nothing is
sharded.

Read: zero1.py, `take_over`.
"""

from zero1 import ZeRO1

STAGE = "zero1"
DIFFERS = {"optimizer held", "peak in forward", "peak in backward"}
CAUGHT_BY = "tests/conformance/test_memory.py::test_held_bytes_are_the_accounting"


class WholeOptimizer(ZeRO1):
    def take_over_optimizer(self):
        pass  # it has the model's parameters already


def build(model, optimizer, device):
    return WholeOptimizer(model, optimizer)
