"""Whole weights, buffers and what modules keep besides: what an engine gives out and takes in."""

from functools import partial

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from zerolab.engine import checkpoint
from zerolab.measure.held import storage_bytes
from zerolab.properties.checkpoints import state_by_torch, state_of
from zerolab.properties.fixtures import (
    DECAY,
    EXACT,
    Keeping,
    OddModel,
    a_step,
    a_step_on_vectors,
    in_float64,
    odd,
    own_tokens,
    seeded,
    started_by,
    vector_batch,
)
from zerolab.properties.property import ask, holds, refused, same, stages_hold
from zerolab.properties.shared_folder import shared_folder


@holds("life", ask(ranks=3, more_ranks=(1, 2)), ask(param_dtype=torch.bfloat16))
def the_state_of_one_engine_is_taken_in_by_another(engine, **options):
    """A whole state is taken in, in use at once, and given out as it was; one with wrong names is refused.

    Frozen weights and buffers are in it, for every rank.
    """
    source, trained = started_by(3), odd(engine, **options)
    a_step(trained)
    trained.load_full_state_dict(source.state_dict())
    state = trained.full_state_dict()
    same("the state that was loaded", state, source.state_dict())
    for name, value in state.items():  # no view of a bucket, all of which torch.save would write for each entry
        same(f"bytes of the storage under {name}", value.untyped_storage().nbytes(), value.nbytes)
    tokens, _ = own_tokens(3)
    with torch.no_grad():  # the weights in use, not only those on file
        same("what the engine computes", trained(tokens), source(tokens), 0.05 if options else EXACT)
    for broken, name in (
        ({k: v for k, v in state.items() if k != "head.bias"}, "head.bias"),
        ({**state, "nobody": torch.ones(1)}, "nobody"),
        ({**state, "head.bias": torch.ones(4)}, "head.bias"),
    ):
        with refused(name, error=(KeyError, ValueError)):
            trained.load_full_state_dict(broken)
    same("the state after what was refused", trained.full_state_dict(), state)
    a_step(trained, 1)  # and what was trained, not loaded: the same weights, and the same operations on them
    fresh = odd(engine, **options)
    fresh.load_full_state_dict(trained.full_state_dict())
    with torch.no_grad():
        same("what an engine computes that has it all", fresh(tokens), trained(tokens))


def as_bytes(tensor: torch.Tensor) -> tuple:
    """What it is, to the bit, in a form that can be compared."""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tuple(tensor.shape), str(tensor.dtype), values.tolist()


def buffers_of(model) -> dict:
    return {name: as_bytes(buffer) for name, buffer in model.named_buffers()}


def quantized_of(state: dict) -> dict:
    return {name: as_bytes(state[f"blocks.0.{name}"]) for name in QUANTIZED}


QUANTIZED = {"q8": torch.int8, "u8": torch.uint8, "q16": torch.int16}


