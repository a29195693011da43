"""Training recipes that people use: several models, several backwards in one loss, adapters, averages, long models."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from helpers import MOMENTUM, WIDTH, Block, Blocks, batch, mse, same, seeded
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from conformance.pair import Pair
from conformance.test_models import Layer, Layers, leaves, model_of, with_kept_losses

pytestmark = [pytest.mark.stages("zero1", "zero2", "zero3")]

# One step with several forwards and backwards. `scale` is 1/N for plain torch, which adds up the ranks' gradients.


def in_reverse(model, inputs, targets, scale):
    """Two forwards, and then their backwards, the last one first."""
    first = mse(model, inputs, targets) * scale
    second = mse(model, 10 - inputs, targets) * scale
    second.backward()
    first.backward()


def gradient_cache(model, inputs, targets, scale):
    """GradCache: a contrastive loss over more samples than fit. The second forward of each chunk has a backward."""
    chunks = inputs.chunk(2)
    with torch.no_grad():
        embeddings = torch.cat([model(chunk) for chunk in chunks])
    embeddings.requires_grad_()
    F.cross_entropy(embeddings @ embeddings.T, torch.arange(len(inputs))).backward()
    for chunk, gradient in zip(chunks, embeddings.grad.chunk(2)):
        (model(chunk) * gradient).sum().mul(scale).backward()


def several_roots(model, inputs, targets, scale):
    """One backward from two losses."""
    torch.autograd.backward([mse(model, inputs, targets) * scale, model(10 - inputs).square().mean() * scale])


def in_another_thread(model, inputs, targets, scale):
    loss = mse(model, inputs, targets) * scale
    with ThreadPoolExecutor(1) as executor:
        executor.submit(loss.backward).result()


def attacked(model, x, targets, scale):
    """PGD: inputs are moved along their gradients first. Their gradients alone leave no trace in the weights."""
    change = torch.zeros_like(x).requires_grad_()
    for _ in range(2):
        (gradient,) = torch.autograd.grad(mse(model, x + change, targets), [change])
        change = (change + 0.1 * gradient.sign()).detach().requires_grad_()
    mse(model, x + change, targets).mul(scale).backward()


RECIPES = {
    "in reverse": (in_reverse, Blocks, batch),
    "gradient cache": (gradient_cache, Blocks, batch),
    "several roots": (several_roots, Blocks, batch),
    "in another thread": (in_another_thread, Blocks, batch),
    "attacked": (attacked, Layers, leaves),
}


@pytest.mark.chapters
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_of_several_forwards_and_backwards(engine, recipe):
    way, make, data = RECIPES[recipe]
    pair = Pair(engine, seeded(make), data=data)
    for step in range(3):
        for rank in range(len(pair.ranks)):
            way(pair.plain, *pair.batch(step, rank), 1 / len(pair.ranks))
        way(pair.trained, *pair.batch(step), 1)
        pair.step()
    pair.check_weights()


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


class LossAfterOutput(nn.Module):
    """Keeps a loss of its output as an attribute, and computes it again in backward."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        out = torch.tanh(self.a(x))
        self.loss = checkpoint(self.b, out, use_reentrant=False).square().sum()
        return out


class RecomputedLoss(Layers):
    def make_block(self):
        return LossAfterOutput()


@pytest.mark.stages("zero3")
@pytest.mark.parametrize("options", [{}, {"reshard_after_backward": False}], ids=["freed", "kept"])
@pytest.mark.parametrize("find_unused", [False, True])
def test_losses_that_are_recomputed_in_two_graphs(engine, options, find_unused):
    """One backward through two forwards. It comes to a unit again, and only a gradient shows that."""

    def loss(model, x, targets):
        return with_kept_losses(model, x, targets) + with_kept_losses(model, x.detach() + 1, targets)

    Pair(engine, seeded(RecomputedLoss), data=leaves, loss=loss, find_unused=find_unused, **options).train()


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


class FusedLoss(torch.autograd.Function):
    """A head and its loss whose gradients are computed in forward, so that no outputs are kept for backward."""

    @staticmethod
    def forward(ctx, h, weight, targets):
        difference = h @ weight.T - targets
        per_output = 2 / targets.numel() * difference
        ctx.save_for_backward(per_output @ weight, per_output.T @ h)
        return difference.square().mean()

    @staticmethod
    def backward(ctx, gradient):
        of_h, of_weight = ctx.saved_tensors
        return gradient * of_h, gradient * of_weight, None


