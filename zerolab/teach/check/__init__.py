"""`./launch.sh check`: the chapter and a student's file train the same models, and what they do is compared.

report.py       the command: starts the ranks, and prints their verdicts
examine.py      runs on every rank: tries the blanks of a chapter or the targets of a task, one by one
module.py       a student's file as a module in which all blanks but one are the chapter's
cases.py        the trainings in which a blank is tried
models.py       their models and data
recorder.py     the collectives of a training
state.py        the tensors and values that an engine holds
difference.py   compares two trainings, call by call of the functions in a blank
tasks.py        measures the targets of a task
findings.py     the exception for a difference
"""