class Buffered(nn.Module):
    """Buffers as they lie in memory and of every dtype, frozen parameters that are quantized; all another per rank."""

    def __init__(self, rank: int):
        super().__init__()
        generator = torch.Generator().manual_seed(rank)

        def normal(*shape):
            return torch.randn(*shape, generator=generator)

        def integers(*shape):
            return torch.randint(1, 100, shape, generator=generator)

        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 3)])
        for name, buffer in {
            "transposed": normal(3, 4).T,
            "strided": normal(6, 4)[::2],
            "expanded": normal(1, 4).expand(3, 4),
            "channels_last": normal(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
            "part": normal(10)[3:7],
            "empty": normal(0, 3),
            "uint16": integers(3).to(torch.uint16),
            "int16_transposed": integers(3, 5).short().T,
            "int16_scalar": integers().short(),
            "float8": normal(3).to(torch.float8_e4m3fn),
            "bool": normal(5) > 0,
            "complex_transposed": torch.complex(normal(2, 3), normal(2, 3)).T,
            "float16": normal(3).half(),
        }.items():
            self.register_buffer(name, buffer)
        self.register_buffer("passing", normal(3), persistent=False)
        for name, dtype in QUANTIZED.items():
            self.blocks[0].register_parameter(name, nn.Parameter(integers(7, 3).to(dtype), requires_grad=False))

    def forward(self, x):
        x = self.blocks[0](x)
        return self.blocks[1](torch.tanh(x))


@stages_hold("life", ask(), ask(param_dtype=torch.bfloat16))
def every_buffer_and_every_quantized_weight_is_rank_0s(engine, param_dtype=None):
    """All ranks get rank 0's buffers, however they lie in memory; the whole state has them, and loading gives them.

    So it is with quantized frozen weights, in every forward, while a layer beside them trains. ZeRO-3 shards and frees
    them as all others.
    """
    model, first, seen = Buffered(engine.rank), Buffered(0), []
    expected, own = buffers_of(first), buffers_of(model)
    quantized, params = quantized_of(first.state_dict()), dict(model.named_parameters())
    alike = sum(own[name] == expected[name] for name in own)
    assert engine.rank == 0 or alike < 4, "the ranks have the same buffers: this proves nothing"
    model.blocks[0].register_forward_hook(lambda *_: seen.append(quantized_of(params)))
    trained = engine(model, DECAY, param_dtype=param_dtype)
    same("buffers of the model", buffers_of(model), expected)
    for step in range(2):
        inputs, _ = vector_batch(step, engine.rank, 5, batch=2)
        trained.training_step(inputs, torch.tensor([0, 1]), in_float64)
    same("quantized weights in forward", seen, [quantized] * 2)
    if engine.like == "zero3":
        same("bytes of weights that are gathered", storage_bytes(params.values()), 0)
    model.int16_scalar.add_(engine.rank)  # own again, as running statistics are
    own = buffers_of(model)
    state = trained.full_state_dict()
    same("this rank's own buffers, when the state was asked for", buffers_of(model), own)
    saved = [name for name in first.state_dict() if name in expected]
    same("buffers in the state", {n: as_bytes(state[n]) for n in saved}, {n: expected[n] for n in saved})
    same("quantized weights", quantized_of(state), quantized)
    changed = {**state, "blocks.0.q8": state["blocks.0.q8"] - 1}
    trained.load_full_state_dict(changed)
    same("buffers after loading", buffers_of(model), expected)
    same("quantized weights that were loaded", trained.full_state_dict()["blocks.0.q8"], changed["blocks.0.q8"])


class Keeps(Keeping):
    """What it gives by `get_extra_state` is another value on each rank."""

    def __init__(self, kept):
        super().__init__()
        self.linear, self.kept = nn.Linear(3, 3), kept

    def forward(self, x):
        return self.linear(x)


def keeping(rank: int) -> nn.Module:
    """As they are, in activation checkpointing, compiled, and the model's own."""
    values = (
        3 + rank,
        torch.arange(4.0) + rank,
        {"seen": rank, "sums": {"a": torch.ones(2) + rank, f"only {rank}": [rank]}},
        {"rank": rank} if rank else {},
        {rank: "a", 7: torch.zeros(1) + rank},
        [rank, torch.full((3,), rank), (1, 2)],
        {"wrapped": rank},
        [rank],
    )
    model = nn.Sequential(*map(Keeps, values))
    model[6] = checkpoint_wrapper(model[6])
    model[7] = torch.compile(model[7])
    return seeded(lambda: model, rank)


def kept(model) -> str:
    """As text, which tells kinds and dtypes as well: all values are whole numbers."""
    return str([module.kept for module in model.modules() if isinstance(module, Keeps)])


@stages_hold("life")
def what_modules_keep_besides_tensors_is_rank_0s(engine):
    """What `get_extra_state` gives goes through the whole state and checkpoints, and all ranks get rank 0's.

    Of an empty dictionary torch saves nothing, so nobody misses it.
    """
    rank, expected = engine.rank, kept(keeping(0))
    trained, other = engine(keeping(rank), DECAY), engine(keeping(rank + 5), DECAY)
    state, own = trained.full_state_dict(), kept(trained.model)
    found = [value for key, value in state.items() if key.endswith("_extra_state")]
    same("extra states in the whole state", str(found), expected)
    same("this rank's own, when the state was asked for", own, kept(keeping(rank)))
    trained.load_full_state_dict(state)
    same("extra states that were loaded", kept(trained.model), expected)
    with shared_folder() as folder:
        checkpoint.save(trained, folder)
        checkpoint.load(other, folder)
        same("extra states from a checkpoint", kept(other.model), expected)
        plain = nn.Sequential(Keeps({}))
        dcp.save(state_by_torch(plain, DECAY(plain.parameters())), checkpoint_id=folder / "theirs")
        checkpoint.load(engine(nn.Sequential(Keeps({})), DECAY), folder / "theirs")


@stages_hold("life")
def a_module_that_does_not_take_its_state_changes_nothing(engine):
    """If `set_extra_state` raises on one rank, all ranks raise, and weights, modules and optimizer are as they were."""
    rank, model = engine.rank, seeded(lambda: nn.Sequential(Keeps(1), Keeps(2)), dtype=torch.float32)
    trained = engine(model, DECAY)
    state, refuses = trained.full_state_dict(), []
    take = model[1].set_extra_state

    def set_extra_state(value):
        if rank == 1 and refuses:
            refuses.clear()
            raise ValueError("not mine")
        take(value)

    model[1].set_extra_state = set_extra_state
    with shared_folder() as folder:
        checkpoint.save(trained, folder)
        a_step_on_vectors(trained, 0, 3)
        model[0].kept = model[1].kept = 5
        before = state_of(trained)
        for load in (partial(trained.load_full_state_dict, state), partial(checkpoint.load, trained, folder)):
            refuses.append("once")
            with refused("not mine", error=ValueError):
                load()
            same("the engine", state_of(trained), before)
        checkpoint.load(trained, folder)
    same("what modules keep", kept(model), "[1, 2]")


# What the last rank has under a name: of another shape, number of dimensions or dtype, one more, and one less.
OTHER_BUFFERS = (
    ("shift", torch.zeros(7, dtype=torch.float64)),
    ("shift", torch.zeros(2, 2, dtype=torch.float64)),
    ("shift", torch.zeros(5)),
    ("more", torch.zeros(2)),
    ("shift", None),
)


@stages_hold("life", ask(ranks=3))
def buffers_of_other_shapes_are_an_error_on_all_ranks(engine):
    """Where ranks' buffers are not alike, the whole state is refused on all ranks, and names the buffer."""
    last = engine.size - 1
    for name, other in OTHER_BUFFERS:
        model = seeded(OddModel)
        trained, usual = engine(model, DECAY), dict(model.named_buffers()).get(name)
        expected = trained.full_state_dict()
        if engine.rank == last:
            model.register_buffer(name, other)
        with refused(repr(name), f"rank {last}", error=ValueError):
            trained.full_state_dict()
        model.register_buffer(name, usual)
        same("the state with the buffers as they were", trained.full_state_dict(), expected)
