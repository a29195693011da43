"""Momentum from nowhere

Symptom: The losses differ from the third step on.

Clue: The first update is correct, and all later ones are not. Which gradients does the second update contain?

Hint: `ZeRO1.zero_grad` in zero1.py.

Answer: Nobody clears the gradient buffer. Autograd adds each step's gradients to what is there, so the sum of all steps
is sent. A sum over all steps is momentum that nobody asked for.

Unnoticed: `shard.grad` is None after `zero_grad()`, which looks cleared. And momentum often helps.

Read: zero1.py, `make_gradient` and `zero_grad`: `bucket.gradient.zero_()`.
"""

from zero1 import ZeRO1
from zerolab.teach.museum.loop import sgd

STAGE = "zero1"
DIFFERS = {"losses"}
CAUGHT_BY = "tests/conformance/test_values.py::test_trains_as_one_process"
make_optimizer = sgd


class NeverCleared(ZeRO1):
    def zero_grad(self):
        for bucket in self.buckets:
            bucket.shard.grad = None
            for param, grad in zip(bucket.params, bucket.grads):
                param.grad = grad


def build(model, optimizer, device):
    return NeverCleared(model, optimizer)
