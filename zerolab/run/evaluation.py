"""How good a model is on text that it was not trained on: its loss, and the text that it generates."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from zerolab.run.data import Batches
from zerolab.run.model import GPTConfig, sample

BATCHES = 4
PROMPT, WRITTEN = 32, 64  # bytes


@torch.no_grad()
def mean_loss(model: nn.Module, loss_of: Callable[[int], torch.Tensor]) -> float:
    """The mean loss of some batches; `loss_of(index)` is this rank's part of a batch's loss. All ranks call it."""
    model.eval()
    loss = sum(loss_of(index) for index in range(BATCHES)) / BATCHES
    model.train()
    dist.all_reduce(loss)
    return loss.item()


def continue_text(model: nn.Module, forward: Callable, config: GPTConfig, batches: Batches) -> str:
    """A sentence with the text's first bytes and how the model continues them. All ranks call it.

    `forward` is the model, or an engine around it.
    """
    model.eval()
    prompt = bytes(batches.text[:PROMPT].tolist())
    written = sample(forward, prompt, WRITTEN, config, batches.seed, batches.device)
    return f"After {prompt!r} the model writes {written!r}."
