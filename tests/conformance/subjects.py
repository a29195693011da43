"""The engines under test: our engines, the chapters, other people's engines, and an engine in a file."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from helpers import whole_weights

from conformance.others import OTHERS, Documented, adapted
from zerolab.run import engine_file, engines
from zerolab.teach.check import student
from zerolab.teach.exercises import EXERCISES

STAGES = tuple(engines.STAGES)
CHAPTERS = tuple(f"{name}.py" for name in STAGES)  # "zero1.py": the chapter itself


@dataclass(frozen=True)
class Subject:
    """The `engine` argument of a test. Calling it builds an engine: `engine(model, optimizer, **options)`.

    name        its name, or the path of its file
    like        the stage of ours that it is; "free": a student's file without a chapter's structure; or None
    chapter     whether it is a chapter: it has what the lesson promises, and no more
    documented  what other people's engines document (others.py); None for ours
    file        the user's file that has it, or None
    """

    name: str
    build: Callable
    like: str | None = None
    chapter: bool = False
    documented: Documented | None = None
    file: str | None = None
    promise: tuple | None = None  # (what its ranks divide, how many times Ψ (N-1)/N elements a rank sends)

    @property
    def ours(self):
        return self.documented is None

    @property
    def broadcasts(self):
        """Whether all ranks start with rank 0's weights. Otherwise they must have equal weights already."""
        return self.ours or self.documented.broadcasts

    @property
    def dtype(self):
        """The dtype in which its values are compared: not every engine trains in float64."""
        return torch.float64 if self.ours else self.documented.dtype

    def says_nothing_of(self, feature):
        return f"{self.name} says nothing of {engine_file.FEATURES[feature]}"

    def __call__(self, model, optimizer, **options):
        if self.chapter and (unknown := options.keys() - {"bucket_mb", "prefetch", "units", "group"}):
            pytest.skip(f"the chapter has no option {sorted(unknown)[0]}")
        if self.ours:
            return self.build(model, optimizer, **options)
        return adapted(self, model, optimizer, options)

    def weights(self, built):
        """{name: a copy of the whole weight} on every rank, in the precision of the shards. All ranks call it."""
        if self.chapter:
            return whole_weights(built)
        names = [name for name, _ in built.model.named_parameters()]
        state = built.full_state_dict()
        if not self.ours:
            return {name: state[name] for name in state if name in names}
        return {name: state[name] for name in names}


def of_class(stage: type) -> Subject:
    """A class `ZeRO1`, `ZeRO2` or `ZeRO3`: of a chapter, or of a wrong copy of one."""
    return Subject(stage.__name__, stage, stage.__name__.lower(), chapter=True)


def without_options(stage: type, model, optimizer, device: torch.device):
    return stage(model, optimizer)


def subject(name: str) -> Subject:
    """The engine with this name, or in this file."""
    if name in CHAPTERS:
        stage = name.removesuffix(".py")
        return Subject(name, engines.CHAPTERS[stage], stage, chapter=True, promise=engines.ENGINES[stage].promise)
    if name in STAGES:
        return Subject(name, engines.STAGES[name], name, promise=engines.ENGINES[name].promise)
    kind, _, rest = name.partition(":")
    if kind in ("student", "free"):  # of ./launch.sh check: a file that is to do what a chapter does
        exercise, _, file = rest.partition(":")
        build = student.stage_of(exercise, file, None)
        promise = engines.ENGINES[exercise].promise
        if kind == "student":
            return Subject(name, build, EXERCISES[exercise].chapter, chapter=True, promise=promise)
        # Without the chapter's structure it is asked like any engine in a file of its own.
        like = "free" if exercise == EXERCISES[exercise].chapter else None
        return Subject(
            name, partial(without_options, build), like, documented=Documented(()), file=file, promise=promise
        )
    if name.endswith(".py"):
        known = {engine.file: engine for engine in engines.ENGINES.values()}
        if name not in known:
            engine_file.enter([name])
            known = {engine.file: engine for engine in engines.ENGINES.values()}
        entry = known[name]
    else:
        entry = engines.ENGINES[name]
    documented = OTHERS.get(entry.name, Documented(entry.supports))
    return Subject(name, entry.build, documented=documented, file=entry.file, promise=entry.promise)
