"""The fast one

Symptom: The losses differ from the second step on, and differ between two runs.

Clue: Run it twice. How does a program know that a collective is over?

Hint: `Reduction.finish` in zero2.py.

Answer: Nobody waits for the asynchronous reduce-scatter. The optimizer reads memory that nothing has been written to
yet. So the losses are wrong in a different way in each run, and may be NaN.

Unnoticed: A fast network can finish a small collective before its result is read, and then the losses are correct.

Read: zero2.py, `finish`: `self.work.wait()`.
"""

from zero2 import Reduction, ZeRO2

STAGE = "zero2"
DIFFERS = {"losses"}
CAUGHT_BY = "tests/conformance/test_values.py::test_trains_as_one_process"


class ImpatientReduction(Reduction):
    def finish(self):
        self.average()
        self.deliver()


class WithoutWait(ZeRO2):
    def make_reduction(self, bucket):
        return ImpatientReduction(bucket)


def build(model, optimizer, device):
    return WithoutWait(model, optimizer)
