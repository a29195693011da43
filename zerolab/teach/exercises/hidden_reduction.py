"""The task `hidden_reduction`: ZeRO-1 that reduces inside backward."""

from zerolab.teach.exercises.kinds import Task

EXERCISE = Task(
    goal="starts all its reductions inside backward, and waits for them after it",
)
