"""The task `own_prefetch`: a prefetch that counts bytes and not units."""

from zerolab.teach.exercises.kinds import Task

EXERCISE = Task(
    goal="gathers several small units ahead, and no more bytes at once than the chapter",
)
