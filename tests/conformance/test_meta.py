"""A model on torch's device `meta`: it gets its values unit by unit, and never exists whole."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import Blocks, Recorder, Tied, mse, own_batch, seeded, storage_bytes
from torch import nn

from conformance.pair import Pair
from conformance.test_memory import Wide

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


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
    pair = Pair(engine, whole, ADAMW, start=model, data=partial(float_batch), tolerance=1e-6, **options)
    assert model.blocks[0].up.weight is weight and weight.mark == "no decay"
    assert model.head.weight is model.embedding.weight and model.head.count is model.count
    assert storage_bytes(model.parameters()) == 0, "bytes that stay gathered"
    for name, value in pair.trained.full_state_dict().items():
        assert torch.equal(value, values[name]), name
    pair.train()


def float_batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(11, (4, 6), generator=generator), torch.randn(4, 3, generator=generator)


@pytest.mark.stages("zero3")
def test_rank_0s_values_count(engine):
    """`init_fn` may draw from a generator that differs between ranks."""
    model = on_meta(Blocks)
    trained = engine(model, ADAMW(model.parameters()), init_fn=lambda name, tensor: tensor.fill_(1 + dist.get_rank()))
    assert all((value == 1).all() for value in trained.full_state_dict().values())


@pytest.mark.stages("zero3")
def test_only_what_is_on_meta_is_filled(engine):
    """A part of a model may be on `meta`."""
    model = seeded(Blocks, dtype=torch.float32)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.blocks[1] = on_meta(lambda: Blocks(2).blocks[1])
    names = []

    def note_and_fill(name, tensor):
        names.append(name)
        tensor.fill_(0.25)

    trained = engine(model, ADAMW(model.parameters()), init_fn=note_and_fill)
    assert sorted(names) == sorted(name for name in expected if name.startswith("blocks.1."))
    for name, value in trained.full_state_dict().items():
        assert torch.equal(value, expected[name]) or (name in names and (value == 0.25).all()), name


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


def refuses(init_fn=None, **options):
    return options | ({"init_fn": init_fn} if init_fn else {})


GOOD = {name: value for name, value in Blocks().state_dict().items()}
SOURCES = {
    "none": ({}, "init_fn="),
    "a name is missing": ({"state_dict": {k: v for k, v in GOOD.items() if k != "head.bias"}}, "head.bias"),
    "a name too many": ({"state_dict": {**GOOD, "tail": torch.zeros(1)}}, "tail"),
    "another shape": ({"state_dict": {**GOOD, "head.weight": torch.zeros(3, 4)}}, "head.weight"),
    "a new tensor": ({"init_fn": lambda name, tensor: torch.zeros_like(tensor)}, "in place"),
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
    trained = engine(model, ADAMW(model.parameters()))
    mse(trained, *own_batch(0, dtype=torch.float32)).backward()
    trained.step()


@pytest.mark.stages("zero1", "zero2")
def test_meta_is_refused_where_the_whole_model_must_exist(engine):
    """ZeRO-1 and -2 keep all weights on every rank."""
    model = on_meta(lambda: nn.Linear(3, 3))
    with pytest.raises((ValueError, RuntimeError), match="meta"):
        engine(model, ADAMW(model.parameters()))
