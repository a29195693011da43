"""The steps of an exercise, in their order: the checks of harness/properties/moves.py, in words for a student."""

from dataclasses import dataclass

from harness.properties.moves import ALL_STEPS, MOVES
from harness.teach.exercise import EXERCISES, Blank


@dataclass(frozen=True)
class Check:
    """One line of the report: what it looks at (`blank`, or all steps together) and how."""

    title: str
    look: object
    blank: Blank | None = None

    @property
    def read(self) -> str:
        return self.blank.read if self.blank else "what stands at the top of the file, and its class's docstring"


def checks_of(name: str) -> list[Check]:
    """The checks of an exercise, in the order of the steps."""
    titles = (
        "All steps: training like one process on all data, and what it sends",
        "All steps: what is held, and that nothing else is alive",
    )
    blanks = EXERCISES[name].blanks
    return [
        *(Check(blank.task, look, blank) for blank, look in zip(blanks, MOVES[name], strict=True)),
        *(Check(title, look) for title, look in zip(titles, ALL_STEPS, strict=True)),
    ]
