"""The exercises, with hints and targets, each in the file with its name: chapters with blanks, and tasks.

A task extends a chapter by a class of yours. `starts/` has the files that the tasks begin with. The cells that readers
write in notebooks are in zerolab/teach/practice.py.
"""

import importlib

from zerolab.run import names

EXERCISES = {name: importlib.import_module(f"{__name__}.{name}").EXERCISE for name in names.EXERCISES}
