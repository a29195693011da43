"""The task `two_machines`: gather across machines, then inside of them."""

from zerolab.teach.exercises.kinds import Target, Task

TASK = Task(
    chapter="zero1",
    goal="gathers in two steps, across machines and inside of them: a third of the bytes goes across",
    ranks=4,
    targets=(
        Target(
            "bytes gathered across machines: at most 0.34 of the chapter's", "bytes gathered across machines", most=0.34
        ),
        Target("bytes sent in all: not more than the chapter's", "bytes sent", most=1.0),
    ),
)
