"""Why gather it again?

Symptom: The first loss is correct, and all later ones differ. More parameters are held, and less is sent.

Clue: How does a new shard get into the weights that forward uses?

Hint: `ZeRO3.step` in zero3.py, after step 4.

Answer: The root stays gathered from step to step. The optimizer updates its shards, but nobody gathers them. So forward
keeps using the root's weights from the first step.

Unnoticed: The units learn, so the loss falls. The root's optimizer state and shards are correct. Only the gathered copy
is stale.

Read: zero3.py, `step` and `end_backward`: `self.free_all()`.
"""

from zero3 import Unit, ZeRO3

STAGE = "zero3"
DIFFERS = {"losses", "parameters held", "gathered at once in forward", "all-gathers", "sent"}
CAUGHT_BY = "tests/conformance/test_values.py::test_trains_as_one_process"


class RootStays(Unit):
    def free(self):
        if self.name != "root":  # every forward and every backward needs the root: keep it
            super().free()


class KeepRoot(ZeRO3):
    def make_units(self, name, module, named_params):
        return [RootStays(name, module, named_params, self.group)]


def build(model, optimizer, device):
    return KeepRoot(model, optimizer)
