"""Fine-tuning

Symptom: The losses differ. On rank 0 the first one is correct, and on rank 1 not even that. A parameter is frozen.

Clue: Which values are broadcast at the start, and which are not?

Hint: `ZeRO2.broadcast_untrained` in zero2.py, in step 0.

Answer: Only the trained parameters are broadcast at the start. Each rank keeps its own initial values of the frozen
ones. Nothing ever makes them equal, so the ranks train different models.

Unnoticed: Frozen parameters usually come from a file that all ranks read. One that is initialized at random, such as
these position embeddings, is rare.

Read: zero2.py, `broadcast_untrained`; zero1.py, `broadcast_whole`.
"""

from zero1 import broadcast_whole
from zero2 import ZeRO2
from zerolab.teach.museum import loop

STAGE = "zero2"
DIFFERS = {"losses"}
CAUGHT_BY = "tests/conformance/test_values.py::test_all_ranks_start_with_rank_0s_weights"


def make_model(seed):
    model = loop.make_model(seed)
    model.positions.weight.requires_grad_(False)
    return model


class TrainedOnly(ZeRO2):
    def broadcast_untrained(self):
        broadcast_whole(self.model.buffers(), self.group)


def build(model, optimizer, device):
    return TrainedOnly(model, optimizer)
