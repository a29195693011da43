"""First come, first served

Symptom: The losses differ from the second step on. The model has two branches, and each rank runs a different
one first.

Clue: Which collective of the other ranks does a rank's third reduce-scatter meet?

Hint: `ZeRO2.send_complete` in zero2.py, in step 3.

Answer: Each bucket is sent as soon as its gradients are complete. On two ranks backward reaches the branches in
different orders. A collective carries no name, so one rank's first branch is added to another rank's second branch.

Unnoticed: Both branches have the same sizes, so no collective raises an error. If all ranks run the branches in the
same order, as in most models and in many batches, everything is correct.

Read: zero2.py, `send_complete`: `self.turn`.
"""

import torch.distributed as dist
from torch import nn

from zero2 import ZeRO2
from zerolab.run.model import Block
from zerolab.teach.museum import loop
from zerolab.teach.museum.loop import SHAPE

STAGE = "zero2"
DIFFERS = {"losses"}
CAUGHT_BY = "tests/conformance/test_traffic.py::test_zero2_sends_buckets_in_one_order_on_all_ranks"


class Branches(nn.Module):
    """Two blocks side by side. In real models the data may decide which one runs first; here it is the rank."""

    def __init__(self):
        super().__init__()
        self.one = Block(SHAPE)
        self.other = Block(SHAPE)

    def forward(self, x):
        if dist.get_rank() % 2 == 0:
            return self.one(x) + self.other(x)
        other = self.other(x)
        return self.one(x) + other


def make_model(seed):
    model = loop.make_model(seed)
    model.blocks[3] = Branches()
    loop.reinitialize(model, seed)
    return model


class AsTheyCome(ZeRO2):
    def on_gradient(self, param):
        bucket = self.bucket_of[param]
        bucket.missing.remove(param)
        if not bucket.missing:
            self.send(bucket)


def build(model, optimizer, device):
    return AsTheyCome(model, optimizer, bucket_mb=0)  # a bucket per parameter


def correct(model, optimizer, device):
    return ZeRO2(model, optimizer, bucket_mb=0)
