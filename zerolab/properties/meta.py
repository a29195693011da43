"""A model that does not fit: built on `meta`, it gets values and is sharded a unit at a time. ZeRO-3 alone does it."""

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from zerolab.engine import checkpoint
from zerolab.measure.held import held_bytes, storage_bytes
from zerolab.measure.ledger import MemoryLedger
from zerolab.properties.checkpoints import Zoo, decayed_groups
from zerolab.properties.fixtures import (
    ADAMW,
    OddBlock,
    OddModel,
    Pair,
    a_step,
    byte_batch,
    pieces_of,
    seeded,
    silent_group,
)
from zerolab.properties.property import ask, ask_each, expect, only, refused, same, stages_hold, subject
from zerolab.properties.shared_folder import shared_folder
from zerolab.run.model import GPT, PRESETS, GPTConfig, initialize, next_token_loss


def on_meta(build):
    with torch.device("meta"):
        return build()


def mapped(state: dict, folder) -> dict:
    """`state`, as it is read from this rank's file."""
    file = f"{folder}/{dist.get_rank()}.pt"
    torch.save(state, file)
    return torch.load(file, mmap=True)


@stages_hold("life", *ask_each("param_dtype", (None, torch.bfloat16), "zero3", asks=only, more_ranks=(1, 3)))
def the_same_seed_gives_the_same_weights_on_meta(engine, param_dtype=None, device="cpu"):
    """From the same seed a model on `meta` gets the weights of the whole one, to the bit: the same operations.

    Parameters stay the same objects. They come to the device that is torch's default, and a step can follow.
    """
    config = PRESETS["toy"]
    expected, model = GPT(config, seed=7).state_dict(), on_meta(lambda: GPT(config))
    weight = model.blocks[0].up.weight
    weight.tag = "no decay"
    init_fn, groups = partial(initialize, seed=7), decayed_groups(model)
    with torch.device(device):
        trained = engine(model, ADAMW, init_fn=init_fn, param_groups=groups, param_dtype=param_dtype)
    same("bytes that stay gathered", storage_bytes(model.parameters()), 0)
    same("the weights from the seed", trained.full_state_dict(), expected)
    devices = {tensor.device.type for tensor in (*model.parameters(), *pieces_of(trained))}
    same("the devices of parameters and their pieces", devices, {device})
    trained.training_step(*byte_batch(0, engine.rank, device), next_token_loss)
    assert model.head.weight is model.tokens.weight and model.blocks[0].up.weight is weight
    assert weight.tag == "no decay"
    assert not torch.equal(expected["tokens.weight"], GPT(config, seed=8).tokens.weight)
    assert not torch.equal(expected["blocks.0.up.weight"], expected["blocks.1.up.weight"])
    for name, value in expected.items():  # a GPT as it should start
        if value.ndim > 1:
            assert abs(value.mean()) < 2e-3 and abs(value.std() - 0.02) < 2e-3, name
        else:
            assert (value == ("norm" in name and name.endswith("weight"))).all(), name


SOURCES = ("init_fn", "state_dict", "folder", "init_fn in bfloat16")


@stages_hold("bytes", *ask_each("source", SOURCES, "zero3", asks=only))
def building_from_meta_takes_the_shards_and_one_unit(engine, source):
    """The peak while a model on `meta` is built is the shards and one unit; with a folder, three units."""
    config = GPTConfig(layers=8, width=64, heads=2, vocab=64, seq=16)
    weights, model = GPT(config, seed=3).state_dict(), on_meta(lambda: GPT(config))
    options = {"init_fn": initialize, "param_dtype": torch.bfloat16 if "bfloat16" in source else None}
    with shared_folder() as folder:
        if source == "state_dict":
            options = {"state_dict": mapped(weights, folder)}
        elif source == "folder":
            dcp.save({"model": weights}, checkpoint_id=folder)
            options = {"state_dict": folder}
        with MemoryLedger() as memory:
            trained = engine(model, ADAMW, group=silent_group(), **options)
    same("bytes that stay", memory.live, held_bytes(trained)["parameters"])
    unit = max(4 * sum(bucket.numel for bucket in each.buckets) for each in (*trained.units, trained.root))
    most = memory.live + (3 if source == "folder" else 1) * unit + 4
    assert most < sum(4 * value.numel() for value in weights.values()), "the whole model is no more: this says nothing"
    expect(memory.peak <= most, "the peak of live bytes while it is built", f"at most {most:,}", f"{memory.peak:,}")


