"""The task `clip_gradients`: clip by the norm over all shards."""

from zerolab.teach.exercises.kinds import Task

EXERCISE = Task(
    goal="clips as torch.nn.utils.clip_grad_norm_ does on the whole model, and sends a number per rank",
)
