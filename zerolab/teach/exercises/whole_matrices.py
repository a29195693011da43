"""The task `whole_matrices`: every parameter belongs entirely to one rank."""

from zerolab.teach.exercises.kinds import Task

EXERCISE = Task(
    goal="trains with torch.optim.Muon, with 1/N of its state on each rank and the chapter's collectives",
)
