"""Models and losses whose backward reaches a unit's weights in unusual ways: correct, and units are freed."""

import contextlib
import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from helpers import Recorder, different_on_ranks, mse, seeded
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from conformance.pair import Pair
from zerolab.measure.held import storage_bytes


class Layers(nn.Module):
    """Three blocks and a head, which belongs to the root. `use(block, x)` calls a block, `run` is a block's forward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.make_block() for _ in range(3))
        self.head = nn.Linear(5, 3)

    def make_block(self):
        return Layer(self.run)

    @staticmethod
    def run(block, x):
        return torch.tanh(block.a(x))

    def use(self, block, x):
        return block(x)

    def forward(self, x):
        for block in self.blocks:
            x = self.use(block, x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x):
        out = self.run(self, x)
        unused = 0 * (self.b.weight.sum() + self.b.bias.sum())  # so that backward always reaches them
        return out + unused if out.requires_grad else out


def leaves(step, rank):
    """A leaf (4, 5) that requires a gradient and targets (4, 3), different in every step and on every rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), torch.randn(4, 3, generator=generator, dtype=torch.float64)


def model_of(model):
    """The model of an engine, or the model itself."""
    return getattr(model, "model", model)


# Losses that do not pass through a unit's output.


class Router(Layers):
    """The loss of a router is kept as an attribute, like in a mixture of experts."""

    @staticmethod
    def run(block, x):
        block.loss = torch.softmax(block.b(x), -1).square().sum()
        return x + torch.tanh(block.a(x.detach()))


class Apart(Layers):
    """A block's output requires no gradient. Only the loss that it keeps does."""

    @staticmethod
    def run(block, x):
        h = torch.tanh(block.a(x))
        block.loss = block.b(h).square().sum()
        return h.detach()


def with_kept_losses(model, x, targets):
    return mse(model, x, targets) + 0.1 * sum(block.loss for block in model_of(model).blocks)


def features_of_hooks(model, x, targets):
    """The loss includes values from hooks on units and on layers inside them."""
    seen = []
    with contextlib.ExitStack() as hooks:
        for module in (model_of(model).blocks[0], model_of(model).blocks[1].a):
            hooks.enter_context(module.register_forward_hook(lambda module, args, out: seen.append(out)))
        out = model(x)
    return F.mse_loss(out.detach() + out[:, :1], targets) + sum(each.pow(3).sum() for each in seen)


# Outputs that are changed in place or have unusual types.


class View(Layers):
    """The output is a view that is changed in place, which drops hooks on it."""

    @staticmethod
    def run(block, x):
        return torch.tanh(block.a(x[None]))[0]

    def use(self, block, x):
        return F.relu(block(x), inplace=True)


@dataclass
class Answer:
    hidden: torch.Tensor


class Output(dict):
    """An output like in libraries of language models."""


class InDataclass(Layers):
    """A block returns its output in a dataclass."""

    def make_block(self):
        return Wrapping(self.wrap)

    def use(self, block, x):
        return self.unwrap(block(x))

    @staticmethod
    def wrap(h):
        return Answer(h)

    @staticmethod
    def unwrap(out):
        return out.hidden


class Wrapping(Layer):
    def __init__(self, wrap):
        super().__init__(Layers.run)
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(super().forward(x))


class InDict(InDataclass):
    @staticmethod
    def wrap(h):
        return Output(hidden=h)

    @staticmethod
    def unwrap(out):
        return out["hidden"]


# Frozen weights, and parts without gradients.


class FrozenBlock(Layers):
    """A block in the middle is frozen, and runs without gradients."""

    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def use(self, block, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and block.a.weight.requires_grad):
            y = block(x)
        return x + y


# Recomputation, saved tensors, custom functions.


class RecomputedPart(Layers):
    """A part of a block runs again in backward."""

    @staticmethod
    def run(block, x):
        x = torch.tanh(block.a(x))
        return x + checkpoint(lambda x: torch.tanh(block.b(x)), x, use_reentrant=False)


