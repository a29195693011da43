"""Better safe than sorry

Symptom: All losses and all bytes are equal. No reduction is hidden behind computation.

Clue: The only number that differs is about time. Where does a rank wait, and for what?

Hint: `ZeRO2.send` in zero2.py, in step 3.

Answer: Each reduce-scatter is waited for right after it is started. So backward waits while a bucket is in flight.
The result is correct, and the peak is even a little lower, because only one bucket has whole gradients at a time.

Unnoticed: On one machine with a fast network the waiting is short. On a slow network it is the time that ZeRO-2 should
save.

Read: zero2.py, `send`, and the timeline in the docstring at the top.
"""

from zero2 import ZeRO2

STAGE = "zero2"
DIFFERS = {"reductions hidden behind computation"}
CAUGHT_BY = "tests/conformance/test_late_collectives.py::test_backward_computes_while_a_reduction_is_in_flight"


class WaitAtOnce(ZeRO2):
    def send(self, bucket):
        self.in_flight = self.make_reduction(bucket)
        self.in_flight.start()
        self.receive()


def build(model, optimizer, device):
    return WaitAtOnce(model, optimizer)
