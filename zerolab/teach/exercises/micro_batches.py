"""The task `micro_batches`: one reduction for several backwards."""

from zerolab.teach.exercises.kinds import Task

EXERCISE = Task(
    goal="trains on four micro-batches per step and sends 2Ψ elements, as on one; the chapter sends 5Ψ",
)
