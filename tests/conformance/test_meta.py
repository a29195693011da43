"""A model on torch's device `meta`: it gets its values unit by unit, and never exists whole."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import Blocks, Recorder, Tied, batch, seeded
from torch import nn

from conformance.pair import Pair
from conformance.test_memory import Wide
from conformance.test_state_dict import Odd, check_rank_0s, fill_by_rank
from zerolab.measure.held import storage_bytes

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
float_batch = partial(batch, dtype=torch.float32)


def on_meta(make):
    with torch.device("meta"):
        return make()


class Counting(Tied):
    """With a buffer that two modules share."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.head.register_buffer("count", self.count)


def fill(name, tensor):
    """Values that depend on the name only."""
    tensor.copy_(torch.linspace(-0.5, 0.5, tensor.numel(), dtype=tensor.dtype).view(tensor.shape) * (1 + len(name) % 3))


@pytest.mark.ranks(2, thorough=(1, 3))
@pytest.mark.stages("zero3")
@pytest.mark.parametrize("source", ["init_fn", "state_dict"])
def test_a_model_on_meta_gets_its_values_and_trains(engine, source):
    """From `init_fn` or from whole weights; parameters stay the same objects, with their marks and their ties."""
    whole = seeded(Counting, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
            fill(name, tensor)
    values = {name: value.clone() for name, value in whole.state_dict().items()}
    model = on_meta(Counting)
    weight = model.blocks[0].up.weight
    weight.mark = "no decay"
    options = {"init_fn": fill} if source == "init_fn" else {"state_dict": values}
    pair = Pair(engine, whole, ADAMW, start=model, data=float_batch, tolerance=1e-6, **options)
    assert model.blocks[0].up.weight is weight and weight.mark == "no decay"
    assert model.head.weight is model.embedding.weight and model.head.count is model.count
    assert storage_bytes(model.parameters()) == 0, "bytes that stay gathered"
    for name, value in pair.trained.full_state_dict().items():
        assert torch.equal(value, values[name]), name
    pair.train()


class Recurrent(nn.Module):
    """A layer that keeps weak references to its weights, between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(11, 5), nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens))[0].mean(1))


@pytest.mark.stages("zero3")
def test_recurrent_layers_on_meta(engine):
    """Their weights have weak references, which find the same objects after the build."""
    whole = seeded(Recurrent, dtype=torch.float32)
    model = on_meta(Recurrent)
    weights = [*model.layer.parameters()]
    state = whole.state_dict()
    pair = Pair(engine, whole, ADAMW, start=model, data=float_batch, tolerance=1e-6, state_dict=state)
    assert all(kept() is weight for kept, weight in zip(model.layer._flat_weight_refs, weights, strict=True))
    pair.train()


@pytest.mark.stages("zero3")
def test_hooks_of_a_parameter_on_meta_run(engine):
    """Hooks that were registered before the parameter got its values, and that are removed afterwards."""
    whole, model, seen, handles = seeded(Blocks, dtype=torch.float32), on_meta(Blocks), [], []
    for each in (whole, model):
        weight = each.blocks[1].up.weight
        handles.append(weight.register_hook(lambda gradient: gradient * 0.5))
        weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad is not None))
    state = whole.state_dict()
    pair = Pair(engine, whole, ADAMW, start=model, data=float_batch, tolerance=1e-6, state_dict=state)
    pair.train(1)
    assert seen == [True] * (dist.get_world_size() + 1), "one for each rank's batch on the plain side, and one here"
    for handle in handles:
        handle.remove()
    pair.train(1, first=1)


@pytest.mark.stages("zero3")
def test_buffers_of_any_dtype_and_parameters_get_rank_0s_values(engine):
    """Each rank fills them with different values."""
    model = on_meta(Odd)
    trained = engine(model, ADAMW(model.parameters()), init_fn=fill_by_rank)
    check_rank_0s((*model.named_buffers(), *trained.full_state_dict().items()))
    assert model.transposed.stride() == (1, 4) and model.uint16.dtype == torch.uint16


class Passing(Blocks):
    """With a buffer that `state_dict()` does not have."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passing", torch.ones(2), persistent=False)


