"""The task `own_prefetch`: a prefetch that counts bytes and not units."""

from zerolab.teach.exercises.kinds import Target, Task

TASK = Task(
    chapter="zero3",
    goal="gathers several small units ahead, and no more bytes at once than the chapter",
    targets=(
        Target("bytes gathered at once: not more than the chapter's", "bytes gathered at once", most=1.0),
        Target("buffers gathered at once: three or more (the chapter: two)", "buffers gathered at once", least=3),
        Target("bytes sent: not more than the chapter's", "bytes sent", most=1.0),
    ),
)
