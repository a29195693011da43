"""Mistakes raise an error on every rank that says what happened and what to do. Then training continues."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import MOMENTUM, Block, Blocks, Recorder, batch, mse, own_batch, seeded
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import zerolab.engine
from conformance.pair import Pair
from zerolab.engine import checkpoint as checkpoints

ours = pytest.mark.stages("zero1", "zero2", "zero3")
ADAMW = partial(torch.optim.AdamW, lr=1e-2)

# At the build.


def max_norm(model):
    model[0].max_norm = 0.1
    return model


def tied_by_data(model):
    model[2].bias.data = model[1].bias.data
    return model


def aliased(model):
    model.register_buffer("alias", model[1].weight.data)
    return model


def fsdp1_of_a_part(model):
    model[2] = FullyShardedDataParallel(model[2], device_id=torch.device("cpu"))
    return model


def other_engine(model):
    model.engine = zerolab.engine.ZeRO3Engine(model, MOMENTUM(model.parameters()))
    return model


MODELS = {  # (a function that returns the changed model, the error's text)
    "max_norm": (max_norm, "max_norm"),
    "tied by data": (tied_by_data, "share memory"),
    "aliased by a buffer": (aliased, "'alias' shares memory with '1.weight'"),
    "DDP": (nn.parallel.DistributedDataParallel, r"\.module"),
    "FSDP1": (fsdp1_of_a_part, "FullyShardedDataParallel"),
    "FSDP2": (fully_shard, "fully_shard"),
    "another engine": (other_engine, "another engine"),
}


@pytest.mark.stages("zero1", "zero3")  # zero2 is built as zero1 is
@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_trained(engine, case):
    """They raise an error on every rank. Then a correct model can be built."""
    change, text = MODELS[case]
    model = change(nn.Sequential(nn.Embedding(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)))
    with pytest.raises(ValueError, match=text):
        engine(model, MOMENTUM(model.parameters()))
    Pair(engine, seeded(Blocks)).train(1)


OPTIONS = {"param_dtype": torch.int8, "reduce_dtype": "bfloat16", "offload_policy": True}


@pytest.mark.stages("zero1", "zero3")
@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cannot_work(engine, name):
    """The error has the name of the option and its value."""
    model = seeded(Blocks)
    with pytest.raises(ValueError, match=f"{name}.*{OPTIONS[name]}"):
        engine(model, MOMENTUM(model.parameters()), **{name: OPTIONS[name]})


@pytest.mark.stages("zero1", "zero3")
def test_an_optimizer_that_has_made_steps_is_refused(engine):
    """Its state is for whole parameters. test_chapters.py has the other optimizers that cannot work."""
    model = seeded(Blocks)
    optimizer = ADAMW(model.parameters())
    mse(model, *batch(0, 0)).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has made steps already"):
        engine(model, optimizer)


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


def freeze_head(model):
    model.head.bias.requires_grad_(False)


def add_block(model):
    model.blocks.append(seeded(Blocks).blocks[0])


def reorder(model):
    model.blocks = model._modules.pop("blocks")


def other_optimizer(model):
    return torch.optim.RMSprop(model.parameters())


def two_groups(model):
    *rest, last = model.parameters()
    return MOMENTUM([{"params": rest}, {"params": [last]}])


def change_nothing(model):
    pass


DIFFERENT = {
    "frozen": (freeze_head, {}, r"parameter 'head\.bias' is .*frozen there and .*trained in group 0 on rank 0"),
    "a block more": (add_block, {}, r"parameter 'blocks\.3\.down' is .* there and absent on rank 0.* more differences"),
    "the order": (reorder, {}, r"the position of 'head\.weight' is 1 there and 13 on rank 0"),
    "the optimizer": (other_optimizer, {}, r"optimizer is RMSprop there and SGD on rank 0"),
    "the groups": (two_groups, {}, r"'head\.bias' is .*trained in group 1 there and .*group 0"),
    "find_unused": (change_nothing, {"find_unused": True}, "find_unused is True there and False on rank 0"),
}


@pytest.mark.ranks(3)
@pytest.mark.stages("zero3")  # all stages gather errors in the same way: the next test
@pytest.mark.parametrize("case", DIFFERENT)
def test_what_differs_on_one_rank_is_an_error_on_all(engine, case):
    """If a model or an option differs on the last rank, every rank raises an error with its number, and none waits.

    The error names what differs, with both values.
    """
    change, options, text = DIFFERENT[case]
    model = seeded(Blocks)
    last = dist.get_world_size() - 1
    optimizer = None
    if dist.get_rank() == last:
        optimizer = change(model)
    else:
        options = {}
    with pytest.raises(ValueError, match=rf"rank\(s\) \[{last}\].*{text}"):
        engine(model, optimizer or MOMENTUM(model.parameters()), **options)


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
@pytest.mark.parametrize("use", ["clip", "clear"])
def test_gradients_that_have_moved_are_not_silently_none(engine, use):
    """Reading or setting `param.grad` after backward is an error, because torch's clipping would see no gradient."""
    pair = Pair(engine, seeded(Blocks))
    pair.backward(0)
    with pytest.raises(RuntimeError, match="'embedding.weight'"):
        if use == "clip":
            clip_grad_norm_(pair.model.parameters(), 1.0)
        else:
            pair.model.zero_grad()
    pair.step()
    pair.train()


