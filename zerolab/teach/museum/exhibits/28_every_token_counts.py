"""Every token counts

Symptom: The losses differ from the second step on, and there is one all-reduce less.

Clue: The model is not trained to predict spaces. How many other bytes does a batch of rank 0 have, and one of rank 1?

Hint: "A mean over tokens" in docs/using-an-engine.md. What is the mean over the ranks that an engine takes a mean of?

Answer: Each rank takes the mean over its own tokens, and the engine takes the mean of these means. A token of a rank
with few tokens then weighs more than a token of a rank with many. Only if all ranks have the same number of tokens, the
mean of the means is the mean over all tokens. So add up the losses of the tokens, multiply the sum by the number of
ranks, and divide by the number of the tokens of all ranks.

Unnoticed: `cross_entropy` leaves out padding and takes a mean by default. Each rank's loss is correct, and it falls.
The transformers library had this mistake for years, between micro-batches, until somebody compared accumulation with
one large batch.

Read: tests/conformance/test_loops.py, `backward_over_tokens`.
"""

import torch.distributed as dist
from torch import nn

from zerolab.engine import ZeRO2Engine

STAGE = "engines"
DIFFERS = {"losses", "all-reduces", "reductions inside backward", "sent"}
CAUGHT_BY = "tests/conformance/test_loops.py::test_a_mean_over_the_tokens_of_all_ranks"
PADDING = -100  # what `cross_entropy` leaves out


def cross_entropy(outputs, targets, reduction):
    return nn.functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1), reduction=reduction)


def without_spaces(targets):
    return targets.masked_fill(targets == ord(" "), PADDING)


def mean_of_means(engine, micro_batches):
    """Forward and backward of a step. Returns the mean loss of each batch of this rank."""
    means = []
    for inputs, targets in micro_batches:
        mean = cross_entropy(engine(inputs), without_spaces(targets), "mean")
        (mean / len(micro_batches)).backward()
        means.append(mean.item())
    return means


def mean_over_tokens(engine, micro_batches):
    tokens = sum((without_spaces(targets) != PADDING).sum() for _, targets in micro_batches)
    dist.all_reduce(tokens)
    means = []
    for inputs, targets in micro_batches:
        outputs = engine(inputs)
        losses = cross_entropy(outputs, without_spaces(targets), "sum")
        (losses * dist.get_world_size() / tokens).backward()
        means.append(cross_entropy(outputs.detach(), without_spaces(targets), "mean").item())
    return means


def build(model, optimizer, device):
    engine = ZeRO2Engine(model, optimizer)
    engine.run_backward = mean_of_means
    return engine


def correct(model, optimizer, device):
    engine = ZeRO2Engine(model, optimizer)
    engine.run_backward = mean_over_tokens
    return engine
