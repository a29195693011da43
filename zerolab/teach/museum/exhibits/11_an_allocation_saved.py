"""An allocation saved

Symptom: All losses are equal. More gradients are held, and the peak in backward is higher.

Clue: Only 1/N of the gradients has a name. What keeps memory alive: names, or any view of it?

Hint: `Reduction.__init__` in zero2.py.

Answer: The reduced shard is received into its own place in the buffer that was sent. This place is a view, and a view
keeps its whole storage alive. So nothing is freed, although no variable names the buffer any more.

Unnoticed: `shard.grad.numel()` is 1/N of the gradients, and so is a sum of `numel()` over all tensors. Only somebody
who counts storages sees the rest.

Read: zero2.py, `Reduction`: `self.shard_gradient = self.gradient.new_empty`, and `receive`: `self.in_flight = None`.
"""

from zero2 import Reduction, ZeRO2

STAGE = "zero2"
DIFFERS = {"gradients held", "peak in backward"}
CAUGHT_BY = "tests/conformance/test_memory.py::test_held_bytes_are_the_accounting"


class InPlaceReduction(Reduction):
    def __init__(self, bucket):
        super().__init__(bucket)
        self.shard_gradient = self.gradient[bucket.own]  # why allocate another tensor?


class ReceiveInPlace(ZeRO2):
    def make_reduction(self, bucket):
        return InPlaceReduction(bucket)


def build(model, optimizer, device):
    return ReceiveInPlace(model, optimizer, bucket_mb=0.1)  # so that a bucket is a small part of the model


def correct(model, optimizer, device):
    return ZeRO2(model, optimizer, bucket_mb=0.1)