@pytest.mark.stages("zero2", "zero3")
def test_hooks_and_optimizers_that_come_too_late_are_named(engine):
    """A hook registered after the build, and a second optimizer, find no gradient: the error names these causes."""
    pair = Pair(engine, seeded(Blocks))
    second = MOMENTUM(pair.model.parameters())
    handle = pair.model.embedding.weight.register_post_accumulate_grad_hook(read_gradient)
    with pytest.raises(RuntimeError, match=r"hook.*before the engine is built"):
        pair.loss_of_engine().backward()
    handle.remove()
    pair.trained.zero_grad()
    pair.loss_of_engine().backward()
    for method in (second.step, second.zero_grad):
        with pytest.raises(RuntimeError, match=r"another optimizer over the model's parameters"):
            method()
    pair.trained.zero_grad()
    pair.train()


def read_gradient(param):
    param.grad.norm()


@pytest.mark.stages("zero1")
@pytest.mark.parametrize("change", ["zero_grad", "another optimizer", "assigned"])
def test_replacing_gradients_of_zero1_is_refused(engine, change):
    """They would not be sent. The error comes at once, and names the engine's method. Changes in place are kept."""
    pair = Pair(engine, seeded(Blocks))
    second = MOMENTUM(pair.model.parameters())
    pair.train(1)
    pair.backward(0)
    with pytest.raises(RuntimeError, match=r"must not be replaced.*engine\.zero_grad\(\)"):
        if change == "zero_grad":
            pair.model.zero_grad()
        elif change == "another optimizer":
            second.zero_grad()
        else:
            pair.model.head.weight.grad = torch.ones_like(pair.model.head.weight)
    pair.step()
    pair.train()


@pytest.mark.stages("zero1")
@pytest.mark.chapters
def test_gradients_that_left_zero1s_bucket_are_refused(engine):
    """`create_graph=True` makes new gradients, which would not be sent."""
    pair = Pair(engine, seeded(Blocks))
    pair.train(1)
    pair.loss_of_engine().backward(create_graph=True)
    with Recorder() as recorder, pytest.raises(RuntimeError, match="was replaced"):
        pair.trained.step()
    assert not recorder.collectives, "it sent something before it found out"
    pair.trained.zero_grad()
    pair.train()


@ours
def test_a_step_that_threw_away_its_gradients_in_place(engine):
    """`optimizer.zero_grad(set_to_none=False)` after the step clears what a further backward would add to."""
    pair = Pair(engine, seeded(Blocks))
    for step in range(3):
        pair.backward(step)
        for optimizer, stepped in zip(pair.optimizers, (pair.optimizer, pair.trained)):
            stepped.step()
            optimizer.zero_grad(set_to_none=False)
    pair.check_weights()