@pytest.mark.stages("zero3")
def test_a_buffer_that_is_not_persistent_needs_init_fn(engine):
    """The error says so; and with `init_fn`, it is called for this buffer only."""
    values = seeded(Passing, dtype=torch.float32).state_dict()
    model = on_meta(Passing)
    with pytest.raises(KeyError, match="'passing'.* not persistent. Pass init_fn= as well"):
        engine(model, ADAMW(model.parameters()), state_dict=values)
    names = []

    def note_and_fill(name, tensor):
        names.append(name)
        tensor.fill_(3)

    trained = engine(model, ADAMW(model.parameters()), state_dict=values, init_fn=note_and_fill)
    assert names == ["passing"] and model.passing.tolist() == [3, 3]
    assert all(torch.equal(value, values[name]) for name, value in trained.full_state_dict().items())


@pytest.mark.stages("zero3")
@pytest.mark.parametrize("wrapped", ["the model", "the state"])
def test_wrappers_of_a_model_on_meta_change_no_name(engine, wrapped):
    """torch.compile inserts "_orig_mod" into the names of a model, and so into a state that was saved from it."""
    whole = seeded(Blocks, dtype=torch.float32)
    values = (torch.compile(whole) if wrapped == "the state" else whole).state_dict()
    model = on_meta(Blocks)
    model = torch.compile(model) if wrapped == "the model" else model
    trained = engine(model, ADAMW(model.parameters()), state_dict=values)
    for name, value in trained.full_state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name


@pytest.mark.stages("zero3")
def test_only_what_is_on_meta_is_filled(engine):
    """A part of a model may be on `meta`."""
    model = seeded(Blocks, dtype=torch.float32)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.blocks[1] = on_meta(lambda: Blocks(2).blocks[1])
    trained = engine(model, ADAMW(model.parameters()), init_fn=lambda name, tensor: tensor.fill_(0.25))
    for name, value in trained.full_state_dict().items():
        assert (value == 0.25).all() if name.startswith("blocks.1.") else torch.equal(value, expected[name]), name


@pytest.mark.stages("zero3")
def test_the_peak_of_the_build_is_the_shards_and_one_unit(engine):
    """The whole model is in no rank's memory at any time: shards, the unit that is filled, and a copy of it."""
    model = on_meta(Wide)
    whole = sum(param.nbytes for param in model.parameters())
    with Recorder() as recorder:
        trained = engine(model, ADAMW(model.parameters()), init_fn=fill)
    unit = max(each.flat.nbytes if each.allocated else 4 * each.numel for each in trained.units)
    shards = sum(each.shard.nbytes for each in trained.units)
    assert shards + unit <= recorder.peak <= shards + 3 * unit < whole


def new_tensor(name, tensor):
    return torch.zeros_like(tensor)


GOOD = Blocks().state_dict()
SOURCES = {
    "none": ({}, "init_fn="),
    "a name is missing": ({"state_dict": {k: v for k, v in GOOD.items() if k != "head.bias"}}, "head.bias"),
    "another shape": ({"state_dict": {**GOOD, "head.weight": torch.zeros(3, 4)}}, "head.weight"),
    "a new tensor": ({"init_fn": new_tensor}, "in place"),
}


@pytest.mark.stages("zero3")
@pytest.mark.parametrize("source", SOURCES)
def test_a_source_that_does_not_fit_is_refused(engine, source):
    """By name, on every rank."""
    options, text = SOURCES[source]
    model = on_meta(Blocks)
    with pytest.raises((ValueError, KeyError, TypeError), match=text):
        engine(model, ADAMW(model.parameters()), **options)


@pytest.mark.stages("zero3")
def test_an_error_of_init_fn_on_one_rank_is_raised_on_all(engine):
    """And no rank waits for another."""

    def raises(name, tensor):
        if dist.get_rank() == 1 and name == "blocks.1.up.weight":
            raise ZeroDivisionError("from init_fn")
        fill(name, tensor)

    model = on_meta(Blocks)
    with pytest.raises((RuntimeError, ZeroDivisionError), match="from init_fn"):
        engine(model, ADAMW(model.parameters()), init_fn=raises)
    dist.barrier()


@pytest.mark.stages("zero3")
def test_a_source_for_a_model_with_values_is_refused(engine):
    """It would be ignored."""
    model = seeded(Blocks, dtype=torch.float32)
    with pytest.raises(ValueError, match="load_full_state_dict"):
        engine(model, ADAMW(model.parameters()), init_fn=fill)


@pytest.mark.stages("zero1", "zero2")
def test_meta_is_refused_where_the_whole_model_must_exist(engine):
    """ZeRO-1 and -2 keep all weights on every rank."""
    model = on_meta(lambda: nn.Linear(3, 3))
    with pytest.raises((ValueError, RuntimeError), match="meta"):
        engine(model, ADAMW(model.parameters()))
