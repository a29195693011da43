"""Tidy after every layer

Symptom: All losses and all peaks are equal. There are more all-gathers, and more is sent.

Clue: Count the all-gathers of one unit in forward.

Hint: `ZeRO3.after_forward` in zero3.py.

Answer: After the forward of each unit all units are freed, including the prefetched one, which is gathered again before
it runs.

Unnoticed: Everything is correct but slow. On a fast network it is only a little slower than without prefetch.

Read: zero3.py, `after_forward`: `unit.free()`, and the timeline in the docstring at the top.
"""

from zero3 import ZeRO3, in_backward

STAGE = "zero3"
DIFFERS = {"all-gathers", "sent"}
CAUGHT_BY = "tests/conformance/test_traffic.py::test_sent_is_the_accounting"


class FreeEverything(ZeRO3):
    def after_forward(self, unit, module, inputs, output):
        if in_backward():
            return
        for each in self.units:
            if each.module is not self.model:  # the root is needed to the end
                each.free()
        self.watch_output(unit, output)


def build(model, optimizer, device):
    return FreeEverything(model, optimizer)
