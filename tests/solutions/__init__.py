"""Correct solutions of the exercises, for test_exercises.py. These files are read by `./launch.sh check`.

NAME.py is the reference solution of a task. second_shard_of_the_engine.py is another one, because much of that task is
left open. zero2_free.py solves the exercise zero2 and has nothing of the chapter's structure.
"""
