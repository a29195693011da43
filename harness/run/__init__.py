"""Run: what starts and feeds a run. The process group, the model, the data, and the walk-through of a chapter.

Imports torch, engine and measure.
"""
