"""Parameters that a step leaves without a gradient, on some ranks or on all."""

from functools import partial

import pytest
import torch
from helpers import MOMENTUM, Blocks, batch, mse, own_batch, seeded
from torch import nn

from conformance.pair import Pair

# AdamW decays parameters that have a gradient, also a zero gradient.
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.3)


class Choices(nn.Module):
    """Parts that a step may leave unused: weights in units, a whole unit, an early and a late root parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.early = nn.Parameter(torch.randn(5))
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))
        self.spare = nn.ModuleList([nn.Linear(5, 5)])
        self.heads = nn.ModuleDict({"first": nn.Linear(5, 3), "second": nn.Linear(5, 3)})  # of the root
        self.never = nn.Parameter(torch.randn(5))

    def forward(self, tokens, choice, early, spare):
        x = self.embedding(tokens).mean(1)
        if early:
            x = x + self.early
        for block in self.blocks:
            x = block(x, choice)
        if spare:
            x = self.spare[0](x)
        first, second = (head(x) for head in self.heads.values())
        return second if choice else first


class Adapted(nn.Module):
    """A layer with adapters, of which a forward uses one or none."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(5, 5)
        self.adapters = nn.ParameterList([torch.randn(5) for _ in range(3)])

    def forward(self, x, choice):
        x = torch.tanh(self.base(x))
        return x if choice == 0 else x * self.adapters[choice - 1]


def choices_of(step, rank, alike=False):
    """The batch, and the choices for forward. They differ between ranks, except for units, unless `alike`."""
    who = step if alike else step + rank
    tokens, targets = batch(step, rank)
    return tokens, targets, who % 3, who % 4 == 0, step % 2 == 0


def chosen_loss(model, tokens, targets, *choices):
    return nn.functional.mse_loss(model(tokens, *choices), targets)


def choosing(engine, alike=False, **options):
    data = partial(choices_of, alike=alike)
    model = seeded(Choices)
    return Pair(engine, model, ADAMW, data=data, loss=chosen_loss, find_unused=True, tolerance=1e-10, **options)


@pytest.mark.ranks(3, thorough=(2,))
@pytest.mark.parametrize("alike", [False, True])
def test_what_no_rank_used_is_left_out_of_the_step(engine, alike):
    """With `find_unused` an unused parameter gets no decay and no momentum, and the others train as usual."""
    pair = choosing(engine, alike)
    for step in range(6):
        pair.backward(step)
        assert pair.plain.never.grad is None
        pair.step()
    pair.check_weights()


@pytest.mark.parametrize("no_sync", [False, True])
def test_unused_parameters_and_several_backwards(engine, no_sync):
    """A parameter that one backward of a step used counts as used. Gradients are also clipped."""
    pair = choosing(engine)
    for step in range(4):
        for micro in range(3):
            pair.backward(10 * step + micro, quiet=no_sync and micro < 2)
        pair.clip(0.1)
        pair.step()
    pair.check_weights()


@pytest.mark.stages("zero1", "zero2", "zero3")
@pytest.mark.parametrize("where", ["all ranks", "one rank"])
def test_a_backward_that_reaches_no_parameter(engine, where):
    """The step uses the other ranks' gradients. If there are none, it changes nothing, as in plain torch."""
    if engine.like == "zero3" and where == "one rank":
        pytest.skip("every rank must gather the same units in backward (docs/limits.md)")

    def loss_of(model, tokens, targets, reaches):
        return mse(model, tokens, targets) if reaches else torch.ones(1, dtype=torch.float64, requires_grad=True).sum()

    def data(step, rank):
        return *batch(step, rank), step != 1 or (where == "one rank" and rank == 0)

    pair = Pair(engine, seeded(Blocks), ADAMW, data=data, loss=loss_of, find_unused=True, tolerance=1e-10)
    pair.train(4)


class Spare(Blocks):
    """A model with a weight that a forward can leave unused."""

    use = True

    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, tokens):
        out = super().forward(tokens)
        return out * self.spare if self.use else out


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_a_missing_gradient_is_refused_by_name(engine):
    """Without `find_unused` every rank's error names the parameter and the option. Then training continues."""
    pair = Pair(engine, seeded(Spare))
    pair.train(1)
    pair.model.use = False
    pair.loss_of_engine().backward()
    with pytest.raises(RuntimeError, match=r"no gradient for 'spare'.*find_unused=True"):
        pair.trained.step()
    pair.trained.zero_grad()
    pair.model.use = True
    pair.train()


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_a_step_without_a_backward_is_refused(engine):
    """All gradients are missing."""
    model = seeded(Blocks)
    trained = engine(model, MOMENTUM(model.parameters()))
    with pytest.raises(RuntimeError, match="no gradient for"):
        trained.step()
    mse(trained, *own_batch(0)).backward()
    trained.step()


@pytest.mark.stages("zero2", "zero3")
def test_a_sparse_gradient_is_refused_by_name(engine):
    """It cannot be sent. In ZeRO-1 autograd adds it to the bucket's buffer, which is correct."""
    pair = Pair(engine, seeded(Blocks))
    pair.model.embedding.sparse = True
    with pytest.raises(RuntimeError, match=r"'embedding.weight'.*sparse"):
        pair.loss_of_engine().backward()
        pair.trained.step()
    pair.trained.zero_grad()
    pair.model.embedding.sparse = False
    pair.train()
