"""The two kinds of exercise: a chapter with blanks, and a task, which extends a chapter by a class of yours."""

import importlib
from dataclasses import dataclass

WHERE_TO_READ = "the docstring at the top of the file and the one of its class"


@dataclass(frozen=True)
class Blank:
    """A step to write: the bodies of the functions `where` are taken out of the chapter.

    A function is named "Class.method" or "function". `title` is the text of the NotImplementedError that takes the
    place of each body. Above the first one there are as many `hints` as were asked for (what to think of, then how to
    do it) and the `target`. `read` says where to look if the check fails.
    """

    title: str
    where: tuple[str, ...]
    hints: tuple[str, str]
    target: str
    read: str = WHERE_TO_READ


@dataclass(frozen=True)
class ChapterExercise:
    """A chapter with blanks. Its tests are in zerolab/teach/check/test_NAME.py."""

    chapter: str
    goal: str
    blanks: tuple[Blank, ...]
    ranks: int = 2

    @property
    def engine(self) -> str:
        """The name of the class that is checked."""
        return {"zero1": "ZeRO1", "zero2": "ZeRO2", "zero3": "ZeRO3"}[self.chapter]

    def solution(self):
        """The module that has the chapter's functions."""
        return importlib.import_module(self.chapter)


@dataclass(frozen=True)
class Task:
    """A class `Engine` to write over a chapter's class, on at least so many `ranks`.

    The student begins with starts/NAME.py. What is demanded is in zerolab/teach/check/test_NAME.py: each test is a
    target, and the first line of its docstring is its title.
    """

    goal: str
    ranks: int = 2
    engine = "Engine"
