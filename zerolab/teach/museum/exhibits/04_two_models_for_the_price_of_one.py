"""Two models for the price of one

Symptom: The losses differ from the second step on, and there are no all-gathers.

Clue: Which part of a rank's weights is new after its update?

Hint: `ZeRO1.step` in zero1.py.

Answer: Step 5 is missing. Every rank updates its own shard of the weights and never receives the other shards. So half
of its model is trained, and the other half keeps its initial values.

Unnoticed: The loss falls on every rank, because half of a model learns too. Nothing compares the ranks' weights.

Read: zero1.py, `gather_parameters`, and the example of two ranks in the docstring at the top: `5 gather`.
"""

from zero1 import ZeRO1

STAGE = "zero1"
DIFFERS = {"losses", "all-gathers", "sent"}
CAUGHT_BY = "tests/conformance/test_values.py::test_trains_as_one_process"


class WithoutGather(ZeRO1):
    def step(self):
        self.reduce_gradients()
        self.optimizer.step()


def build(model, optimizer, device):
    return WithoutGather(model, optimizer)
