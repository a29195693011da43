"""Training recipes that people use: two models, several forwards and backwards in a step, adapters, averages."""

import pytest
import torch
from helpers import MOMENTUM, Blocks, batch, mse, same, seeded
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from conformance.pair import Pair
from conformance.test_loops import train_in
from conformance.test_models import Layers, leaves, model_of

pytestmark = [pytest.mark.stages("zero1", "zero2", "zero3")]

# One step with several forwards and backwards. `scale` is 1/N for plain torch, which adds up the ranks' gradients.


def gradient_cache(model, inputs, targets, scale):
    """GradCache: a contrastive loss over more samples than fit. The second forward of each chunk has a backward."""
    chunks = inputs.chunk(2)
    with torch.no_grad():
        embeddings = torch.cat([model(chunk) for chunk in chunks])
    embeddings.requires_grad_()
    F.cross_entropy(embeddings @ embeddings.T, torch.arange(len(inputs))).backward()
    for chunk, gradient in zip(chunks, embeddings.grad.chunk(2)):
        (model(chunk) * gradient).sum().mul(scale).backward()


def attacked(model, x, targets, scale):
    """PGD: inputs are moved along their gradients first. Their gradients alone leave no trace in the weights."""
    change = torch.zeros_like(x).requires_grad_()
    for _ in range(2):
        (gradient,) = torch.autograd.grad(mse(model, x + change, targets), [change])
        change = (change + 0.1 * gradient.sign()).detach().requires_grad_()
    mse(model, x + change, targets).mul(scale).backward()


RECIPES = {
    "gradient cache": (gradient_cache, Blocks, batch),
    "attacked": (attacked, Layers, leaves),
}


@pytest.mark.chapters
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_of_several_forwards_and_backwards(engine, recipe):
    way, make, data = RECIPES[recipe]
    train_in(way, Pair(engine, seeded(make), data=data))


def test_gradients_of_inputs_between_backward_and_step(engine):
    """They are not a backward that brings no gradients."""
    pair = Pair(engine, seeded(Layers), data=leaves)
    for step in range(3):
        pair.backward(step)
        x, targets = pair.batch(9)
        (found,) = torch.autograd.grad(mse(pair.trained, x, targets), [x])
        (expected,) = torch.autograd.grad(mse(pair.plain, x, targets), [x])
        same(found, expected, pair.tolerance, "the gradient of the inputs")
        pair.step()
    pair.check_weights()


class WithSide(Layers):
    """A second head, whose output is not in the loss."""

    def __init__(self):
        super().__init__()
        self.side = nn.Linear(3, 1)

    def forward(self, x):
        out = super().forward(x)
        return out, self.side(out)


@pytest.mark.stages("zero1", "zero2")
def test_gradients_that_are_not_accumulated_are_no_use_of_a_parameter(engine):
    """`torch.autograd.grad` with respect to parameters. The optimizer skips those that no backward has used."""

    def loss(model, x, targets):
        out, side = model(x)
        torch.autograd.grad(side.sum(), list(model_of(model).side.parameters()), retain_graph=True)
        return F.mse_loss(out, targets)

    Pair(engine, seeded(WithSide), data=leaves, loss=loss, find_unused=True).train()


class Judge(nn.Module):
    """Tells apart what the other network made and what the targets are."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.chapters
def test_two_models_train_against_each_other(engine):
    """A GAN. The backward of one network's loss passes through the other one, whose gradients are thrown away."""
    makers, judges = Pair(engine, seeded(Blocks)), Pair(engine, seeded(Judge))

    def judge_step(maker, judge, inputs, targets, scale):
        made = maker(inputs).detach()
        (judge(targets).sigmoid().mean() - judge(made).sigmoid().mean()).mul(scale).backward()

    def maker_step(maker, judge, inputs, targets, scale):
        judge(maker(inputs)).sigmoid().mean().mul(scale).backward()

    for step in range(3):
        for half, trained in ((judge_step, judges), (maker_step, makers)):
            for rank in range(len(makers.ranks)):
                half(makers.plain, judges.plain, *makers.batch(step, rank), 1 / len(makers.ranks))
            half(makers.trained, judges.trained, *makers.batch(step), 1)
            trained.step()
            for pair in (makers, judges):
                pair.optimizer.zero_grad()
                pair.trained.zero_grad()
    makers.check_weights()
    judges.check_weights()


# Models and optimizers.


class TwoAdapters(Layers):
    @staticmethod
    def run(block, x):
        return torch.tanh(block.a(x)) + torch.tanh(block.b(x))


def test_adapters_take_turns(engine):
    """With `find_unused` a loop may freeze and unfreeze parameters that required a gradient at the build."""
    pair = Pair(engine, seeded(TwoAdapters), data=leaves, find_unused=True)
    for step in range(4):
        for model in (pair.plain, pair.model):
            for block in model.blocks:
                block.a.requires_grad_(step % 2 == 0)
                block.b.requires_grad_(step % 2 == 1)
        pair.backward(step)
        pair.step()
    pair.check_weights()


def test_a_moving_average_of_the_weights(engine):
    """As docs/using-an-engine.md shows it: each rank averages its own pieces."""
    pair = Pair(engine, seeded(Blocks), MOMENTUM)
    expected = AveragedModel(pair.plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    expected.update_parameters(pair.plain)  # the first call copies
    pieces = [piece for group in pair.trained.optimizer.param_groups for piece in group["params"]]
    averages = [piece.detach().clone() for piece in pieces]
    update = get_ema_multi_avg_fn(0.9)
    for step in range(3):
        pair.backward(step)
        pair.step()
        expected.update_parameters(pair.plain)
        with torch.no_grad():
            update(averages, pieces, None)
    with torch.no_grad():
        for piece, average in zip(pieces, averages):
            piece.copy_(average)
    pair.trained.load_full_state_dict(pair.trained.full_state_dict())
    found = pair.engine.weights(pair.trained)
    for name, weight in expected.module.named_parameters():
        same(found[name], weight.detach(), pair.tolerance, f"the average of {name}")
