"""The task `uneven_units`: other units for blocks of unequal size."""

from zerolab.teach.exercises.kinds import Task

EXERCISE = Task(
    goal="never gathers more than two layers at once of a model whose largest block has eight",
)
