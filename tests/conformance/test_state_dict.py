"""Whole weights out of an engine and into one."""

import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import MOMENTUM, Blocks, Frozen, Tied, mse_loss, own_batch, same, seeded
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from conformance.pair import Pair
from zerolab.engine import checkpoint

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
OPTIONS = {"alone": {}, "mixed precision": {"param_dtype": torch.bfloat16}, "find_unused": {"find_unused": True}}


def equal(found, expected):
    """Names, dtypes, shapes and values, in order."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.ranks(3, thorough=(1, 2))
@pytest.mark.stages("zero1", "zero2", "zero3")
@pytest.mark.parametrize("options", OPTIONS)
def test_a_loaded_state_is_used_and_returned(engine, options):
    """At once and unchanged, including frozen weights and buffers."""
    options = OPTIONS[options]
    source, model = seeded(Frozen, seed=3), seeded(Frozen)
    trained = engine(model, ADAMW(model.parameters()), **options)
    trained.load_full_state_dict(source.state_dict())
    state = trained.full_state_dict()
    equal(state, source.state_dict())
    for name, value in state.items():
        if value.layout is torch.strided and value.is_floating_point():
            assert value.untyped_storage().nbytes() == value.nbytes, f"{name} is a view of a bucket"
    if "param_dtype" not in options:
        with torch.no_grad():
            same(trained(own_batch(3)[0]), source(own_batch(3)[0]), 1e-12, "what the engine computes")


GOOD = seeded(Tied).state_dict()
BROKEN = {
    "a name is missing": ({name: value for name, value in GOOD.items() if name != "head.weight"}, "head.weight"),
    "a name too many": ({**GOOD, "nobody": torch.ones(1)}, "nobody"),
    "another shape": ({**GOOD, "blocks.0.scale": torch.ones(4)}, "blocks.0.scale"),
}


@pytest.mark.stages("zero1", "zero2", "zero3")
@pytest.mark.parametrize("state", BROKEN)
def test_a_state_that_does_not_fit_changes_nothing(engine, state):
    """Every rank raises an error with the name, even if rank 0 has a state that fits."""
    state, name = BROKEN[state]
    model = seeded(Tied)
    trained = engine(model, MOMENTUM(model.parameters()))
    before = trained.full_state_dict()
    if dist.get_rank() == 0:
        state = GOOD
    with pytest.raises((KeyError, ValueError), match=name):
        trained.load_full_state_dict(state)
    equal(trained.full_state_dict(), before)


class Odd(nn.Module):
    """Buffers and a quantized frozen weight, with dtypes that gloo cannot send and several memory layouts."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)
        for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64):
            self.register_buffer(str(dtype).removeprefix("torch."), torch.zeros(5).to(dtype))
        self.register_buffer("transposed", torch.zeros(3, 4).T)
        self.register_buffer("channels_last", torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("scalar", torch.zeros(()))
        self.register_buffer("passing", torch.zeros(3), persistent=False)
        self.quantized = nn.Parameter(torch.zeros(7, 3, dtype=torch.int8), requires_grad=False)


@torch.no_grad()
def fill_by_rank(name, tensor):
    tensor.copy_((torch.arange(tensor.numel()) % 2 + dist.get_rank()).view(tensor.shape))


def check_rank_0s(named_tensors):
    """That rank 0 has filled them."""
    for name, value in named_tensors:
        assert value.float().flatten().tolist() == [float(index % 2) for index in range(value.numel())], name


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_every_buffer_and_every_quantized_weight_is_rank_0s(engine):
    """With any memory layout. Afterwards each rank has its own buffers, and the whole state has rank 0's."""
    model = Odd()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        fill_by_rank(name, tensor)
    trained = engine(model, ADAMW(model.parameters()), param_dtype=torch.bfloat16)
    check_rank_0s(model.named_buffers())
    model.scalar.add_(dist.get_rank())
    state = trained.full_state_dict()
    check_rank_0s(state.items())
    trained.load_full_state_dict({**state, "quantized": state["quantized"] - 1})
    assert torch.equal(trained.full_state_dict()["quantized"], state["quantized"] - 1)


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_buffers_of_other_shapes_are_an_error_on_all_ranks(engine):
    """If the ranks' buffers differ in shape, `full_state_dict` raises an error with the rank, and no rank waits."""
    model = seeded(Frozen)
    trained = engine(model, MOMENTUM(model.parameters()))
    if dist.get_rank() == 1:
        model.register_buffer("shift", torch.zeros(7, dtype=torch.float64))
    with pytest.raises(ValueError, match="rank 1"):
        trained.full_state_dict()


class Keeps(nn.Linear):
    """It has a value that is not a tensor in its state."""

    def __init__(self):
        super().__init__(5, 3)
        self.kept = {"rank": dist.get_rank(), "sum": torch.ones(2) + dist.get_rank()}

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_what_modules_keep_besides_tensors_is_rank_0s(engine):
    """The whole state includes the result of `get_extra_state`, and all ranks get rank 0's."""
    model = seeded(lambda: nn.Sequential(Keeps()), dtype=torch.float32)
    trained = engine(model, ADAMW(model.parameters()))
    state = trained.full_state_dict()
    assert state["0._extra_state"]["rank"] == 0 and model[0].kept["rank"] == dist.get_rank()
    trained.load_full_state_dict(state)
    assert model[0].kept["rank"] == 0 and torch.equal(model[0].kept["sum"], torch.ones(2))


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_loading_between_steps_trains_on_from_there(engine):
    """The optimizer's state stays, and both sides continue from the loaded weights."""
    pair = Pair(engine, seeded(Tied))
    pair.train(2)
    state = {name: value / 2 for name, value in pair.trained.full_state_dict().items()}
    pair.plain.load_state_dict(state)
    pair.trained.load_full_state_dict(state)
    pair.train(2)


def split_weight(module, state, prefix, local_metadata):
    """As models with a fused projection do, to be compatible with weights of separate ones."""
    upper, lower = state.pop(f"{prefix}up.weight").split([3, 6])
    state.update({f"{prefix}upper.weight": upper, f"{prefix}lower.weight": lower})


def clone_entries(module, state, prefix, local_metadata):
    for key in state:
        state[key] = state[key].clone()


HOOKS = {"a split": split_weight, "clones": clone_entries}


@pytest.mark.stages("zero1", "zero2", "zero3")
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_on_state_dict_change_no_name_and_no_value(engine, hook, tmp_path):
    """Parameters keep their own names and exact values, so what was saved can be loaded, in both ways of saving."""

    def build(seed):
        model = seeded(Blocks, seed=seed, dtype=torch.float32)
        model.blocks[1].register_state_dict_post_hook(HOOKS[hook])
        return engine(model, ADAMW(model.parameters()), param_dtype=torch.bfloat16)

    trained, other, third = build(0), build(4), build(5)
    equal(trained.full_state_dict(), seeded(Blocks, dtype=torch.float32).state_dict())
    trained.training_step(*own_batch(0, dtype=torch.float32), mse_loss)
    state = trained.full_state_dict()
    other.load_full_state_dict(state)
    equal(other.full_state_dict(), state)
    checkpoint.save(trained, tmp_path)
    checkpoint.load(third, tmp_path)
    equal(third.full_state_dict(), state)


def wrap(model):
    """Compile the model and a block of it, and recompute another block. All three change names in `state_dict()`."""
    model.blocks[1] = torch.compile(model.blocks[1])
    model.blocks[2] = checkpoint_wrapper(model.blocks[2])
    return torch.compile(model)


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_wrappers_change_no_name(engine, tmp_path):
    """States and checkpoints have the plain model's names, and a state with a wrapped model's names loads too."""
    wrapped, plain = (seeded(Blocks, dtype=torch.float32) for _ in range(2))
    model = wrap(wrapped)
    theirs = model.state_dict()
    assert list(theirs) != list(plain.state_dict()), "the wrappers keep the names, so this proves nothing"
    theirs = {name: value + 1 for name, value in theirs.items()}
    trained = engine(model, ADAMW(model.parameters()))
    equal(trained.full_state_dict(), plain.state_dict())
    checkpoint.save(trained, tmp_path)
    other = seeded(Blocks, seed=5, dtype=torch.float32)
    other = engine(other, ADAMW(other.parameters()))
    checkpoint.load(other, tmp_path)
    equal(other.full_state_dict(), plain.state_dict())
    trained.load_full_state_dict(theirs)
    equal(trained.full_state_dict(), dict(zip(plain.state_dict(), theirs.values())))


class Renamed(nn.Linear):
    """A second version of a module, which changes states of the first version when it loads them."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < 2:
            state[prefix + "weight"] = -state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_a_state_has_the_versions_of_its_modules(engine):
    """A plain module that loads it knows that it is not of an older version."""
    model = seeded(lambda: nn.Sequential(nn.Tanh(), Renamed(5, 3)))
    trained = engine(model, ADAMW(model.parameters()))
    state = trained.full_state_dict()
    plain = nn.Sequential(nn.Tanh(), Renamed(5, 3)).double()
    plain.load_state_dict(state)
    equal(plain.state_dict(), state)


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_a_state_that_only_rank_0_has_is_an_error_on_all_ranks(engine):
    """As if it had been read on rank 0 only. The message says what every rank must pass."""
    model = seeded(Blocks)
    trained = engine(model, ADAMW(model.parameters()))
    state = {name: value + 1 for name, value in seeded(Blocks).state_dict().items()}
    with pytest.raises(TypeError, match="rank 1: .* got NoneType: every rank must pass the whole state"):
        trained.load_full_state_dict(state if dist.get_rank() == 0 else None)
    equal(trained.full_state_dict(), seeded(Blocks).state_dict())


# Checkpoints. tests/test_checkpoint.py has the format, other stages and numbers of ranks, and everything that can fail.


OPTIMIZERS = {"SGD, which keeps nothing": partial(torch.optim.SGD, lr=0.02), "AdamW": ADAMW}


@pytest.mark.stages("zero1", "zero2", "zero3")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_continues_as_an_uninterrupted_one(engine, optimizer):
    """Another engine, over a new model, loads after two of four steps. Weights and optimizer state come back.

    An engine may have its own `save` and `load`; ours use zerolab.engine.checkpoint.
    """
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    make_optimizer = OPTIMIZERS[optimizer]
    pair = Pair(engine, seeded(Tied), make_optimizer)
    pair.train(2)
    getattr(pair.trained, "save", partial(checkpoint.save, pair.trained))(Path(folders[0]))
    model = seeded(Tied, seed=5)
    pair.trained = engine(model, make_optimizer(model.parameters()))
    getattr(pair.trained, "load", partial(checkpoint.load, pair.trained))(Path(folders[0]))
    pair.train(2, first=2)
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
