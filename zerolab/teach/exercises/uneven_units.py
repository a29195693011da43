"""The task `uneven_units`: other units for blocks of unequal size."""

from zerolab.teach.exercises.kinds import Target, Task

TASK = Task(
    chapter="zero3",
    goal="never gathers more than two layers at once of a model whose largest block has eight",
    targets=(
        Target("bytes gathered at once: at most a quarter of the chapter's", "bytes gathered at once", most=0.25),
        Target("bytes sent: the chapter's, and a hundredth for padding", "bytes sent", most=1.01),
        Target("collectives: at most twice the chapter's", "collectives", most=2.0),
    ),
)
