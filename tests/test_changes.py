"""From chapter to chapter: `./launch.sh changes` tells all that changes, and what must stay the same does."""

import importlib
import inspect
import re
from itertools import combinations, pairwise

import pytest
import torch
from helpers import Blocks, own_batch, seeded
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from zerolab.run.engines import CHAPTERS, STAGES
from zerolab.teach import changes

OLD = '''
class Bucket: ...


class ZeRO1:
    def __init__(self, model):
        self.model = model

    def words(self):
        """What it does."""
        return 1  # why

    def step(self):
        self.reduce()

    def left_out(self): ...
'''
NEW = '''
def helper(): ...


class ZeRO2:
    def added(self):
        """Says what is new."""

    def __init__(self, model):
        self.model = model

    def words(self):
        """The same, in other words."""
        # and another reason
        return 1

    def step(self):
        self.receive()
'''


def summary(report: str) -> dict[str, list[str]]:
    """{kind: names} of the table at the head of a report."""
    table = report.split("\n\n")[1]
    kinds = re.findall(r"^(the same|changed|new|gone|beside it) (.*(?:\n .*)*)", table, re.MULTILINE)
    assert len(kinds) == 5, table
    return {kind: [] if names.strip() == "nothing" else re.findall(r"\w+", names) for kind, names in kinds}


def test_a_report_on_chapters_made_for_it(tmp_path, monkeypatch):
    """What changed is shown, and what did not is not; words are no code."""
    (tmp_path / "chapter_old.py").write_text(OLD)
    (tmp_path / "chapter_new.py").write_text(NEW)
    monkeypatch.syspath_prepend(tmp_path)
    old, new = importlib.import_module("chapter_old").ZeRO1, importlib.import_module("chapter_new").ZeRO2
    monkeypatch.setattr(changes, "CHAPTERS", {"zero1": old, "zero2": new})
    report = changes.report("zero1", "zero2")
    assert summary(report) == {
        "the same": ["__init__", "words"],
        "changed": ["step"],
        "new": ["added"],
        "gone": ["left_out"],
        "beside it": ["helper"],
    }
    lines = [line.strip() for line in report.split("\n")]
    assert {"-        self.reduce()", "+        self.receive()"} <= {*lines}
    assert any(line.startswith("added") and line.endswith("Says what is new.") for line in lines)
    assert not any("self.model = model" in line or "in other words" in line for line in lines)


# The chapters themselves.


def written(stage: str) -> set[str]:
    """The methods of a chapter's class, as Python sees them."""
    kinds = property | staticmethod | classmethod
    return {name for name, one in vars(CHAPTERS[stage]).items() if inspect.isroutine(one) or isinstance(one, kinds)}


def test_every_method_is_told_once_and_what_stays_stays_in_order():
    for first, second in combinations(CHAPTERS, 2):
        table = summary(changes.report(first, second))
        table.pop("beside it")
        told = sum(table.values(), [])
        there = written(first) | written(second)
        assert len(told) == len(set(told)) and set(told) >= there, set(told) ^ there
    for first, second in pairwise(CHAPTERS):
        same = changes.sort(first, second)["the same"]  # in the new chapter's order
        assert same == [name for name in changes.methods_of(CHAPTERS[first]) if name in same]
        assert "training_step" in same, "one training step reads the same in every chapter"


@pytest.mark.parametrize("stages, more", (
    (CHAPTERS, set()),
    (STAGES, {"no_sync", "clip_grad_norm_", "full_state_dict"}),
), ids=("chapters", "engines"))  # fmt: skip
def test_a_loop_calls_the_same_in_every_stage(stages, more):
    """A script goes from one stage to another by its name alone. (A later stage has more: its moments, its options.)"""
    first, *others = stages.values()
    loop = {"training_step", "step", "zero_grad", "__call__", *more}
    for other in others:
        assert not issubclass(other, first)
        for name in loop:
            assert inspect.signature(getattr(other, name)) == inspect.signature(getattr(first, name)), name
        options, theirs = (inspect.signature(cls.__init__).parameters for cls in (first, other))
        assert all(theirs[name].default == options[name].default for name in options if name in theirs)


def test_the_steps_stand_in_the_chapter_itself():
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


def test_the_steps_have_the_same_numbers_and_names_in_every_stage(ranks):
    """Seen from outside, as a profile shows them: 0 to 5. What moves inside another step is what a stage is about."""
    inside = {"zero1": set(), "zero2": {("3", "2")}, "zero3": {("3", "2"), ("5", "1"), ("5", "2")}}
    labels = {}
    for stage in CHAPTERS:
        (found,) = ranks(1).run(labels_of_a_step, stage=stage)
        number = {label: re.fullmatch(r"step (\d) .+", label)[1] for label, _ in found}
        labels[stage] = sorted(number)
        assert {(number[label], number[around]) for label, around in found if around} == inside[stage], found
        alone = [number[label] for label, around in found if around is None]
        assert alone == sorted(alone) and set(number.values()) == set("012345"), found
    assert labels["zero1"] == labels["zero2"] == labels["zero3"]
