"""Gradient accumulation: a rank's batch in K micro-batches, one after the other, and one update.

The activations of one micro-batch are alive at a time, so a large batch fits where it would not at once. The gradients
add up. `no_sync` is not used, so engines that send gradients in backward send them K times.
"""

import argparse

import torch
from torch.profiler import record_function


def in_words(options: argparse.Namespace) -> str:
    """ ", in K micro-batches" for a headline, or "" where there is one."""
    return f", in {options.accumulate} micro-batches" if options.accumulate > 1 else ""


def training_step(engine, inputs, targets, loss_fn, accumulate: int = 1) -> torch.Tensor:
    """One step on this rank's batch, in `accumulate` equal parts. Returns the loss of the batch, 0-d and detached.

    The engine has `training_step`; for more than one part it is called like its model, and has `step` and `zero_grad`.
    """
    if accumulate == 1:
        return engine.training_step(inputs, targets, loss_fn)
    parts = zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True)
    losses = [_backward(engine, part, wanted, loss_fn, accumulate) for part, wanted in parts]
    engine.step()
    engine.zero_grad()
    return torch.stack(losses).sum()


def _backward(engine, inputs, targets, loss_fn, parts: int = 1) -> torch.Tensor:
    """Forward and backward. The loss is divided by `parts`, so that the parts' sum is the batch's mean."""
    with record_function("step 1 forward"):
        loss = loss_fn(engine(inputs), targets)
        loss = loss if parts == 1 else loss / parts
    with record_function("step 2 backward"):
        loss.backward()
    return loss.detach()


class Looped:
    """Whatever is called like its model and has `step` and `zero_grad`, with a `training_step`."""

    def training_step(self, inputs, targets, loss_fn) -> torch.Tensor:
        loss = _backward(self, inputs, targets, loss_fn)
        self.step()
        self.zero_grad()
        return loss
