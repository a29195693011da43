"""Measure: instruments that watch from outside (ledger, parts, traffic, timeline), dry runs, sweeps and figures.

Imports the rooms before it, and the stages and the referee that it measures.
"""
