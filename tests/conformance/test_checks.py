"""Mistakes raise an error on every rank that says what happened and what to do. Then training continues."""

import copy
import io
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import MOMENTUM, Block, Blocks, Recorder, Tied, batch, mse, own_batch, seeded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from conformance.pair import Pair
from zerolab.engine import checkpoint as checkpoints

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
    mse(model, *batch(0, 0)).backward()
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


@pytest.mark.stages("zero1", "zero3")  # zero2 is built as zero1 is
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
    with pytest.raises(ValueError, match="another engine"):
        engine(model, MOMENTUM(model.parameters()))
    wrapped = nn.parallel.DistributedDataParallel(seeded(Blocks))
    with pytest.raises(ValueError, match=r"\.module"):
        engine(wrapped, MOMENTUM(wrapped.parameters()))
    mse(trained, *own_batch(0)).backward()
    trained.step()


def without_scalars(model):
    """FSDP supports no scalars, and FSDP2 only contiguous parameters."""
    for param in model.parameters():
        param.data = (param.data.reshape(1) if param.ndim == 0 else param.data).contiguous()
    return model


def fsdp1(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp1_of_a_part(model):
    model.blocks[1] = FullyShardedDataParallel(model.blocks[1], device_id=torch.device("cpu"), use_orig_params=True)
    return model


def fsdp2(model):
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return model


SHARDED = {shard.__name__: shard for shard in (fsdp1, fsdp1_of_a_part, fsdp2)}


@ours
@pytest.mark.parametrize("shard", SHARDED)
def test_a_model_that_is_sharded_already_is_refused(engine, shard):
    """By FSDP1 or `fully_shard`, whole or in part: the error names it."""
    model = SHARDED[shard](without_scalars(seeded(Blocks)))
    with pytest.raises(ValueError, match="FullyShardedDataParallel|fully_shard"):
        engine(model, MOMENTUM(model.parameters()))
    Pair(engine, seeded(Blocks)).train(1)


def freeze_head(model):
    model.head.bias.requires_grad_(False)


def cast_head(model):
    model.head.float()


def add_block(model):
    model.blocks.append(seeded(Blocks).blocks[0])


def add_buffer(model):
    model.register_buffer("more", torch.zeros(2))


def reorder(model):
    model.head.weight, model.head.bias = None, None
    other = seeded(nn.Linear, 5, 3)
    model.head.bias, model.head.weight = other.bias, other.weight
    del model.head._parameters["weight"], model.head._parameters["bias"]
    model.head.bias, model.head.weight = other.bias, other.weight


def other_optimizer(model):
    return torch.optim.RMSprop(model.parameters())


def two_groups(model):
    *rest, last = model.parameters()
    return MOMENTUM([{"params": rest}, {"params": [last]}])


def change_nothing(model):
    pass


DIFFERENT = {
    "frozen": (freeze_head, {}, r"parameter 'head\.bias' is .*frozen there and .*trained in group 0 on rank 0"),
    "a dtype": (cast_head, {}, r"parameter 'head\.weight' is torch\.float32.*torch\.float64"),
    "a block more": (add_block, {}, r"parameter 'blocks\.3\.down' is .* there and absent on rank 0.* more differences"),
    "a buffer more": (add_buffer, {}, r"buffer 'more' is torch\.float32.* and absent on rank 0"),
    "the order": (reorder, {}, r"the position of 'head\.bias' is 13 there and 14 on rank 0"),
    "the optimizer": (other_optimizer, {}, r"optimizer is RMSprop there and SGD on rank 0"),
    "the groups": (two_groups, {}, r"'head\.bias' is .*trained in group 1 there and .*group 0"),
    "find_unused": (change_nothing, {"find_unused": True}, "find_unused is True there and False on rank 0"),
    "param_dtype": (change_nothing, {"param_dtype": torch.bfloat16}, r"param_dtype is torch\.bfloat16 there and None"),
    "reduce_dtype": (change_nothing, {"reduce_dtype": torch.float32}, r"reduce_dtype is torch\.float32 there and None"),
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
@pytest.mark.parametrize("change", ["zero_grad", "none", "other", "another optimizer"])
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
        elif change == "none":
            pair.model.head.weight.grad = None
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
    with pytest.raises(RuntimeError, match=r"engine\.zero_grad\(\)"):
        pair.loss_of_engine().backward()
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


# Weights that change at the wrong moment.


def load_a_state(trained, state, folder):
    trained.load_full_state_dict(state)


def load_a_checkpoint(trained, state, folder):
    checkpoints.load(trained, folder)


LOADS = {load.__name__: load for load in (load_a_state, load_a_checkpoint)}


@ours
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("options", [{}, {"param_dtype": torch.float64}, {"reshard": False}], ids=str)
def test_weights_loaded_between_forward_and_backward_are_refused(engine, load, options, tmp_path):
    """Backward would use activations of the old weights and values of the new ones. Plain torch raises an error too."""
    if options == {"reshard": False}:
        if engine.like != "zero3":
            pytest.skip("only ZeRO-3 has the option")
        options = {"reshard_after_forward": False}
    pair = Pair(engine, seeded(Blocks), **options)
    state = pair.trained.full_state_dict()
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    checkpoints.save(pair.trained, folder[0])
    loss = pair.loss_of_engine()
    LOADS[load](pair.trained, state, folder[0])
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
    assert "blocks.0.down" in repr(trained.model.blocks[0].down)


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
