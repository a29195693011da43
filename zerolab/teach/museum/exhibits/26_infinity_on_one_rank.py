"""Infinity on one rank

Symptom: After the fourth step the ranks have different loss scales, and the losses differ from the fifth step on.

Clue: A gradient of rank 1 is infinite in the fourth step. Which rank sees it, and which ranks must know?

Hint: `GradScaler.unscale_` in zerolab/engine/loss_scaler.py.

Answer: After step 3 each rank has one shard of the gradients, so an infinite element is in one rank's shard. Torch's
loss scaler looks only at this rank's shards. The rank that finds the infinity skips its update and halves its scale.
The others update their shards. From then on the ranks multiply their losses by different scales, and the sum of their
gradients is wrong.

Unnoticed: A few overflows at the start are normal with float16, and skipped steps are logged on one rank only.

Read: zerolab/engine/loss_scaler.py, `unscale_`: `all_reduce`.
"""

import math

import torch
import torch.distributed as dist

from zerolab.engine import GradScaler, ZeRO3Engine

STAGE = "engines"
DIFFERS = {"losses", "scales", "all-reduces", "sent"}
CAUGHT_BY = "tests/conformance/test_precision.py::test_an_overflow_on_one_rank_skips_the_step_on_all"
STEPS = 6


class OverflowOnce:
    """A hook: in the fourth backward the gradient is infinite on rank 1."""

    def __init__(self):
        self.backwards = 0

    def __call__(self, gradient):
        self.backwards += 1
        if self.backwards == 4 and dist.get_rank() == 1:
            return torch.full_like(gradient, math.inf)
        return gradient


class LocalScaler(GradScaler):
    def unscale_(self, engine):
        engine.reduce_gradients()
        torch.amp.GradScaler.unscale_(self, engine.optimizer)
        found = self._found_inf_per_device(engine.optimizer)
        found.setdefault(torch.device("cpu"), torch.zeros(()))  # on a rank that owns only padding


def build_with(scaler_class, model, optimizer):
    model.norm.bias.register_hook(OverflowOnce())
    engine = ZeRO3Engine(model, optimizer)
    engine.scaler = scaler_class("cpu", init_scale=1024.0)
    return engine


def build(model, optimizer, device):
    return build_with(LocalScaler, model, optimizer)


def correct(model, optimizer, device):
    return build_with(GradScaler, model, optimizer)
