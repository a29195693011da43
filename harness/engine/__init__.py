"""Engine: what every stage needs and none teaches. Imports torch and nothing else.

Start with `gradient_hooks`: it knows when a stage has to act.
"""
