"""Parameter groups: an engine's optimizer has any number of them, chosen on the real parameters."""

from functools import partial

import pytest
import torch
from helpers import Blocks, seeded

from conformance.pair import Pair

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
ROUNDING = 1e-10  # AdamW divides by small roots


def by_shape(model):
    """Weight decay for matrices only, as in nanoGPT."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": 0.3},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]


def by_name(model):
    """Pairs of names and parameters; another rate for the head."""
    named = list(model.named_parameters())
    return [
        {"params": [(name, param) for name, param in named if not name.startswith("head")]},
        {"params": [(name, param) for name, param in named if name.startswith("head")], "lr": 0.05},
    ]


def one_each(model):
    """A rate for every parameter, by its width as in muP."""
    return [{"params": [param], "lr": 0.01 / max(1, param.shape[-1:].numel())} for param in model.parameters()]


GROUPS = {grouping.__name__: grouping for grouping in (by_shape, by_name, one_each)}


@pytest.mark.needs("groups")
@pytest.mark.ranks(3, thorough=(2,))
@pytest.mark.parametrize("groups", GROUPS)
def test_groups_keep_their_options(engine, groups):
    """Each element is updated with the options of its parameter's group."""
    if groups == "by_name" and engine.name == "zero_redundancy_optimizer":
        pytest.skip("ZeroRedundancyOptimizer documents no names of parameters")
    Pair(engine, seeded(Blocks), ADAMW, groups=GROUPS[groups], tolerance=ROUNDING).train()


@pytest.mark.needs("groups")
def test_the_rates_of_groups_can_be_changed(engine):
    """By hand, or by a scheduler, between two steps."""
    pair = Pair(engine, seeded(Blocks), ADAMW, groups=by_shape, tolerance=ROUNDING)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(each, [0.1, 0.2], total_steps=9) for each in pair.optimizers]
    for step in range(3):
        pair.backward(step)
        pair.step()
        for schedule in schedules:
            schedule.step()
        for optimizer in pair.optimizers:
            optimizer.param_groups[1]["weight_decay"] = 0.1 * step
    pair.check_weights()


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_the_optimizer_stays_the_users_object(engine):
    """It has the same groups as before, and their parameters are this rank's elements, 1-D."""
    model = seeded(Blocks)
    optimizer = ADAMW(by_shape(model))
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    trained = engine(model, optimizer)
    assert trained.optimizer is optimizer
    found = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    assert found == options
    assert all(piece.ndim == 1 for group in optimizer.param_groups for piece in group["params"])


class Assigns(torch.optim.Optimizer):
    """SGD as some people write it: `param.data = ...` in place of a change in place."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_an_optimizer_may_assign_new_tensors(engine):
    """The weights are what it assigned, on all ranks."""
    Pair(engine, seeded(Blocks), partial(Assigns, lr=0.05)).train()
