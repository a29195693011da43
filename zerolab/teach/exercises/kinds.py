"""The two kinds of exercise: a chapter with blanks, and a task, which extends a chapter by a class of yours."""

from dataclasses import dataclass, field

WHERE_TO_READ = "the docstring at the top of the file and the one of its class"


@dataclass(frozen=True)
class Blank:
    """A step to write: the bodies of the functions `where` are taken out of the chapter.

    A function is named "Class.method" or "function". `title` is the text of the NotImplementedError that takes the
    place of each body. Above the first one there are as many `hints` as were asked for (what to think of, then how to
    do it) and the `target`. `read` says where to look if the check fails.

    The check compares what the functions `compared` do in the chapter and in the student's file. By default these are
    the functions of the blank.

    With `first` and `last` only a part of the (single) body is taken out: from the statement that assigns to `first` to
    the one that assigns to `last`.
    """

    title: str
    where: tuple[str, ...]
    hints: tuple[str, str]
    target: str
    read: str = WHERE_TO_READ
    compared: tuple[str, ...] = ()
    first: str = ""
    last: str = ""

    @property
    def watched(self) -> tuple[str, ...]:
        return self.compared or self.where


@dataclass(frozen=True)
class WholeFile:
    """The last check of a chapter's exercise: the file as it is, with all blanks of the student's."""

    title: str = "All steps: training steps, what they send and what they hold"
    read: str = WHERE_TO_READ
    hints: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A demand of a task on a `number` that check/tasks.py measures.

    `least` is a number, `most` a fraction of what the chapter has in the same training. Without a number the target is
    the chapter's weights.
    """

    title: str
    number: str = ""
    least: float = 0
    most: float | None = None
    read: str = WHERE_TO_READ
    hints: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChapterExercise:
    """A chapter with blanks. `answers` are functions that replace the chapter's in the comparison, by "Class.method".

    They are for an exercise that asks for something else than the chapter does.
    """

    chapter: str
    goal: str
    blanks: tuple[Blank, ...]
    answers: dict = field(default_factory=dict)
    ranks: int = 2

    @property
    def engine(self) -> str:
        """The name of the class that is checked."""
        return {"zero1": "ZeRO1", "zero2": "ZeRO2", "zero3": "ZeRO3"}[self.chapter]

    @property
    def checks(self) -> tuple:
        """The checks, a point each: every blank by itself, then the whole file."""
        return *self.blanks, WholeFile()


@dataclass(frozen=True)
class Task:
    """A class `Engine` to write over a chapter's class. The student begins with starts/NAME.py.

    `options` are given to both classes. A step has `backwards` backwards, and needs at least so many `ranks`.
    """

    chapter: str
    goal: str
    targets: tuple[Target, ...]
    options: dict = field(default_factory=dict)
    backwards: int = 1
    ranks: int = 2
    engine = "Engine"

    @property
    def checks(self) -> tuple:
        return self.targets
