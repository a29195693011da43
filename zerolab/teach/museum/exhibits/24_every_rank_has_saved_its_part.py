"""Every rank has saved its part

Symptom: The losses are equal until the run is resumed from a checkpoint, before the third step.

Clue: How could a reader of the files distinguish the shards of different ranks?

Hint: `shards` in this exhibit, the names in the checkpoint.

Answer: Every rank gives its shards to `torch.distributed.checkpoint` as plain tensors, under names that are the same on
every rank. To torch, one name means one tensor with a copy on every rank. So torch writes one of the copies, and every
rank loads this one. The other shards are not in the files. A rank must declare which part of which tensor it saves.

Unnoticed: Saving succeeds, and loading succeeds. The loss after resuming is bad but finite, and a folder of files gives
no hint that half of the model is missing.

Read: zerolab/engine/checkpoint/rectangles.py, the docstring at the top.
"""

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from zero3 import ZeRO3
from zerolab.teach.museum.loop import sgd

STAGE = "engines"
DIFFERS = {"losses"}
CAUGHT_BY = "tests/conformance/test_state_dict.py::test_a_resumed_run_continues_as_an_uninterrupted_one"
RESUME_AT = 2
make_optimizer = sgd  # it keeps nothing between steps, so only the shards have to be saved


class Checkpointed(ZeRO3):
    """ZeRO-3 that resumes on the same number of ranks. Each shard has the rank in its name."""

    def shards(self):
        return {f"{unit.name}, shard {dist.get_rank()}": unit.shard.detach() for unit in self.units}

    def save(self, folder):
        dcp.save(self.shards(), checkpoint_id=folder)

    def load(self, folder):
        dcp.load(self.shards(), checkpoint_id=folder)  # in place


class OneNameForAll(Checkpointed):
    def shards(self):
        return {unit.name: unit.shard.detach() for unit in self.units}


def build(model, optimizer, device):
    return OneNameForAll(model, optimizer)


def correct(model, optimizer, device):
    return Checkpointed(model, optimizer)