class RecomputedPairs(Layers):
    """Two blocks run again together."""

    def forward(self, x):
        first, second, third = self.blocks
        x = checkpoint(lambda x: second(first(x)), x, use_reentrant=False)
        return self.head(third(x))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class OwnFunction(Layers):
    """An autograd function that saves the weight."""

    @staticmethod
    def run(block, x):
        return torch.tanh(Product.apply(x, block.a.weight) + block.a.bias)


class ComputedWeights(Layers):
    """Weights that forward computes from other weights: a product of two, and a part of one."""

    @staticmethod
    def run(block, x):
        x = torch.tanh(F.linear(x, block.a.weight * block.b.weight, block.a.bias))
        part = block.b.weight[1:]
        return torch.tanh(F.linear(F.linear(x, part), part.T, block.b.bias))


class SavedInside(Layers):
    """The activations of a part of each block are saved on the CPU."""

    @staticmethod
    def run(block, x):
        with save_on_cpu():
            h = torch.tanh(block.a(x))
        return x + torch.tanh(block.b(h))


def saved_on_cpu(model, x, targets):
    with save_on_cpu():
        return mse(model, x, targets)


def two_forwards(model, x, targets):
    """One backward through both graphs."""
    return mse(model, x, targets) + mse(model, x.detach() + 1, targets)


class ByKeyword(Layers):
    def use(self, block, x):
        return block(x=x)


class Buffers(Layers):
    """A BatchNorm of the inputs, so that its running statistics depend on the batches and on no weight."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5, affine=False)

    def forward(self, x):
        return super().forward(self.norm(x))


CASES = {
    "plain": (Layers, mse),
    "losses kept beside outputs": (Router, with_kept_losses),
    "losses kept, outputs without gradient": (Apart, with_kept_losses),
    "features of hooks": (Layers, features_of_hooks),
    "a view that is changed in place": (View, mse),
    "in a dataclass": (InDataclass, mse),
    "in a subclass of dict": (InDict, mse),
    "a frozen block without gradients": (FrozenBlock, mse),
    "a part of a block runs again": (RecomputedPart, mse),
    "two blocks run again together": (RecomputedPairs, mse),
    "a function of one's own": (OwnFunction, mse),
    "computed weights": (ComputedWeights, mse),
    "saved on the CPU": (Layers, saved_on_cpu),
    "saved on the CPU inside blocks": (SavedInside, mse),
    "two forwards": (Layers, two_forwards),
    "keyword arguments": (ByKeyword, mse),
}


@pytest.mark.parametrize("case", CASES)
def test_unusual_graphs(engine, case):
    """Three steps, with evaluations in between, match plain torch, and ZeRO-3 has freed everything after each step."""
    make, loss = CASES[case]
    pair = Pair(engine, seeded(make), data=leaves, loss=loss)
    for step in range(3):
        pair.backward(step)
        check_freed(engine, pair)
        pair.step()
        with torch.no_grad():
            pair.trained(pair.batch(9)[0])
        check_freed(engine, pair)
    pair.check_weights()


def check_freed(engine, pair):
    if engine.like == "zero3":
        assert storage_bytes(pair.model.parameters()) == 0, "gathered, and not freed"


# The models in which backward asks for weights by another way than the gradient of a unit's output.
OTHER_WAYS = [
    "losses kept beside outputs",
    "features of hooks",
    "a frozen block without gradients",
    "a part of a block runs again",
    "two blocks run again together",
    "saved on the CPU",
    "two forwards",
]


LIVES = {"kept": {"reshard_after_forward": False}, "kept until step": {"reshard_after_backward": False}}


@pytest.mark.stages("zero3")
@pytest.mark.parametrize("case", OTHER_WAYS)
@pytest.mark.parametrize("life", LIVES)
def test_unusual_graphs_with_other_lives_of_units(engine, case, life):
    """The same if a unit is kept from forward to backward, or until `step()`."""
    make, loss = CASES[case]
    pair = Pair(engine, seeded(make), data=leaves, loss=loss, **LIVES[life])
    for step in range(2):
        pair.backward(step)
        if life == "kept":
            check_freed(engine, pair)
        pair.step()
        check_freed(engine, pair)
    pair.check_weights()


# Units that backward visits twice, and units that are read again after they were freed.


class LoRA(Layers):
    """A frozen weight and a small trained one in each block. A part of it may be unused."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.a.requires_grad_(False)

    @staticmethod
    def run(block, x):
        return x + torch.tanh(block.a(x) + block.b(x))


