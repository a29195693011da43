"""The museum of bugs: exhibits.toml has the mistakes, as a student would write them; here they become engines.

A mistake in a chapter is a change of its text: the changed chapter is run, and its class is the wrong engine. What only
engines do, a student writes anew: functions that take the place of an engine's own. `./launch.sh bug` lists them, and
`./launch.sh bug 7` runs one beside the right engine (`visit.py`). tests/test_museum.py demands that each lacks the
properties that it names.
"""

import difflib
import functools
import inspect
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from unittest.mock import patch

from torch.distributed.fsdp import CPUOffloadPolicy

from zerolab.engine import base
from zerolab.run.engines import CHAPTERS, STAGES
from zerolab.teach import written


@dataclass(frozen=True)
class Change:
    """In a chapter the lines `right` of the function `where` ("Class.method" or "function") are `written` instead."""

    where: str
    right: str
    written: str = ""

    def of(self, chapter: ModuleType) -> tuple[str, str]:
        """The function's lines, and with this change. Raises LookupError if it cannot be made."""
        before = inspect.getsource(functools.reduce(getattr, self.where.split("."), chapter))
        if before.count(self.right) != 1:
            raise LookupError(f"{self.right!r} stands {before.count(self.right)} times in {self.where}, and must once")
        return before, before.replace(self.right, self.written)


@dataclass(frozen=True)
class Exhibit:
    """One mistake: what a visitor is told before (title) and after (the rest), and how it is run.

    It is `changes` of a chapter, or `code` in the place of what the stage's engine has under the same names.
    `differs` are the lines of the report that are not those of the right engine; or "error", or "timeout"; `symptom`
    says it in words. `clue` is what to think of, `read` where to look, and `caught_by` names the properties that it
    does not have. `options` and `offload` go to the engine, and `training` to `loop.Training`: the loop in which the
    mistake shows.
    """

    number: int
    stage: str
    title: str
    differs: frozenset[str]
    clue: str
    diagnosis: str
    read: str
    symptom: str = ""
    changes: tuple[Change, ...] = ()
    code: str = ""
    caught_by: tuple[str, ...] = ("equals_one_process_on_the_whole_batch",)
    options: dict = field(default_factory=dict)
    offload: bool = False
    training: dict = field(default_factory=dict)

    @property
    def of_engine(self) -> bool:
        """Whether it is of what only engines do, and no chapter."""
        return not self.changes

    @property
    def right(self) -> type:
        return STAGES[self.stage] if self.of_engine else CHAPTERS[self.stage]

    @property
    def chapter(self) -> ModuleType:
        return inspect.getmodule(self.right)

    @property
    def text(self) -> str:
        """A chapter's text with the mistake in it."""
        text = inspect.getsource(self.chapter)
        for change in self.changes:
            before, after = change.of(self.chapter)
            if text.count(before) != 1:
                raise LookupError(f"{change.where} is there twice, or has two changes, and can have one")
            text = text.replace(before, after)
        return text

    @cached_property
    def wrong(self) -> type:
        """The wrong engine."""
        name, file = self.right.__name__, f"{self.stage} with bug {self.number}"
        if not self.of_engine:
            return getattr(written.executed(self.text, self.stage, file), name)
        names = vars(written.executed(self.code, file, file)).items()
        own = {name: value for name, value in names if getattr(value, "__module__", None) == file}
        if "Placement" in own:  # an engine makes its own in `prepare`, by this name
            own["prepare"] = patch.object(base, "Placement", own["Placement"])(self.right.prepare)
        return type(name, (self.right,), own)

    @property
    def written(self) -> str:
        """What a student has written: a chapter's lines that differ, or functions."""
        told = [self.code] if self.of_engine else []
        for change in self.changes:
            before, after = map(str.splitlines, change.of(self.chapter))
            lines = list(difflib.unified_diff(before, after, n=2, lineterm=""))[3:]
            told.append("\n".join([f"{self.stage}.py, {change.where}", *lines]))
        return "\n\n".join(told)


def _exhibits() -> dict[int, Exhibit]:
    """{number: exhibit}"""
    found = {}
    for number, row in enumerate(written.beside(__file__)["exhibit"], 1):
        differs = frozenset(row["differs"])
        row["changes"] = tuple(Change(**change) for change in row.get("changes", ()))
        row.setdefault("symptom", f"what differs from the right engine: {', '.join(sorted(differs)) or 'nothing'}")
        row["options"] = row.get("options", {}) | ({"offload_policy": CPUOffloadPolicy()} if "offload" in row else {})
        found[number] = Exhibit(**{**row, "number": number, "differs": differs})
    return found


EXHIBITS = _exhibits()


def exhibit_of(number: str) -> Exhibit:
    """The exhibit with the number that somebody has typed. Raises ValueError if there is none."""
    if not number.isdecimal() or int(number) not in EXHIBITS:
        raise ValueError(f"no bug {number!r}; there are 1 to {len(EXHIBITS)}, ./launch.sh bug lists them")
    return EXHIBITS[int(number)]
