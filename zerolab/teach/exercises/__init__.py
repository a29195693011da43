"""The exercises, a file each, with hints and targets: chapters with blanks, and tasks.

A task extends a chapter by a class of yours. `starts/` has the files that the tasks begin with. The cells that readers
write in notebooks are in zerolab/teach/practice.
"""

from zerolab.run import names
from zerolab.teach.exercises import (
    clip_gradients,
    hidden_reduction,
    micro_batches,
    own_prefetch,
    two_machines,
    uneven_units,
    zero1,
    zero1_2psi,
    zero2,
    zero3,
)

_ALL = {
    "zero1": zero1.EXERCISE,
    "zero1_2psi": zero1_2psi.EXERCISE,
    "zero2": zero2.EXERCISE,
    "zero3": zero3.EXERCISE,
    "clip_gradients": clip_gradients.TASK,
    "micro_batches": micro_batches.TASK,
    "uneven_units": uneven_units.TASK,
    "own_prefetch": own_prefetch.TASK,
    "hidden_reduction": hidden_reduction.TASK,
    "two_machines": two_machines.TASK,
}
EXERCISES = {name: _ALL[name] for name in names.EXERCISES}
