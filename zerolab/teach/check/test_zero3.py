"""Tests of the exercise zero3, in the order of its steps."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero3 import ZeRO3
from zerolab.measure.timeline import Timeline
from zerolab.teach.check import models
from zerolab.teach.check.helpers import (
    alone,
    backward,
    build,
    expect,
    expect_values,
    must_raise,
    on_ranks,
    same_memory,
    same_training,
)


class Mixed(nn.Module):
    """Units inside a unit, weights that two units share, parameters outside of all units, and frozen ones."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        shared = nn.Linear(3, 3)
        inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), shared), nn.Sequential(shared, inner), inner[1]])
        self.blocks[0].own = nn.Parameter(torch.zeros(2))
        self.blocks[0].tied = self.blocks[1].tied = nn.Parameter(torch.zeros(4))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        inner[0].requires_grad_(False)


# By hand: `shared` and `tied` are in two units, and so is inner[1], which is a unit by itself under its first name. So
# all three are the root's.
HOMES = {
    "blocks.0": ["blocks.0.own", "blocks.0.0.weight", "blocks.0.0.bias"],
    "blocks.1": ["blocks.1.1.0.weight", "blocks.1.1.0.bias"],
    "blocks.1.1.1": [],
    "root": [
        "scale",
        "embedding.weight",
        "blocks.0.tied",
        "blocks.0.1.weight",
        "blocks.0.1.bias",
        "blocks.1.1.1.weight",
        "blocks.1.1.1.bias",
    ],
}


@pytest.mark.blank("parameters_by_unit")
@on_ranks
def test_every_parameter_has_one_home(stage):
    parameters_by_unit = vars(sys.modules[stage.__module__])["parameters_by_unit"]
    model = Mixed()
    found = parameters_by_unit(model, list(model.blocks))
    names = {module: name or "root" for name, module in model.named_modules()}
    expect("the units, in order", [names[module] for module in found], list(HOMES))
    for module, pairs in found.items():
        expect(f"the parameters of {names[module]}", [name for name, _ in pairs], HOMES[names[module]])
        for name, param in pairs:
            expect(f"whether {name} is paired with its parameter", param is model.get_parameter(name), True)


# {prefetch: {unit: (following, preceding)}} of a model with the units 0, 1 and 2 and the root.
AHEAD = {
    0: {"0": ("", ""), "1": ("", ""), "2": ("", ""), "root": ("", "")},
    1: {"0": ("1", ""), "1": ("2", "0"), "2": ("", "1"), "root": ("0", "2")},
    2: {"0": ("12", ""), "1": ("2", "0"), "2": ("", "10"), "root": ("01", "21")},
    9: {"0": ("12", ""), "1": ("2", "0"), "2": ("", "10"), "root": ("012", "210")},
}


@pytest.mark.blank("ZeRO3.plan_prefetch")
@pytest.mark.parametrize("prefetch", AHEAD)
@on_ranks
def test_the_neighbours(stage, prefetch):
    engine = build(stage, prefetch=prefetch)
    for unit in engine.units:
        name = unit.name.removeprefix("blocks.")
        for which, expected in zip(("following", "preceding"), AHEAD[prefetch][name]):
            found = [each.name.removeprefix("blocks.") for each in getattr(unit, which)]
            expect(f"{which} of unit {name} with prefetch {prefetch}", found, [*expected])
    for unit in build(stage, prefetch=prefetch, group=alone).units:
        expect(f"units ahead of {unit.name} with one rank", [*unit.following, *unit.preceding], [])


@pytest.mark.blank("Unit.free")
@on_ranks
def test_freed_memory_and_a_shard_that_stays(stage):
    for unit in build(stage).units:
        expect(f"bytes under the shard of {unit.name}", unit.shard.untyped_storage().nbytes(), unit.shard.nbytes)
        expect(f"elements of self.flat of {unit.name} after free()", unit.flat.numel(), unit.numel)
        unit.start_gather()
        views = [param.detach().t() if param.ndim == 2 else param.detach() for param in unit.params]
        unit.free()  # also waits: the gather may still be in flight
        expect(f"unit.allocated of {unit.name} after free()", unit.allocated, False)
        expect(f"unit.work of {unit.name} after free()", unit.work, None)
        for view in (unit.flat, *views):
            expect(f"bytes under {unit.name} after free(), as a view sees them", view.untyped_storage().nbytes(), 0)
        unit.free()  # nothing to do


