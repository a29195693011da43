"""Run on every rank: which labels a stage's step has, and inside of which others."""

import parts
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile


def labels_of_a_step(stage: str) -> list[tuple[str, str | None]]:
    """(label, the label around it) of building an engine and one training step, in the order of their beginnings."""
    model = parts.seeded(parts.OddModel, dtype=torch.float32)
    inputs, targets = parts.token_batch(0, dist.get_rank())
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        engine = parts.STAGES[stage](model, parts.OPTIMIZERS["adamw"])
        engine.training_step(inputs, targets, F.cross_entropy)
    found = []
    for event in sorted(watched.events(), key=lambda event: event.time_range.start):
        if event.name.startswith("step "):
            around = event.cpu_parent
            while around is not None and not around.name.startswith("step "):
                around = around.cpu_parent
            found.append((event.name, None if around is None else around.name))
    return found
