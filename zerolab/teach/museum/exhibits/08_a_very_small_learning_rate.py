"""A very small learning rate

Symptom: The losses hardly change from step to step. Twice the gradients are held.

Clue: Which gradients does backward write to, and which are sent?

Hint: `ZeRO1.zero_grad` in zero1.py, and what `model.zero_grad()` does to `param.grad`.

Answer: `model.zero_grad()` sets every `param.grad` to None. In the next backward autograd makes new gradients, outside
of the bucket. The bucket, which is all zeros, is what the ranks reduce. AdamW makes no step for a gradient of zero, so
there is only its weight decay.

Unnoticed: It looks like a learning rate that is too small. There is no error, because a buffer of zeros is a valid
gradient.

Read: zero1.py, `check_gradients`, which raises an error in the correct stage, and `zero_grad`: `param.grad = grad`.
"""

from zero1 import ZeRO1

STAGE = "zero1"
DIFFERS = {"losses", "gradients held", "peak in backward"}
CAUGHT_BY = "tests/conformance/test_values.py::test_trains_as_one_process"


class ClearedByModel(ZeRO1):
    def reduce_gradients(self):
        works = [self.start_reduce(bucket) for bucket in self.buckets]
        for bucket, work in zip(self.buckets, works):
            work.wait()
            self.finish_reduce(bucket)

    def zero_grad(self):
        self.model.zero_grad()
        for bucket in self.buckets:
            bucket.gradient.zero_()
            bucket.shard.grad = None


def build(model, optimizer, device):
    return ClearedByModel(model, optimizer)
