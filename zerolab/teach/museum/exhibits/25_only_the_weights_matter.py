"""Only the weights matter

Symptom: The losses are equal until the run is resumed, before the third step, and in this step too. After it they
differ.

Clue: The first loss after resuming is correct. What does AdamW need besides the weights?

Hint: `load` in this exhibit.

Answer: The weights are loaded, and the optimizer's state is not, although it is in the file. AdamW starts again at step
1, with moments of zero. Its first step then moves every element by the full learning rate, however small the gradient
is.

Unnoticed: The first loss after resuming, which people look at, depends only on the weights. In a long run the jump that
follows looks like a bad batch.

Read: zerolab/engine/checkpoint/loading.py, `load`.
"""

import torch
import torch.distributed as dist

from zero3 import ZeRO3

STAGE = "engines"
DIFFERS = {"losses"}
CAUGHT_BY = "tests/conformance/test_state_dict.py::test_a_resumed_run_continues_as_an_uninterrupted_one"
RESUME_AT = 2


class Checkpointed(ZeRO3):
    """ZeRO-3 that resumes on the same number of ranks. Each rank has its own file."""

    def file(self, folder):
        return folder / f"rank{dist.get_rank()}.pt"

    def save(self, folder):
        shards = [unit.shard.detach() for unit in self.units]
        torch.save({"shards": shards, "optimizer": self.optimizer.state_dict()}, self.file(folder))

    def load(self, folder):
        state = torch.load(self.file(folder))
        for unit, saved in zip(self.units, state["shards"]):
            unit.shard.detach().copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])


class WeightsOnly(Checkpointed):
    def load(self, folder):
        state = torch.load(self.file(folder))
        for unit, saved in zip(self.units, state["shards"]):
            unit.shard.detach().copy_(saved)


def build(model, optimizer, device):
    return WeightsOnly(model, optimizer)


def correct(model, optimizer, device):
    return Checkpointed(model, optimizer)
