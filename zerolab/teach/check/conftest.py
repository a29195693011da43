"""Options of the exercises' tests, the argument `stage`, and the order of the tests."""

from dataclasses import dataclass
from pathlib import Path

from zerolab.run import pool
from zerolab.teach.check import student
from zerolab.teach.exercises import EXERCISES
from zerolab.teach.exercises.kinds import Task


def pytest_addoption(parser):
    parser.addoption("--file", metavar="FILE", help="the student's file; default: exercises/NAME.py")
    parser.addoption("--blank", type=int, metavar="K", help="only the tests of blank K, from 0 on")
    parser.addoption("--on", type=int, metavar="N", help="how many ranks; default: 3, or what the task needs")
    parser.addoption("--seconds", type=int, default=20, metavar="S", help="how long a rank may wait for another one")


def pytest_configure(config):
    config.addinivalue_line("markers", "blank(function): the blank that a test judges; default: every blank")
    pool.TIMEOUT = config.getoption("seconds")


@dataclass(frozen=True)
class Stage:
    """The student's class, for tests. On the ranks it is the class itself: see `student.stage_of`."""

    name: str  # of the exercise
    file: str
    number: int | None  # of the blank that is the student's; None: the whole file is
    ranks: int

    @property
    def state(self):
        if self.number is None:
            return student.WRITTEN, ""
        return student.state_of_blank(self.name, self.file, self.number)


def pytest_generate_tests(metafunc):
    if "stage" not in metafunc.fixturenames:
        return
    name = metafunc.module.__name__.rpartition("test_")[2]
    exercise = EXERCISES[name]
    file = str(Path(metafunc.config.getoption("file") or f"exercises/{name}.py").resolve())
    ranks = metafunc.config.getoption("on") or max(3, exercise.ranks)  # with two, too much is equal on both
    numbers = [None] if isinstance(exercise, Task) else range(len(exercise.blanks))
    only = metafunc.config.getoption("blank")
    numbers = [number for number in numbers if only in (None, number)]
    mark = metafunc.definition.get_closest_marker("blank")
    if mark is not None:
        numbers = [number for number in numbers if mark.args[0] in exercise.blanks[number].where]
    stages = [Stage(name, file, number, ranks) for number in numbers]
    metafunc.parametrize("stage", stages, ids=[title_of(stage, metafunc.function) for stage in stages])


def title_of(stage: Stage, test) -> str:
    """What is printed: the title of the blank; of a task, the first line of the test's docstring."""
    if stage.number is None:
        return test.__doc__.splitlines()[0].rstrip(".")
    return EXERCISES[stage.name].blanks[stage.number].title


def pytest_collection_modifyitems(items):
    """All tests of a blank, one after the other, in the order of the blanks. It is stable otherwise."""
    items[:] = [item for item in items if isinstance(item.callspec.params["stage"], Stage)]  # without: of no blank
    items.sort(key=lambda item: item.callspec.params["stage"].number or 0)
    for item in items:
        stage = item.callspec.params["stage"]
        item.user_properties.append(("title", title_of(stage, item.function)))
