"""The task `micro_batches`: one reduction for several backwards."""

from zerolab.teach.exercises.kinds import Target, Task

TASK = Task(
    chapter="zero2",
    goal="trains on four micro-batches per step and sends 2Ψ elements, as on one; the chapter sends 5Ψ",
    backwards=4,
    targets=(
        Target("the weights are the chapter's, which reduces in every backward"),
        Target("bytes sent: at most 0.4 of the chapter's (2Ψ of 5Ψ)", "bytes sent", most=0.4),
        Target(
            "bytes alive at the worst moment: at most 1.6 of the chapter's, so one micro-batch's activations at a time",
            "bytes alive at the worst moment",
            most=1.6,
        ),
    ),
)
