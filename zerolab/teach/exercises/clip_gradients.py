"""The task `clip_gradients`: clip by the norm over all shards."""

from zerolab.teach.exercises.kinds import Target, Task

TASK = Task(
    chapter="zero2",
    goal="clips as torch.nn.utils.clip_grad_norm_ does on the whole model, and sends a number per rank",
    targets=(
        Target("the norm, and the clipped gradients, for the norms 2, 1, 3 and infinity", "clipping"),
        Target("a NaN or an infinity on one rank is seen by all ranks", "no numbers"),
        Target("bytes sent while clipping: 64 per rank at most, and no gradients", "bytes sent while clipping"),
    ),
)
