"""What the log said

Symptom: All losses are equal, and so are the held bytes. The peak in backward is higher, and no reduction runs inside
backward.

Clue: When are the reductions sent, and what is alive before?

Hint: `ZeRO2.on_gradient` in zero2.py, which runs inside step 2.

Answer: The hook sends nothing, and `step()` sends everything. So all gradients, whole, are alive when backward ends. By
the time of the update a rank holds 1/N of them.

Unnoticed: The log prints what is held after the reductions, which is 1/N. Only the peak shows that ZeRO-2 has saved
nothing. The article admits this about its own ZeRO-2.

Read: zero2.py, `send_complete`, and the timeline in the docstring at the top.
"""

from zero2 import ZeRO2

STAGE = "zero2"
DIFFERS = {"peak in backward", "reductions inside backward", "reductions hidden behind computation"}
CAUGHT_BY = "tests/conformance/test_memory.py::test_zero2_has_whole_gradients_of_two_buckets_at_most"


class SendInStep(ZeRO2):
    def on_gradient(self, param):
        bucket = self.bucket_of[param]
        bucket.missing.remove(param)

    def reduce_gradients(self):
        for bucket in self.buckets:
            self.send(bucket)
        self.receive()


def build(model, optimizer, device):
    return SendInStep(model, optimizer, bucket_mb=0.1)  # so that a bucket is a small part of the model


def correct(model, optimizer, device):
    return ZeRO2(model, optimizer, bucket_mb=0.1)
