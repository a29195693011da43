"""Dropped engines are freed, copies raise an error, and the caller's hooks find weights and gradients."""

import copy
import gc
import pickle
import time
import weakref
from functools import partial

import pytest
import torch
from helpers import MOMENTUM, Blocks, Recomputed, mse, mse_loss, own_batch, same, seeded
from torch import nn

from conformance.pair import Pair
from zerolab.engine import GradScaler

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
ours = pytest.mark.stages("zero1", "zero2", "zero3")


class KeepsLoss(Blocks):
    """An auxiliary loss is kept on a module."""

    def forward(self, tokens):
        out = super().forward(tokens)
        self.blocks[0].loss = out.square().mean()
        return out


@ours
@pytest.mark.parametrize("use", ["recomputed", "options", "between forward and backward", "after an error", "a scaler"])
def test_a_dropped_engine_is_freed(engine, use):
    """Neither hooks nor autograd keep the engine, its model, its optimizer or its shards alive."""
    options = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "find_unused": True}
    model = seeded(Recomputed if use == "recomputed" else KeepsLoss, dtype=torch.float32)
    trained = engine(model, ADAMW(model.parameters()), **(options if use == "options" else {}))
    data = own_batch(0, dtype=torch.float32)
    if use == "a scaler":
        scaler = GradScaler("cpu")
        scaler.scale(mse(trained, *data)).backward()
        scaler.step(trained)
    else:
        trained.training_step(*data, mse_loss)
    if use == "between forward and backward":
        mse(trained, *data)
    if use == "after an error":
        with pytest.raises((TypeError, AttributeError)):
            trained("no tokens")
    things = [trained, model, trained.optimizer, *model.parameters()]
    things += [each for bucket in trained.all_buckets for each in (bucket.shard, bucket.flat)]
    references = [weakref.ref(each) for each in things]
    del trained, model, things
    gc.collect()
    deadline = time.monotonic() + 20
    while any(each() is not None for each in references) and time.monotonic() < deadline:
        time.sleep(0.05)  # gloo's thread frees a collective's buffers a moment after `wait()`
        gc.collect()
    assert [type(each()).__name__ for each in references if each() is not None] == []


@pytest.mark.stages("zero3")
def test_a_weight_of_an_engine_that_is_gone_cannot_be_read(engine):
    """The error says where the values went. Printing the model, which debuggers do, works."""
    model = seeded(Blocks)
    trained = engine(model, ADAMW(model.parameters()))
    trained.training_step(*own_batch(0), mse_loss)
    del trained
    gc.collect()
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(3, 5\) has no values any more, because its engine"):
        model.head.weight.sum()
    assert "of an engine that is gone" in repr(model.head.weight)


@ours
@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickle.dumps])
def test_copying_an_engine_raises_an_error(engine, copy_of):
    """The error says how to copy weights and how to save. `torch.save` pickles."""
    model = seeded(Blocks)
    trained = engine(model, MOMENTUM(model.parameters()))
    with pytest.raises(TypeError, match="full_state_dict"):
        copy_of(trained)
    mse(trained, *own_batch(0)).backward()
    trained.step()


@ours
def test_train_and_eval_are_the_models(engine):
    """They return the engine, and reach every module."""
    model = seeded(Blocks)
    trained = engine(model, MOMENTUM(model.parameters()))
    assert trained.eval() is trained and not model.blocks[1].training
    assert trained.train() is trained and model.blocks[1].training


class Branching(nn.Module):
    """A branch that the loss does not use, with operations that save their own results for backward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.side, self.head = nn.Linear(5, 5), nn.Linear(5, 3)
        self.seen = []

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
            self.seen.append(weakref.ref(x))
        extra = torch.softmax(torch.tanh(self.side(x)), -1).exp()
        self.seen.append(weakref.ref(extra))
        return torch.sigmoid(self.head(x))


@pytest.mark.chapters
@pytest.mark.parametrize("way", ["forward only", "a branch that the loss leaves out"])
def test_what_autograd_has_saved_goes_with_the_graph(engine, way):
    """No result outlives its graph: an operation that saves its own result must not keep itself alive."""
    options = {} if engine.chapter or way == "forward only" else {"find_unused": True}
    model = seeded(Branching)
    trained = engine(model, MOMENTUM(model.parameters()), **options)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        out = trained(torch.randn(4, 5, generator=generator, dtype=torch.float64))
        if way != "forward only" and options:
            out.square().mean().backward()
            trained.step()
            trained.zero_grad()
        del out
        assert [reference() for reference in model.seen if reference() is not None] == []


@ours
@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_find_weights_and_gradients(engine, when):
    """Hooks around a unit's forward, registered before or after the build, find its weights.

    Hooks on parameters, registered before the build, find this rank's gradients.
    """
    model, plain, found = seeded(Blocks), seeded(Blocks), {}
    block = model.blocks[1]

    def register():
        block.register_forward_pre_hook(lambda *_: found.update(before=block.up.weight.detach().clone()))
        block.register_forward_hook(
            lambda *_: found.update(behind=block.up.weight.detach().clone()), prepend=when == "after"
        )

    if when == "before":
        register()
    block.up.weight.register_post_accumulate_grad_hook(lambda param: found.update(gradient=param.grad.clone()))
    trained = engine(model, MOMENTUM(model.parameters()))
    if when == "after":
        register()
    mse(plain, *own_batch(0)).backward()
    mse(trained, *own_batch(0)).backward()
    expected = plain.blocks[1].up.weight
    same(found["before"], expected.detach(), 0, "the weight before forward")
    same(found["behind"], expected.detach(), 0, "the weight behind forward")
    same(found["gradient"], expected.grad, 1e-12, "the gradient")


class Halved(Blocks):
    """A tensor hook scales a gradient."""

    def __init__(self):
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient * 0.5)


@ours
def test_hooks_that_change_gradients_count(engine):
    """A tensor hook that scales or masks a gradient, registered before or after the build."""
    model, mine = seeded(Halved), seeded(Halved)
    pair = Pair(engine, model, start=mine)
    for each in (model, mine):
        each.blocks[1].up.weight.register_hook(lambda gradient: gradient.clamp(min=0))
    pair.train()


@pytest.mark.ranks(2)
def test_steps_leave_no_hooks_behind(engine):
    """Steps of every kind leave as many hooks on modules as they found."""

    def hooks():
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        return sum(len(getattr(module, kind)) for module in pair.model.modules() for kind in kinds)

    pair = Pair(engine, seeded(Blocks))
    pair.train(1)
    before = hooks()
    for step in range(2):
        pair.backward(2 * step, quiet=True)
        pair.backward(2 * step + 1)
        pair.clip(1.0)
        pair.step()
        pair.evaluate()
    assert hooks() == before
