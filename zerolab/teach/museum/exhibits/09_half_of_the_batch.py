"""Half of the batch

Symptom: The losses differ from the second step on. There are two backwards before each step.

Clue: Which of the two backwards does the update contain?

Hint: `Reduction.deliver` in zero2.py, at the end of step 3.

Answer: The shard that arrives from a reduction replaces the one from an earlier backward of the same step. It should be
added. So only the last micro-batch counts.

Unnoticed: With one backward per step it is correct. With several, the gradient of one micro-batch is still a gradient,
only noisier, and half as large because each loss is divided by the number of micro-batches.

Read: zero2.py, `deliver`: `shard.grad += self.shard_gradient`.
"""

from zero2 import Reduction, ZeRO2
from zerolab.teach.museum.loop import sgd

STAGE = "zero2"
DIFFERS = {"losses"}
CAUGHT_BY = "tests/conformance/test_loops.py::test_several_backwards_before_a_step_add_up"
MICRO_BATCHES = 2
make_optimizer = sgd


class ReplacingReduction(Reduction):
    def deliver(self):
        self.bucket.shard.grad = self.shard_gradient


class LastBackwardOnly(ZeRO2):
    def make_reduction(self, bucket):
        return ReplacingReduction(bucket)


def build(model, optimizer, device):
    return LastBackwardOnly(model, optimizer)
