"""The parameter of one element

Symptom: The ranks hang in their first or second step, until a timeout.

Clue: A collective needs all ranks. Which rank might have nothing to send?

Hint: `gather_parameters` in zero1.py, in step 5.

Answer: A bucket holds one parameter of one element, so the shard of the last rank is only padding. This rank skips the
all-gather, because it has updated nothing there. The others wait for it. A collective needs all ranks, including ranks
that have nothing to send.

Unnoticed: With several parameters in a bucket no shard is only padding. So the code runs for years, until somebody
trains a very small layer, or uses very many ranks.

Read: zero1.py, `gather_parameters`, and the picture in the docstring of `Bucket`.
"""

import torch
from torch import nn

from zero1 import ZeRO1
from zerolab.run.model import GPT
from zerolab.teach.museum.loop import SHAPE

STAGE = "zero1"
DIFFERS = {"timeout"}
CAUGHT_BY = "tests/conformance/test_loops.py::test_a_rank_may_own_only_padding"


class Tempered(GPT):
    """A GPT with a learned temperature. Many models have such a parameter of one element."""

    def __init__(self, seed):
        super().__init__(SHAPE, seed)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        return super().forward(tokens) / self.temperature


make_model = Tempered


class SkipPadding(ZeRO1):
    def step(self):
        self.reduce_gradients()
        self.optimizer.step()
        works = []
        for bucket in self.buckets:
            end = bucket.offsets[-1] + bucket.params[-1].numel()
            if bucket.own.start < end:  # else this rank's shard is only padding: it has updated nothing
                works.append(bucket.gather())
        for work in works:
            work.wait()


def build(model, optimizer, device):
    return SkipPadding(model, optimizer, bucket_mb=0)  # a bucket per parameter


def correct(model, optimizer, device):
    return ZeRO1(model, optimizer, bucket_mb=0)
