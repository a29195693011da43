"""Checkpoints that any stage loads at any number of ranks, and torch's own classes too.

    checkpoint.save(engine, "run", step=100)     # a new folder run/000001; `step` is the caller's own value
    extra = checkpoint.load(engine, "run")       # the newest one; {"step": 100}

Every rank writes what it has: its rectangles (rectangles.py) of each parameter and of the optimizer's state. Nothing is
gathered. Names and layout are those of torch's `get_model_state_dict` and `get_optimizer_state_dict`.

What is saved is in saving.py, and how the files come to disk in files.py. How they are read is in reader.py, and
whether they fit an engine in loading.py.
"""
