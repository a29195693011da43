"""Engine: what every stage needs and none teaches, a page or two each. Imports torch and nothing else.

Start with `gradient_hooks`: it knows when a stage has to act.
"""