class Chain(Layers):
    """Blocks of plain layers. The first one's inputs need no gradient, so backward ends in it."""

    def make_block(self):
        return nn.Linear(5, 5)

    def forward(self, x):
        return super().forward(x.detach())


class Looped(LoRA):
    """The blocks run twice, one after the other."""

    def forward(self, x):
        for block in (*self.blocks, *self.blocks):
            x = self.use(block, x)
        return self.head(x)


class InARow(LoRA):
    """Each block runs twice in a row."""

    def use(self, block, x):
        return block(block(x))


class Recomputes(LoRA):
    def use(self, block, x):
        return checkpoint(block, x, use_reentrant=False)


class RecomputesAll(LoRA):
    """One checkpoint around all blocks."""

    def forward(self, x):
        return self.head(checkpoint(self.all_blocks, x, use_reentrant=False))

    def all_blocks(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class PassesOn(Layers):
    """Each block also returns a tensor that it was given, as the position bias of T5."""

    def make_block(self):
        return Passing()

    def forward(self, x):
        bias = torch.ones(5, dtype=x.dtype, requires_grad=True) * x
        for block in self.blocks:
            x, bias = block(x, bias)
        return self.head(x)


class Passing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x, bias):
        return torch.tanh(self.a(x) + self.b(x)) + bias, bias


class LateLoss(Layers):
    """An auxiliary loss that a checkpoint computes from the block's output, and keeps."""

    @staticmethod
    def run(block, x):
        out = torch.tanh(block.a(x))
        block.loss = checkpoint(lambda out: block.b(out).square().sum(), out, use_reentrant=False)
        return out


class RecomputedAnswer(InDataclass):
    """The tensor in the dataclass is recomputed."""

    def make_block(self):
        return RecomputedWrapping(self.wrap)


class RecomputedWrapping(Wrapping):
    def forward(self, x):
        return self.wrap(checkpoint(super().forward, x, use_reentrant=False).hidden)


class RecomputedHead(Layers):
    """A part of the root runs again in backward."""

    def forward(self, x):
        for block in self.blocks:
            x = self.use(block, x)
        return checkpoint(self.head, x, use_reentrant=False)


def chosen_over_rejected(model, x, targets):
    """As in DPO: the model on two inputs, and one loss."""
    return F.softplus(mse(model, x, targets) - mse(model, x.detach() - 1, targets))


def with_kept_losses_of_two_forwards(model, x, targets):
    return with_kept_losses(model, x, targets) + with_kept_losses(model, x.detach() + 1, targets)


def with_an_evaluation(model, x, targets):
    """A forward without gradients between a forward and its backward frees the units, and the root."""
    loss = mse(model, x, targets)
    with torch.no_grad():
        model(x + 1)
    return loss


VISITED = {
    "a chain": (Chain, mse),
    "low rank, chosen over rejected": (LoRA, chosen_over_rejected),
    "looped, chosen over rejected": (Looped, chosen_over_rejected),
    "in a row": (InARow, mse),
    "recomputed, chosen over rejected": (Recomputes, chosen_over_rejected),
    "recomputed together, chosen over rejected": (RecomputesAll, chosen_over_rejected),
    "passed on, two forwards": (PassesOn, two_forwards),
    "losses that a checkpoint keeps, two forwards": (LateLoss, with_kept_losses_of_two_forwards),
    "a dataclass that is recomputed": (RecomputedAnswer, mse),
    "a recomputed head": (RecomputedHead, with_an_evaluation),
}


@pytest.mark.stages("zero3")  # the others have no units
@pytest.mark.parametrize("case", VISITED)
@pytest.mark.parametrize("find_unused", [False, True])
def test_units_that_backward_visits_twice(engine, case, find_unused):
    """Two steps of two backwards match plain torch, and free all units. In step 2 the first is under `no_sync`."""
    make, loss = VISITED[case]
    pair = Pair(engine, seeded(make), data=leaves, loss=loss, find_unused=find_unused)
    for step in range(2):
        pair.backward(2 * step, quiet=step > 0)
        pair.backward(2 * step + 1)
        check_freed(engine, pair)
        pair.step()
    pair.check_weights()