@stages_hold("life", *ask_each("source", ("file", "folder"), "zero3", asks=only))
def weights_on_file_are_read_into_meta(engine, source):
    """Another model's weights, memory-mapped or in a folder, are taken, and not written to; then it trains.

    init_fn fills what no state_dict has.
    """
    build, asked = partial(Zoo, norm=nn.LayerNorm), []
    whole = seeded(build, seed=5)

    def init_fn(name, tensor):
        asked.append(name)
        tensor.fill_(1)

    with shared_folder() as folder:
        if source == "file":
            state = mapped(whole.state_dict(), folder)
        else:
            state = checkpoint.save(subject("zero1")(seeded(build, seed=5), ADAMW), folder).path
        options = {"find_unused": True, "state_dict": state, "init_fn": init_fn}
        pair = Pair(engine, (whole, on_meta(build)), ADAMW, groups=decayed_groups, **options)
    same("names that init_fn is asked for", asked, ["table"])
    same("the weights from the file", pair.trained.full_state_dict(), whole.state_dict())
    same("names that are still on meta", names_on_meta(pair.model), [])
    before = whole.mix.detach().clone()
    pair.alike(3)
    if source == "file":
        same("the file's own values", state["mix"], before)


def counting() -> OddBlock:
    """With a buffer that two modules share."""
    block = OddBlock(9)
    block.register_buffer("count", torch.zeros(2))
    block.up.register_buffer("count", block.count)
    return block


def names_on_meta(model) -> list[str]:
    return [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]


@stages_hold("life", only("zero3"))
def init_fn_fills_what_is_on_meta(engine):
    """init_fn is asked once for what is on `meta`, and for nothing else, and rank 0's values count on all.

    If it raises on one rank all hear of it, and the model is as before: another try works.
    """
    rank, last, names = engine.rank, engine.size - 1, []
    whole = on_meta(OddModel)
    weight, missing = whole.blocks[1].up.weight, names_on_meta(whole)

    def raises(name, tensor):
        if rank == last and name == "blocks.1.up.weight":
            raise ZeroDivisionError("of the caller's own")
        tensor.fill_(0.1)

    def fills(name, tensor):  # it may draw from a generator that differs between the ranks
        names.append(name)
        tensor.fill_(rank + len(name))

    with refused(f"rank {last}: ", "of the caller's own"):
        engine(whole, ADAMW, init_fn=raises)
    same("names on meta after the error", names_on_meta(whole), missing)
    assert whole.blocks[1].up.weight is weight and type(weight) is nn.Parameter and weight.requires_grad
    a_step(engine(whole, ADAMW, init_fn=fills))
    names.clear()
    model, other = (seeded(OddModel, dtype=torch.float32) for _ in range(2))
    model.blocks[1] = on_meta(counting)
    missing = names_on_meta(model)
    trained = engine(model, ADAMW, init_fn=fills, prefetch=0)
    same("names that init_fn is asked for", sorted(names), sorted(missing))
    same("names that are still on meta", names_on_meta(model), [])
    block = model.blocks[1]
    assert block.count is block.up.count, "the buffer of two modules is two objects"
    state = trained.full_state_dict()
    filled = {name: torch.full_like(state[name], len(name)) for name in missing}
    filled["blocks.1.up.count"] = filled["blocks.1.count"]
    expected = other.state_dict() | filled
    same("the weights", state, {name: expected[name] for name in state})
    a_step(trained)
    trained.load_full_state_dict(state)


@stages_hold("misuse", ask(ranks=3))
def what_cannot_be_materialised_is_refused(engine):
    """A model on `meta` without a source of its values, or with one that does not fit, is refused by name."""
    if engine.like != "zero3":
        with refused("materialise", "ZeRO3(model, ..., init_fn=...)", error=ValueError):
            engine(on_meta(OddModel), ADAMW)
        return
    good = OddModel().state_dict()
    less = {name: value for name, value in good.items() if name != "head.bias"}
    other = {**good, "head.weight": torch.zeros(3, 4)}
    for source, *words in (
        ({}, "init_fn=", "state_dict=", "'embedding.weight'"),
        ({"state_dict": less}, "missing 'head.bias'", "unexpected nothing"),
        ({"state_dict": {**good, "tail.weight": torch.zeros(1)}}, "missing nothing", "unexpected 'tail.weight'"),
        ({"state_dict": other}, "'head.weight'", "(3, 4)", "(3, 5)"),
        ({"init_fn": lambda name, tensor: torch.zeros_like(tensor)}, "init_fn returned a new tensor", "in place"),
    ):
        with refused(*words, error=Exception):
            engine(on_meta(OddModel), ADAMW, **source)
    with refused("nothing of this one is", "load_full_state_dict", error=ValueError):
        engine(OddModel(), ADAMW, init_fn=lambda name, tensor: None)
    # What is wrong on one rank is an error on all.
    init_fn = None if engine.rank == 1 else lambda name, tensor: tensor.zero_()
    with refused("rank 1: " if init_fn else "init_fn=", error=ValueError):
        engine(on_meta(OddModel), ADAMW, init_fn=init_fn)