class FusedHead(Blocks):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens).mean(1)
        for block in self.blocks:
            x = block(x)
        return FusedLoss.apply(x, self.head.weight, targets)


@pytest.mark.chapters
def test_a_fused_head_and_loss(engine):
    def fused(model, tokens, targets):
        return model(tokens, targets)

    Pair(engine, seeded(FusedHead), loss=fused).train()


class Mixed(nn.Module):
    """Convolutions in channels_last, an LSTM and attention as units, and a weight that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(
            [
                nn.Conv2d(2, 4, 3, padding=1),
                nn.LSTM(4, 4, num_layers=2, batch_first=True),
                nn.MultiheadAttention(4, 2, batch_first=True),
                nn.Linear(4, 3),
            ]
        )
        self.units[3].weight = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, tokens):
        convolution, recurrent, attention, last = self.units
        x = tokens.double().view(-1, 1, 2, 3).expand(-1, 2, -1, -1) / 10
        x = convolution(x.contiguous(memory_format=torch.channels_last)).flatten(2).mT
        x, _ = recurrent(x)
        x, _ = attention(x, x, x, need_weights=False)
        return last(x.mean(1))


@pytest.mark.chapters
def test_layers_with_unusual_weights_are_units(engine):
    Pair(engine, seeded(Mixed).to(memory_format=torch.channels_last)).train()


@pytest.mark.stages("zero3")
@pytest.mark.chapters("zero3")
def test_three_hundred_units(engine):
    """As many hooks, gathers and reductions, and no recursion."""
    Pair(engine, seeded(Deep), tolerance=1e-10).train(1)


class Deep(Blocks):
    def __init__(self):
        super().__init__(0)
        self.blocks = nn.ModuleList(Block(3) for _ in range(300))
        for block in self.blocks:
            block.scale.data /= 100


def test_blocks_that_are_compiled_after_the_build(engine):
    """`block.forward = torch.compile(block.forward)`, as the page shows for ZeRO-3."""
    torch.compiler.reset()
    pair = Pair(engine, seeded(Layers), data=leaves)
    for block in pair.model.blocks:
        block.forward = torch.compile(block.forward, backend="eager")
    pair.train(2)


class Lion(torch.optim.Optimizer):
    """Each element moves by the learning rate, in the direction of the sign of a mean."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    param.sub_(torch.sign(0.9 * mean + 0.1 * param.grad), alpha=group["lr"])
                    mean.lerp_(param.grad, 0.01)


def test_lion(engine):
    """An optimizer of your own that treats each element by itself."""
    Pair(engine, seeded(Blocks), partial(Lion, lr=0.01)).train(4)


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
    pair.plain.load_state_dict(expected.module.state_dict())
    pair.evaluate()


# Errors that are not the model's.


class Stopped(Layers):
    """The second block raises an error in its forward or in its backward."""

    def __init__(self):
        super().__init__()
        self.blocks[1] = StoppedLayer(self.run)


class StoppedLayer(Layer):
    error, where = None, ""

    def forward(self, x):
        if self.where == "forward":
            raise self.error
        out = super().forward(x)
        if self.where == "backward":
            out.register_hook(self.stop)
        return out

    def stop(self, gradient):
        raise self.error


@pytest.mark.chapters
@pytest.mark.parametrize("error, where", [(torch.OutOfMemoryError, "forward"), (KeyboardInterrupt, "backward")])
def test_a_smaller_batch_after_an_error(engine, error, where):
    """After "out of memory" or Ctrl-C on all ranks, `zero_grad()`, and the same step with a smaller batch."""
    pair = Pair(engine, seeded(Stopped), data=leaves)
    for step in range(2):
        block = pair.model.blocks[1]
        block.where, block.error = where, error("stopped")
        with pytest.raises(error):
            pair.loss_of_engine(step).backward()
        block.where = ""
        pair.trained.zero_grad()
        pair.data = smaller
        pair.backward(step)
        pair.step()
        pair.evaluate()
    pair.check_weights()


def smaller(step, rank):
    x, targets = leaves(step, rank)
    return x[:2].detach(), targets[:2]
