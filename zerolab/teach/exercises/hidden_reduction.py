"""The task `hidden_reduction`: ZeRO-1 that reduces inside backward."""

from zerolab.teach.exercises.kinds import Target, Task

TASK = Task(
    chapter="zero1",
    goal="starts all its reductions inside backward, and waits for them after it",
    options={"bucket_mb": 0.002},
    targets=(
        Target("collectives in backward: all reductions, two or more", "collectives in backward", least=2),
        Target("collectives in flight after backward: two or more", "in flight after backward", least=2),
        Target("bytes sent: not more than the chapter's", "bytes sent", most=1.0),
        Target("the weights are the chapter's where a step has two backwards, and where ranks finish in other orders"),
    ),
)
