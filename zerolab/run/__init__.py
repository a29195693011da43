"""Run: what starts and feeds a run. The process group, ranks, the model, the data, training runs, and the registry.

Imports torch, engine and the chapters.
"""