@pytest.mark.blank("Unit.start_gather")
@on_ranks
def test_gathered_into_the_weights(stage):
    for unit in build(stage).units:
        storage = unit.flat.untyped_storage()._cdata
        with Timeline() as timeline:
            unit.start_gather()
            expect(f"whether unit.work of {unit.name} is there after start_gather()", unit.work is not None, True)
            work = unit.work
            unit.start_gather()
            expect("whether a second start_gather() changes nothing", unit.work is work, True)
            unit.wait()
            # Before `free`, which would take the memory away to which the collective still writes.
            expect("collectives that wait() has not waited for", [each.name for each in timeline.under_way()], [])
        expect(f"unit.work of {unit.name} after wait()", unit.work, None)
        expect("whether the storage under the weights is the same", unit.flat.untyped_storage()._cdata, storage)
        expect("bytes of the storage", unit.flat.untyped_storage().nbytes(), unit.flat.nbytes)
        unit.free()


@pytest.mark.blank("ZeRO3.unpack")
@on_ranks
def test_only_a_gathered_weight_can_be_read_outside_of_backward(stage):
    engine = build(stage)
    unit = engine.units[0]
    message = must_raise("unpack() of a weight outside of backward", engine.unpack, engine.pack(unit.params[0]))
    expect(f"whether the error names the unit ({message})", unit.name in message, True)
    unit.start_gather()
    unit.wait()
    weight = engine.unpack(engine.pack(unit.params[0]))
    expect_values("what unpack() returns outside of backward for a gathered weight", weight, unit.params[0].detach())
    unit.free()


class ChangedInPlace(models.Odd):
    """A forward that changes a saved tensor in place: its backward is an error."""

    def forward(self, tokens):
        x = self.embed(tokens)
        y = torch.tanh(self.blocks[0](x))
        loss = self.head(y * y)
        y.add_(1)
        return loss


@pytest.mark.blank("ZeRO3.unpack")
@on_ranks
def test_saved_tensors_that_were_changed_are_refused(stage):
    engine = build(stage, ChangedInPlace)
    inputs, targets = engine.model.batch(0, dist.get_rank())
    loss = engine.model.loss(engine(inputs), targets)
    must_raise("a backward after a saved tensor was changed in place", loss.backward)
    engine.zero_grad()
    engine.free_all()  # also waits for what was gathered ahead


class BiasLast(models.Odd):
    """Its last addition saves nothing, so the bias's gradient is the first event of a backward."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, tokens):
        return super().forward(tokens) + self.bias


class Probe(nn.Module):
    """A unit whose loss does not come from its output, so no gradient arrives there first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        self.loss = self.linear(x).square().mean()
        return x


class SideLoss(models.Odd):
    def __init__(self):
        super().__init__()
        self.blocks.append(Probe())

    def forward(self, tokens):
        return super().forward(tokens) + self.blocks[-1].loss


class InnerCheckpoint(models.Odd):
    """A unit's weights bypass the stage's hooks on saved tensors, because a checkpoint inside the unit has its own."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.down = Recomputed(block.down)


class Recomputed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return models.checkpoint(self.inner, x, use_reentrant=False)


class PassesOn(models.Odd):
    """A unit whose output is also one of its inputs."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.both(block, x)
        return self.head(x)

    def both(self, block, x):
        y = block(x)
        return y + block(y)


@pytest.mark.blank("ZeRO3.notice_backward")
@on_ranks
def test_nothing_is_left_after_a_backward(stage):
    engine = build(stage, models.Lanes)
    engine.model.skip = 1  # gathered ahead for nothing
    backward(engine)
    gathered = [unit.name for unit in engine.units if unit.flat.untyped_storage().nbytes()]
    expect("units that are gathered after a backward without blocks.1", gathered, [])
    expect("self.in_flight after backward", engine.in_flight, None)


# Every blank, in whole trainings.

TRAININGS = {
    "": {},
    "in a group of one rank (self.world_size is 1)": {"group": alone},
    "if some ranks own nothing but padding": {"make": models.OneWeight},
    "with prefetch 2": {"prefetch": 2},
    "if units are recomputed in backward": {"make": models.Checkpointed},
    "if several units are recomputed together": {"make": models.TwoCheckpointed},
    "if a part of a unit is recomputed in backward": {"make": InnerCheckpoint},
    "if a gradient is the first event of a backward": {"make": BiasLast},
    "if a loss does not come from the output of its unit": {"make": SideLoss},
    "if units run twice": {"make": PassesOn},
}


@pytest.mark.parametrize("at", TRAININGS)
@on_ranks
def test_training(stage, at):
    same_training(stage, ZeRO3, at, **TRAININGS[at])


@on_ranks
def test_memory(stage):
    same_memory(stage, ZeRO3)
