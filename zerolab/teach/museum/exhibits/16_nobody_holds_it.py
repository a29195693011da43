"""Nobody holds it any more

Symptom: All losses and all traffic are equal. The peaks are higher, and more is gathered at once.

Clue: What does a linear layer keep for its backward, besides the parameter?

Hint: `Unit.free` and `Unit.start_gather` in zero3.py.

Answer: Pointing `param.data` at something else frees nothing. Autograd has saved views of the gathered weights for
backward, and each view keeps its whole storage alive. Backward then gathers the same weights again, into new memory.
The ZeRO-3 in the article "AI in Multiple GPUs" frees weights like this.

Unnoticed: `param.numel()` is small after forward, and the losses are correct. Only the peak shows it.

Read: zero3.py, the docstring of `Unit`: why freeing means resizing the storage.
"""

import torch

from zero3 import Unit, ZeRO3

STAGE = "zero3"
DIFFERS = {"peak in forward", "peak in backward", "gathered at once in forward"}
CAUGHT_BY = "tests/conformance/test_memory.py::test_peak_is_the_accounting"


class ReassignedUnit(Unit):
    def start_gather(self):
        if not self.allocated:
            self.flat = torch.empty(self.numel)
            for index, param in enumerate(self.params):
                param.data = self.place(self.flat, index)
            self.work = self.gather()
            self.allocated = True

    def free(self):
        if self.allocated:
            self.wait()
            self.flat = self.shard[:1].expand(self.numel)  # the same size without its own memory
            for index, param in enumerate(self.params):
                param.data = self.place(self.flat, index)
            self.allocated = False


class FreeByReassigning(ZeRO3):
    def make_units(self, name, module, named_params):
        return [ReassignedUnit(name, module, named_params, self.group)]

    def unpack(self, saved):
        return saved[0]  # it has memory; `on_output` gathers a unit for its backward


def build(model, optimizer, device):
    return FreeByReassigning(model, optimizer)
