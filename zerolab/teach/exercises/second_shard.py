"""The task `second_shard`: backward gathers inside each machine."""

from zerolab.teach.exercises.kinds import Task

EXERCISE = Task(
    goal="gathers across machines only in forward, and keeps a second shard of each unit for backward",
    ranks=4,
)
