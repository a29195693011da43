"""The learning rate that was tuned on one GPU

Symptom: The losses differ from the second step on.

Clue: By which factor is an SGD step too long, on two ranks and on four?

Hint: `ZeRO1.finish_reduce` in zero1.py, in step 3.

Answer: The all-reduce adds up the gradients of all ranks, and nobody divides the sum by N. So the step grows with the
number of ranks.

Unnoticed: AdamW divides a gradient by its own size, so the factor drops out. Only SGD and clipping show it. With a
small learning rate the longer steps even look better.

Read: zero1.py, `finish_reduce`, and "What goes wrong if you delete a line" at the end.
"""

from zero1 import ZeRO1
from zerolab.teach.museum.loop import sgd

STAGE = "zero1"
DIFFERS = {"losses"}
CAUGHT_BY = "tests/conformance/test_values.py::test_trains_as_one_process"
make_optimizer = sgd


class WithoutMean(ZeRO1):
    def finish_reduce(self, bucket):
        bucket.shard.grad = bucket.gradient[bucket.own]


def build(model, optimizer, device):
    return WithoutMean(model, optimizer)
