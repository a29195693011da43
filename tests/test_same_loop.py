"""One training loop fits every stage: the same calls, the same options, and steps with the same names."""

import inspect
import re

import pytest
import torch
from helpers import Blocks, own_batch, seeded
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from zerolab.run.engines import CHAPTERS, STAGES
from zerolab.run.pool import run_on_ranks


@pytest.mark.parametrize("stages, more", (
    (CHAPTERS, set()),
    (STAGES, {"no_sync", "clip_grad_norm_", "full_state_dict"}),
), ids=("chapters", "engines"))  # fmt: skip
def test_a_loop_calls_the_same_in_every_stage(stages, more):
    """A script goes from one stage to another by changing the class's name."""
    first, *others = stages.values()
    loop = {"training_step", "step", "zero_grad", "__call__", *more}
    for other in others:
        assert not issubclass(other, first)
        for name in loop:
            assert inspect.signature(getattr(other, name)) == inspect.signature(getattr(first, name)), name
        options, theirs = (inspect.signature(cls.__init__).parameters for cls in (first, other))
        assert all(theirs[name].default == options[name].default for name in options if name in theirs)


def test_the_steps_are_in_the_chapter_itself():
    for cls in CHAPTERS.values():
        assert cls.__bases__ == (object,)
        assert {"training_step", "step", "__init__"} <= set(vars(cls))
        assert {"model", "optimizer", "group"} <= set(inspect.signature(cls).parameters)


def labels_of_a_step(stage: str) -> list[tuple[str, str | None]]:
    """(label, the label around it) of building an engine and one training step, in the order of their beginnings."""
    model = seeded(Blocks, dtype=torch.float32)
    inputs, targets = own_batch(0, dtype=torch.float32)
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        engine = CHAPTERS[stage](model, torch.optim.AdamW(model.parameters()))
        engine.training_step(inputs, targets, F.mse_loss)
    found = []
    for event in sorted(watched.events(), key=lambda event: event.time_range.start):
        if event.name.startswith("step "):
            around = event.cpu_parent
            while around is not None and not around.name.startswith("step "):
                around = around.cpu_parent
            found.append((event.name, None if around is None else around.name))
    return found


def test_the_steps_have_the_same_numbers_and_names_in_every_stage():
    """A profile of any stage shows steps 0 to 5. The stages differ in which step runs inside another one."""
    inside = {"zero1": set(), "zero2": {("3", "2")}, "zero3": {("3", "2"), ("5", "1"), ("5", "2")}}
    labels = {}
    for stage in CHAPTERS:
        (found,) = run_on_ranks(1, labels_of_a_step, stage=stage)
        number = {label: re.fullmatch(r"step (\d) .+", label)[1] for label, _ in found}
        labels[stage] = sorted(number)
        assert {(number[label], number[around]) for label, around in found if around} == inside[stage], found
        alone = [number[label] for label, around in found if around is None]
        assert alone == sorted(alone) and set(number.values()) == set("012345"), found
    assert labels["zero1"] == labels["zero2"] == labels["zero3"]
