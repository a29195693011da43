"""Mistakes raise an error on every rank that says what happened and what to do. Then training continues."""

import copy
import io
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import MOMENTUM, Blocks, Recorder, Tied, mse, own_batch, seeded
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from conformance.pair import Pair

ours = pytest.mark.stages("zero1", "zero2", "zero3")
ADAMW = partial(torch.optim.AdamW, lr=1e-2)

# At the build.


def scripted(model):
    model.head = torch.jit.script(nn.Linear(5, 3).double())
    return MOMENTUM(model.parameters())


def max_norm(model):
    model.embedding.max_norm = 0.1
    return MOMENTUM(model.parameters())


def tied_by_data(model):
    model.blocks[1].scale.data = model.blocks[0].scale.data
    return MOMENTUM(model.parameters())


def aliased(model):
    model.register_buffer("alias", model.head.weight.data)
    return MOMENTUM(model.parameters())


def stepped(model):
    optimizer = ADAMW(model.parameters())
    mse(model, *own_batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def all_frozen(model):
    return MOMENTUM(model.requires_grad_(False).parameters())


def no_instance(model):
    return torch.optim.AdamW


def adafactor(model):
    return torch.optim.Adafactor(model.parameters())


def left_out(model):
    return MOMENTUM([*model.parameters()][:-1])


def foreign(model):
    return MOMENTUM([*model.parameters(), nn.Parameter(torch.ones(1))])


def as_usual(model):
    return MOMENTUM(model.parameters())


BUILDS = {  # (a function that changes the model and returns an optimizer, options, the error's text)
    "scripted": (scripted, {}, "scripted"),
    "max_norm": (max_norm, {}, "max_norm"),
    "tied by data": (tied_by_data, {}, "share memory"),
    "aliased by a buffer": (aliased, {}, "'alias' shares memory with 'head.weight'"),
    "stepped": (stepped, {}, "has made steps already"),
    "all frozen": (all_frozen, {}, "nothing to train"),
    "not an optimizer": (no_instance, {}, "expected an optimizer"),
    "Adafactor": (adafactor, {}, "looks at whole tensors"),
    "left out": (left_out, {}, "not in the optimizer: .*head.bias"),
    "foreign": (foreign, {}, "not the model's"),
    "param_dtype": (as_usual, {"param_dtype": torch.int8}, "param_dtype.*int8"),
    "reduce_dtype": (as_usual, {"reduce_dtype": torch.int8}, "reduce_dtype.*int8"),
    "no dtype": (as_usual, {"param_dtype": "bfloat16"}, "param_dtype.*'bfloat16'"),
    "no policy": (as_usual, {"offload_policy": True}, "offload_policy.*True"),
}


@ours
@pytest.mark.parametrize("case", BUILDS)
def test_builds_that_cannot_work(engine, case):
    """They raise an error on every rank. Then the model can be built correctly."""
    change, options, text = BUILDS[case]
    model = seeded(Blocks)
    optimizer = change(model)
    with pytest.raises((ValueError, TypeError), match=text):
        engine(model, optimizer, **options)
    Pair(engine, seeded(Blocks)).train(1)


@pytest.mark.stages("zero3")
@pytest.mark.parametrize("case", ["prefetch", "not a module", "of another model", "overlap", "twice"])
def test_units_that_cannot_work(engine, case):
    """Negative prefetch, units that are not modules of the model, and units that overlap."""
    model, other = seeded(Blocks), seeded(Blocks)
    block = model.blocks[0]
    options, text = {
        "prefetch": ({"prefetch": -1}, "prefetch.*-1"),
        "not a module": ({"units": ["blocks.0"]}, "not a module of the model"),
        "of another model": ({"units": [other.blocks[0]]}, "not a module of the model"),
        "overlap": ({"units": [block, block.up]}, "'blocks.0' and 'blocks.0.up' overlap"),
        "twice": ({"units": [block, block]}, "overlap"),
    }[case]
    with pytest.raises(ValueError, match=text):
        engine(model, MOMENTUM(model.parameters()), **options)


@ours
def test_a_model_has_one_engine(engine):
    """A second engine with the same model, or an engine with DDP's wrapper, raises an error."""
    model = seeded(Blocks)
    trained = engine(model, MOMENTUM(model.parameters()))
    if engine.like != "zero1":
        with pytest.raises(ValueError, match="another engine"):
            engine(model, MOMENTUM(model.parameters()))
    wrapped = nn.parallel.DistributedDataParallel(seeded(Blocks))
    with pytest.raises(ValueError, match=r"\.module"):
        engine(wrapped, MOMENTUM(wrapped.parameters()))
    mse(trained, *own_batch(0)).backward()
    trained.step()


def freeze_head(model):
    model.head.bias.requires_grad_(False)


def cast_head(model):
    model.head.float()


def add_block(model):
    model.blocks.append(seeded(Blocks).blocks[0])


def add_buffer(model):
    model.register_buffer("more", torch.zeros(2))


def change_nothing(model):
    pass


DIFFERENT = {
    "frozen": (freeze_head, {}),
    "a dtype": (cast_head, {}),
    "a block more": (add_block, {}),
    "a buffer more": (add_buffer, {}),
    "find_unused": (change_nothing, {"find_unused": True}),
    "param_dtype": (change_nothing, {"param_dtype": torch.bfloat16}),
    "reduce_dtype": (change_nothing, {"reduce_dtype": torch.float32}),
}


@pytest.mark.ranks(3)
@ours
@pytest.mark.parametrize("case", DIFFERENT)
def test_what_differs_on_one_rank_is_an_error_on_all(engine, case):
    """If a model or an option differs on the last rank, every rank raises an error with its number, and none waits."""
    change, options = DIFFERENT[case]
    model = seeded(Blocks)
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        change(model)
    else:
        options = {}
    with pytest.raises(ValueError, match=rf"rank\(s\) \[{last}\]"):
        engine(model, MOMENTUM(model.parameters()), **options)


@ours
def test_an_error_on_one_rank_is_raised_on_all(engine):
    """If a model is frozen on one rank, the other ranks raise the same error with this rank's number."""
    model = seeded(Blocks)
    if dist.get_rank() == 1:
        model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        engine(model, MOMENTUM(model.parameters()))
    Pair(engine, seeded(Blocks)).train(1)


# In the loop.


@ours
def test_torchs_optimizer_step_is_refused(engine):
    """Between backward and step gradients may not be reduced: the error names `engine.step()`."""
    pair = Pair(engine, seeded(Blocks))
    pair.backward(0)
    with pytest.raises(RuntimeError, match=r"engine\.step\(\)"):
        pair.trained.optimizer.step()
    pair.step()
    pair.train()


@pytest.mark.stages("zero2", "zero3")
@pytest.mark.parametrize("read", ["clip", "look", "clear", "set"])
def test_gradients_that_have_moved_are_not_silently_none(engine, read):
    """Reading or setting `param.grad` after backward is an error, because torch's clipping would see no gradient."""
    pair = Pair(engine, seeded(Blocks))
    pair.backward(0)
    model = pair.model
    with pytest.raises(RuntimeError, match="'embedding.weight'|'head.weight'"):
        if read == "clip":
            clip_grad_norm_(model.parameters(), 1.0)
        elif read == "look":
            model.head.weight.grad  # noqa: B018  reading raises the error
        elif read == "clear":
            model.zero_grad()
        else:
            model.head.weight.grad = None
    pair.step()
    pair.train()


@pytest.mark.stages("zero1")
@pytest.mark.parametrize("change", ["zero_grad", "none", "other"])
def test_gradients_that_left_zero1s_bucket_are_refused(engine, change):
    """They would not be sent. Changes in place are kept."""
    pair = Pair(engine, seeded(Blocks))
    pair.train(1)
    pair.loss_of_engine().backward()
    if change == "zero_grad":
        pair.model.zero_grad()
        pair.loss_of_engine().backward()
    elif change == "none":
        pair.model.head.weight.grad = None
    else:
        pair.model.head.weight.grad = torch.ones_like(pair.model.head.weight)
    with Recorder() as recorder, pytest.raises(RuntimeError, match="was replaced"):
        pair.trained.step()
    assert not recorder.collectives, "it sent something before it found out"
    pair.trained.zero_grad()
    pair.train()


@ours
@pytest.mark.parametrize("find_unused", [False, True])
def test_gradients_that_are_set_in_the_optimizer_too_early_are_refused(engine, find_unused):
    """Before `reduce_gradients()` they would be replaced by the reduced gradients."""
    pair = Pair(engine, seeded(Blocks), find_unused=find_unused)
    pair.loss_of_engine().backward()
    for piece in pair.trained.optimizer.param_groups[0]["params"]:
        piece.grad = torch.zeros_like(piece)
    with pytest.raises(RuntimeError, match=r"Call engine.reduce_gradients\(\)"):
        pair.trained.step()
    pair.trained.zero_grad()
    pair.train()


@pytest.mark.stages("zero2")
@pytest.mark.parametrize("find_unused", [False, True])
def test_gradients_without_a_backward_are_refused(engine, find_unused):
    """`torch.autograd.grad` and then `param.grad = ...`: nothing would be sent."""
    pair = Pair(engine, seeded(Blocks), find_unused=find_unused)
    params = list(pair.model.parameters())
    gradients = torch.autograd.grad(pair.loss_of_engine(), params)
    for param, gradient in zip(params, gradients):
        param.grad = gradient
    with pytest.raises(RuntimeError, match="was set by hand"):
        pair.trained.step()
    pair.trained.zero_grad()
    pair.train()


@ours
def test_the_optimizers_zero_grad_is_refused(engine):
    """It clears the pieces but not the engine's buffers, so the next step raises an error."""
    pair = Pair(engine, seeded(Blocks))
    pair.backward(0)
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.trained.step()
    pair.trained.optimizer.zero_grad()
    pair.loss_of_engine().backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
        pair.trained.step()
    pair.trained.zero_grad()
    pair.train()


def to_float(model):
    model.float()


def there_and_back(model):
    model.float().double()


def new_data(model):
    model.head.bias.data = torch.zeros(3, dtype=torch.float64)


MOVES = {move.__name__: move for move in (to_float, there_and_back, new_data)}


@pytest.mark.stages("zero1", "zero2")
@pytest.mark.parametrize("move", MOVES)
def test_a_model_that_moves_after_the_build_is_refused(engine, move):
    """The step raises an error, and the shards keep their values."""
    model = seeded(Blocks)
    trained = engine(model, MOMENTUM(model.parameters()), bucket_mb=0)
    before = trained.full_state_dict()
    MOVES[move](model)
    with pytest.raises(RuntimeError, match="left the engine's buffer|dtype"):
        mse(trained, *own_batch(0)).backward()
        trained.step()
    for name, value in trained.full_state_dict().items():
        assert torch.equal(value, before[name]), name


# ZeRO-3's freed weights.


def computes(model):
    return model.head.weight + 1


def item(model):
    return model.blocks[0].scale.item()


def data(model):
    return model.head.weight.data


def numpy(model):
    return model.head.weight.detach().numpy()


def write(model):
    model.head.weight.data.clamp_(-1, 1)


def initialize(model):
    nn.init.constant_(model.head.weight, 0.1)


def part_of_the_model(model):
    return model.head(torch.zeros(1, 5, dtype=torch.float64))


def deepcopy(model):
    return copy.deepcopy(model)


def save(model):
    torch.save(model.state_dict(), io.BytesIO())


def load(model):
    model.load_state_dict(seeded(Blocks).state_dict())


ALL = (computes, item, data, numpy, write, initialize, part_of_the_model, deepcopy, save, load)
READS = {read.__name__: read for read in ALL}


@pytest.mark.stages("zero3")
@pytest.mark.parametrize("read", READS)
def test_a_freed_weight_that_is_read_is_refused(engine, read):
    """The error has the weight's name and the correct way to read it, and training continues."""
    pair = Pair(engine, seeded(Blocks))
    pair.train(1)
    with pytest.raises(RuntimeError, match="is freed"):
        READS[read](pair.model)
    assert pair.model.head.weight.shape == (3, 5) and pair.model.head.weight.requires_grad
    pair.train()


class Reentrant(Blocks):
    def call(self, block, x):
        return checkpoint(block, x, use_reentrant=True)


@pytest.mark.stages("zero3")
def test_a_freed_weight_is_printed_by_its_name(engine):
    """In a debugger, or in the message of an error: its values are not here."""
    model = seeded(Blocks)
    trained = engine(model, MOMENTUM(model.parameters()))
    assert repr(trained.model.blocks[0].down) == "FreedParameter('blocks.0.down', shape=(5, 7))"


@pytest.mark.stages("zero1", "zero2")
def test_reentrant_checkpoints_train(engine):
    """In ZeRO-1 and -2. ZeRO-3 does not support them (docs/limits.md)."""
    Pair(engine, seeded(Reentrant)).train()


# After an error.


class Stumbles(Blocks):
    """A forward or a backward that fails in the middle."""

    stumble = None

    def call(self, block, x):
        if block is self.blocks[1] and self.stumble == "forward":
            raise ZeroDivisionError("stumbled")
        x = block(x)
        if block is self.blocks[1] and self.stumble == "backward":
            x.register_hook(stumble)
        return x


def stumble(gradient):
    raise ZeroDivisionError("stumbled")


@pytest.mark.parametrize("where", ["forward", "backward", "no_sync"])
def test_training_goes_on_after_an_exception(engine, where):
    """After an error in a forward or in the middle of a backward, `zero_grad()` restores the engine."""
    if not engine.ours:
        pytest.skip(f"{engine.name} documents nothing about errors in a step")
    pair = Pair(engine, seeded(Stumbles))
    pair.train(1)
    pair.model.stumble = "backward" if where == "no_sync" else where
    with pytest.raises(ZeroDivisionError):
        if where == "no_sync":
            with pair.trained.no_sync():
                pair.loss_of_engine().backward()
        else:
            pair.loss_of_engine().backward()
    pair.trained.zero_grad()
    pair.model.stumble = None
    pair.train()


@ours
def test_a_second_rank_of_tied_weights_counts_once(engine):
    """A tied weight is one parameter: it is updated once."""
    model = seeded(Tied)
    trained = engine(model, MOMENTUM(model.parameters()))
    assert trained.full_state_dict()["head.weight"].equal(trained.full_state_dict()["embedding.weight"])
