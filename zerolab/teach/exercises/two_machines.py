"""The task `two_machines`: gather across machines, then inside of them."""

from zerolab.teach.exercises.kinds import Task

EXERCISE = Task(
    goal="gathers in two steps, across machines and inside of them: a third of the bytes goes across",
    ranks=4,
)
