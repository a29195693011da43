"""Solutions and mistakes of students, for test_exercises.py. These files are read, and never imported.

In a chapter's file every top-level class is one student. `Solution` has all functions of the exercise. The others have
some of them, and the rest is `Solution`'s. A class with `found` is wrong, and `found` is a part of what the check says
of it. The classes inside have the names of the chapter's classes.

A task's folder has whole files: right*.py pass, and wrong*.py begin with a part of what the check says of them.
"""
