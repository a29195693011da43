"""Teach: exercises and their check, the museum of bugs, the articles' claims, what changes between the chapters.

May import everything; nothing outside imports it.
"""
