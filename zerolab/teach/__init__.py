"""Teach: exercises and their check, the museum of bugs, the articles' claims, what changes between the chapters.

May import everything except extra/ and tests/. The notebooks, extra/ and tests/ import it. zerolab/run/launch.py imports
only the options of its commands, when one of them is started.
"""