@ours
def test_gradients_that_are_set_in_the_optimizer_too_early_are_refused(engine):
    """Before `reduce_gradients()` they would be replaced by the reduced gradients."""
    pair = Pair(engine, seeded(Blocks), find_unused=True)
    pair.loss_of_engine().backward()
    for piece in pair.trained.optimizer.param_groups[0]["params"]:
        piece.grad = torch.zeros_like(piece)
    with pytest.raises(RuntimeError, match=r"Call engine.reduce_gradients\(\)"):
        pair.trained.step()
    pair.trained.zero_grad()
    pair.train()


@pytest.mark.stages("zero2")
def test_gradients_without_a_backward_are_refused(engine):
    """`torch.autograd.grad` and then `param.grad = ...`: nothing would be sent."""
    pair = Pair(engine, seeded(Blocks), find_unused=True)
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
    with pytest.raises(RuntimeError, match=r"engine\.zero_grad\(\)"):
        pair.loss_of_engine().backward()
    pair.trained.zero_grad()
    pair.train()


@pytest.mark.stages("zero1", "zero2")
@pytest.mark.parametrize("move", ["another dtype", "there and back", "new data"])
def test_a_model_that_moves_after_the_build_is_refused(engine, move):
    """The step raises an error, and the shards keep their values."""
    model = seeded(Blocks)
    trained = engine(model, MOMENTUM(model.parameters()), bucket_mb=0)
    before = trained.full_state_dict()
    if move == "new data":
        model.head.bias.data = torch.zeros(3, dtype=torch.float64)
    else:
        model.float()
    if move == "there and back":
        model.double()
    with pytest.raises(RuntimeError, match="left the engine's buffer|dtype"):
        mse(trained, *own_batch(0)).backward()
        trained.step()
    for name, value in trained.full_state_dict().items():
        assert torch.equal(value, before[name]), name


# Weights that change at the wrong moment.


@ours
@pytest.mark.parametrize("source", ["state", "checkpoint"])
@pytest.mark.parametrize("options", [{}, {"param_dtype": torch.float64}, {"reshard_after_forward": False}], ids=str)
def test_weights_loaded_between_forward_and_backward_are_refused(engine, source, options, tmp_path):
    """Backward would use activations of the old weights and values of the new ones. Plain torch raises an error too."""
    if "reshard_after_forward" in options and engine.like != "zero3":
        pytest.skip("only ZeRO-3 has the option")
    pair = Pair(engine, seeded(Blocks), **options)
    state = pair.trained.full_state_dict()
    checkpoints.save(pair.trained, tmp_path)
    loss = pair.loss_of_engine()
    if source == "state":
        pair.trained.load_full_state_dict(state)
    else:
        checkpoints.load(pair.trained, tmp_path)
    with pytest.raises(RuntimeError, match="in place|inplace"):
        loss.backward()
    pair.trained.zero_grad()
    pair.train()


class Writes(Blocks):
    """A forward that writes to its own weights, in a unit or at the root."""

    written = None

    def __init__(self):
        super().__init__()
        self.blocks[1] = Clamped()

    def forward(self, tokens):
        self.blocks[1].written = self.written == "unit"
        if self.written == "root":
            with torch.no_grad():
                self.head.bias.clamp_(-0.01, 0.01)
        return super().forward(tokens)


class Clamped(Block):
    def forward(self, x):
        if self.written:
            with torch.no_grad():
                self.up.bias.clamp_(-0.01, 0.01)
        return super().forward(x)


@pytest.mark.stages("zero3")
@pytest.mark.chapters
@pytest.mark.parametrize("where, name", [("unit", "blocks.1"), ("root", "root")])
@pytest.mark.parametrize("when", ["training", "evaluation"])
def test_a_forward_that_writes_to_its_weights_is_refused(engine, where, name, when):
    """The gathered weights are freed after forward, so the change would be lost. The error names the unit."""
    pair = Pair(engine, seeded(Writes))
    pair.train(1)
    pair.model.written = where
    with torch.set_grad_enabled(when == "training"), pytest.raises(RuntimeError, match=f"'{name}'.*in place"):
        loss = pair.loss_of_engine()
        loss.backward()  # the root is freed only now
    pair.trained.zero_grad()
    pair.model.written = None
    pair.train()