@pytest.mark.stages("zero3")
@pytest.mark.chapters
@pytest.mark.parametrize("options", [{}, {"find_unused": True}], ids=str)
def test_a_tensor_that_is_passed_on_brings_nothing_back(engine, options):
    """Each unit is gathered twice and reduced once, also if it returns one of its inputs."""
    pair = Pair(engine, seeded(PassesOn), data=leaves, **options)
    pair.train(1)
    with Recorder() as recorder:
        pair.loss_of_engine().backward()
    sent = [name for name, _ in recorder.collectives]
    units = len(pair.trained.units)
    assert sent.count("reduce-scatter") == units
    assert sent.count("all-gather") == 2 * (units - 1) + 1, "the root is gathered once"


class WrittenOver(Layers):
    """A sigmoid keeps its result for backward, and somebody writes into it."""

    @staticmethod
    def run(block, x):
        return torch.sigmoid(block.a(x)).add_(1)


@pytest.mark.chapters
def test_what_autograd_has_saved_must_stay_as_it_was(engine):
    """A saved tensor that is changed in place is an error in backward, as in torch."""
    model = seeded(WrittenOver)
    trained = engine(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="in place|inplace"):
        mse(trained, *leaves(0, 0)).backward()


def statistics(norm):
    """All buffers of a BatchNorm, in one tensor."""
    return torch.cat([norm.running_mean, norm.running_var, norm.num_batches_tracked[None]])


def test_buffers_are_each_ranks_own(engine):
    """Running statistics start as rank 0's, and then follow only this rank's batches."""
    model = seeded(Buffers)
    start = copy.deepcopy(model.norm)
    pair = Pair(engine, model, data=leaves)  # where an engine broadcasts, the other ranks start with other statistics
    pair.train(3)

    def follow(*ranks):
        """What a plain BatchNorm has after the batches of these ranks, one rank in each step."""
        norm = copy.deepcopy(start).to(pair.model.norm.running_mean.dtype)
        for step, rank in enumerate(ranks):
            norm(pair.batch(step, rank)[0])
        return statistics(norm)

    me = pair.rank
    correct = [follow(me, me, me)]
    if not engine.ours:
        correct.append(follow(0, 0, me))  # DDP documents that it sends rank 0's buffers before each forward
    assert (follow(0, 0, 0) - follow(1, 1, 1)).abs().max() > 0.01, "the batches of the ranks are too much alike"
    found = statistics(pair.model.norm)
    assert any(torch.allclose(found, each, rtol=0, atol=pair.tolerance) for each in correct), (found, correct)


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_blocks_train(engine, when):
    """Blocks that are compiled in place before the build, or `block.forward` after it."""
    torch.compiler.reset()
    model = seeded(Layers)
    if when == "before":
        start = different_on_ranks(model) if engine.broadcasts and dist.get_rank() else copy.deepcopy(model)
        for block in start.blocks:
            block.compile(backend="eager")
        pair = Pair(engine, model, start=start, data=leaves)
    else:
        pair = Pair(engine, model, data=leaves)
        for block in pair.model.blocks:
            block.forward = torch.compile(block.forward, backend="eager")
    pair.train(2)


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_a_compiled_step_trains(engine):
    """`torch.compile` around a whole training step. The engine's own methods stay outside of the compiler."""
    torch.compiler.reset()
    pair = Pair(engine, seeded(Layers), data=leaves)
    pair.trained.step = torch.compile(pair.trained.step, backend="eager")

    def train(x, targets):
        mse(pair.trained, x, targets).backward()
        pair.trained.clip_grad_norm_(0.1)
        pair.trained.step()
        pair.trained.zero_grad()

    if engine.like != "zero3":  # hooks on freed weights cannot be compiled (docs/limits.md)
        train = torch.compile(train, backend="eager")
    for step in range(3):
        pair.backward_of_plain(step)
        nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        train(*pair.batch(step))
    pair.check_weights()
