"""Teach: exercises and their check, the museum of bugs, the articles' claims, and what the notebooks share.

May import everything except extra/ and tests/. The notebooks, extra/ and tests/ import it, and zerolab/run/launch.py
imports the options of its commands.
"""
