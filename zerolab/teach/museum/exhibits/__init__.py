"""One file per mistake. To add an exhibit, add a file; its number is the first part of the file's name. The table in
docs/students.md lists the numbers.

The docstring has a title and six labelled paragraphs, and the file defines

    build(model, optimizer, device)   the wrong stage. The file also works with --engine-file in other commands
    STAGE      "zero1", "zero2" or "zero3", the chapter with the correct code; "engines" for what only engines have
    DIFFERS    the lines of the visitor's report that differ from the correct stage's; or {"error"}, or {"timeout"}
    CAUGHT_BY  the pytest name of a test that fails with this stage

and, if the symptom needs it,

    correct(model, optimizer, device)   the correct stage. Default: the chapter
    make_model(seed)                    the model. Default: `loop.make_model`
    make_optimizer(params)              Default: `loop.adamw`
    STEPS, MICRO_BATCHES, MAX_NORM, RESUME_AT   see `Exhibit`
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zerolab.run.engines import CHAPTERS
from zerolab.teach.museum import loop

LABELS = ["Symptom", "Clue", "Hint", "Answer", "Unnoticed", "Read"]


@dataclass
class Exhibit:
    """One mistake, loaded from its file. The functions and constants are described at the top of this file.

    text           {label: paragraph} of the docstring
    steps          how many steps a visitor sees
    micro_batches  backwards per step
    max_norm       gradients are clipped to this norm, by `engine.clip_grad_norm_`
    resume_at      before this step, counted from 0, the run stops, and a new engine resumes it by `save` and `load`
    """

    number: int
    file: Path
    title: str
    text: dict[str, str]
    stage: str
    differs: set[str]
    caught_by: str
    build: Callable
    correct: Callable
    make_model: Callable
    make_optimizer: Callable
    steps: int
    micro_batches: int
    max_norm: float | None
    resume_at: int | None

    @property
    def code(self) -> str:
        """The file without its docstring."""
        return self.file.read_text().split('"""', 2)[2].strip()


def chapter(stage: str) -> Callable:
    """A function that builds the chapter."""

    def build(model, optimizer, device):
        return CHAPTERS[stage](model, optimizer)

    return build


def load(file: Path) -> Exhibit:
    """The exhibit in a file of this folder."""
    module = importlib.import_module(f"{__name__}.{file.stem}")
    title, *paragraphs = module.__doc__.strip().split("\n\n")
    text = {}
    for paragraph in paragraphs:
        label, _, words = " ".join(paragraph.split()).partition(": ")
        text[label] = words
    return Exhibit(
        number=int(file.stem.partition("_")[0]),
        file=file,
        title=title,
        text=text,
        stage=module.STAGE,
        differs=module.DIFFERS,
        caught_by=module.CAUGHT_BY,
        build=module.build,
        correct=getattr(module, "correct", None) or chapter(module.STAGE),
        make_model=getattr(module, "make_model", loop.make_model),
        make_optimizer=getattr(module, "make_optimizer", loop.adamw),
        steps=getattr(module, "STEPS", 5),
        micro_batches=getattr(module, "MICRO_BATCHES", 1),
        max_norm=getattr(module, "MAX_NORM", None),
        resume_at=getattr(module, "RESUME_AT", None),
    )


EXHIBITS = {}
for path in sorted(Path(__file__).parent.glob("[0-9]*.py")):
    exhibit = load(path)
    EXHIBITS[exhibit.number] = exhibit