@pytest.mark.stages("zero1", "zero2")
@pytest.mark.parametrize("where", ["unit", "root"])
def test_a_forward_may_write_to_its_weights(engine, where):
    """In ZeRO-1 and -2, if it writes the same on all ranks."""
    model, start = seeded(Writes), seeded(Writes)
    model.written = start.written = where
    Pair(engine, model, start=start).train()


# ZeRO-3's freed weights.


def item(model):
    return model.blocks[0].scale.item()


def data(model):
    return model.head.weight.data


def part_of_the_model(model):
    return model.head(torch.zeros(1, 5, dtype=torch.float64))


def load(model):
    model.load_state_dict(seeded(Blocks).state_dict())


READS = {read.__name__: read for read in (item, data, part_of_the_model, copy.deepcopy, load)}


@pytest.mark.stages("zero3")
@pytest.mark.parametrize("read", READS)
def test_a_freed_weight_that_is_read_is_refused(engine, read):
    """The error has the weight's name and the correct way to read it. Its shape can be read, and it can be printed."""
    pair = Pair(engine, seeded(Blocks))
    pair.train(1)
    with pytest.raises(RuntimeError, match="is freed"):
        READS[read](pair.model)
    weight = pair.model.head.weight
    assert weight.shape == (3, 5) and weight.requires_grad and "head.weight" in repr(weight)
    pair.train()


class Reentrant(Blocks):
    def call(self, block, x):
        return checkpoint(block, x, use_reentrant=True)


@pytest.mark.stages("zero1", "zero2")
def test_reentrant_checkpoints_train(engine):
    """In ZeRO-1 and -2. ZeRO-3 does not support them (docs/limits.md)."""
    Pair(engine, seeded(Reentrant)).train()


@pytest.mark.stages("zero3")
@pytest.mark.chapters
def test_saved_weights_outside_of_a_backward(engine):
    """torchviz and debuggers read what autograd has saved. A gathered weight is returned, a freed one is named."""
    pair = Pair(engine, seeded(Blocks))
    pair.train(1)
    loss = pair.loss_of_engine()
    node = loss.grad_fn.next_functions[0][0]  # the head's product, whose weight is the root's, and gathered
    assert node.name() == "AddmmBackward0"
    assert node._saved_mat2.shape == (5, 3) and node._saved_mat1.shape == (4, 5)
    nodes = [node]
    found = []
    while nodes:
        node = nodes.pop()
        if node.name() == "MmBackward0":
            found.append(node)
        nodes += [each for each, _ in node.next_functions if each is not None]
    with pytest.raises(RuntimeError, match="'blocks.2'.*outside of backward.*freed"):
        found[0]._saved_mat2  # noqa: B018  reading raises the error
    loss.backward()
    pair.trained.zero_grad()
    pair.train()


# After an error.


class Stumbles(Blocks):
    """A forward or a backward that fails in the middle."""

    stumble = None

    def call(self, block, x):
        if block is self.blocks[1] and self.stumble == "forward":
            raise torch.OutOfMemoryError
        x = block(x)
        if block is self.blocks[1] and self.stumble == "backward":
            x.register_hook(interrupt)
        return x


def interrupt(gradient):
    raise KeyboardInterrupt


@ours
@pytest.mark.chapters
@pytest.mark.parametrize("where", ["forward", "backward", "no_sync"])
def test_training_continues_after_an_error(engine, where):
    """After "out of memory" in a forward, or Ctrl-C in the middle of a backward, `zero_grad()` restores the engine."""
    if engine.chapter and where == "no_sync":
        pytest.skip("the chapter has no `no_sync`")
    pair = Pair(engine, seeded(Stumbles))
    pair.train(1)
    pair.model.stumble = "forward" if where == "forward" else "backward"
    quiet = pair.trained.no_sync() if where == "no_sync" else contextlib.nullcontext()
    with pytest.raises((torch.OutOfMemoryError, KeyboardInterrupt)), quiet:
        pair.loss_of_engine().backward()
    pair.trained.zero_grad()
    pair.model.stumble = None
    pair.train()
