"""Correct solutions of the exercises, for test_exercises.py. These files are read by `./launch.sh check`.

NAME.py is the reference solution of a task, and NAME_something.py is another one. zero2_free.py solves the exercise
zero2 and has nothing of the chapter's structure.
"""
