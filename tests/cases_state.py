"""Run on every rank: frozen weights and running statistics, in and out."""

import parts
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.nn import functional as F

from harness.engine import checkpoint


def loading_reaches_frozen_weights(stage: str) -> None:
    """What forward uses after loading is what was loaded, the frozen weights on every rank included."""
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), parts.DECAY)
    other = parts.seeded(parts.OddModel, seed=3)
    with torch.no_grad():
        other.frozen.copy_(torch.linspace(2, 3, 5))
        other.shift.add_(0.5)
    engine.load_full_state_dict(other.state_dict())
    tokens, _ = parts.token_batch(0, dist.get_rank())
    with torch.no_grad():
        torch.testing.assert_close(engine(tokens), other(tokens), rtol=0, atol=1e-12)
    parts.assert_same_state(engine.full_state_dict(), other.state_dict(), atol=0)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def batch_norm_keeps_rank_0(stage: str) -> None:
    """Running statistics are every rank's own; `full_state_dict` has rank 0's, and loading gives these to all."""
    rank = dist.get_rank()

    def batch_of(step, who):
        generator = torch.Generator().manual_seed(100 * step + who)
        return torch.randn(8, 6, generator=generator, dtype=torch.float64) + who, torch.zeros(8, 3, dtype=torch.float64)

    model = parts.seeded(Normed)
    engine = parts.STAGES[stage](model, parts.DECAY)
    for step in range(4):
        engine.training_step(*batch_of(step, rank), F.mse_loss)
    mean = model.blocks[0][1].running_mean
    everyone = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mean)
    assert all(not torch.equal(everyone[0], other) for other in everyone[1:])  # each has seen its own data
    state = engine.full_state_dict()
    assert torch.equal(state["blocks.0.1.running_mean"], everyone[0])
    assert torch.equal(mean, everyone[rank])  # and asking has changed nothing
    assert state["blocks.0.1.num_batches_tracked"] == 4
    engine.load_full_state_dict(state)
    assert torch.equal(mean, everyone[0])
    engine.model.eval()
    with torch.no_grad():
        out = engine(batch_of(9, 0)[0])
    plain = parts.seeded(Normed, seed=3)
    plain.load_state_dict(state)
    torch.testing.assert_close(out, plain.eval()(batch_of(9, 0)[0]), rtol=0, atol=1e-12)


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
            "columns": normal(4, 6)[:, 1:4],
            "expanded": normal(1, 4).expand(3, 4),
            "channels_last": normal(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
            "part": normal(10)[3:7],
            "empty": normal(0, 3),
            "int16": integers(3).short(),
            "uint16": integers(3).to(torch.uint16),
            "int16_transposed": integers(3, 5).short().T,
            "int16_scalar": integers().short(),
            "float8": normal(3).to(torch.float8_e4m3fn),
            "bool": normal(5) > 0,
            "complex": torch.complex(normal(2), normal(2)),
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


QUANTIZED = {"q8": torch.int8, "u8": torch.uint8, "q16": torch.int16}


def bytes_of(tensor: torch.Tensor) -> tuple:
    """What a tensor is, to the bit, in a form that can be compared."""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
    return tuple(tensor.shape), str(tensor.dtype), values.tolist()


def every_kind_of_buffer(stage: str) -> None:
    """All ranks get rank 0's, whatever lies how; reading the whole state and loading it does the same."""
    rank = dist.get_rank()
    model, first = Buffered(rank), Buffered(0)
    expected = {name: bytes_of(buffer) for name, buffer in first.named_buffers()}
    own = {name: bytes_of(buffer) for name, buffer in model.named_buffers()}
    assert rank == 0 or sum(own[name] == value for name, value in expected.items()) < 4  # else this tests nothing
    engine = parts.STAGES[stage](model, parts.DECAY)
    assert {name: bytes_of(buffer) for name, buffer in model.named_buffers()} == expected
    assert model.transposed.shape == (4, 3)
    state = engine.full_state_dict()
    for name in first.state_dict():
        if name in expected:
            assert bytes_of(state[name]) == expected[name], name
    model.int16_scalar.add_(rank)  # own again
    assert bytes_of(engine.full_state_dict()["int16_scalar"]) == expected["int16_scalar"]
    engine.load_full_state_dict(state)
    assert {name: bytes_of(buffer) for name, buffer in model.named_buffers()} == expected


def quantized_frozen_parameters(stage: str, param_dtype) -> None:
    """Rank 0's on every rank, in every forward and backward; in the whole state too. Beside them a layer trains."""
    rank = dist.get_rank()
    model, first = Buffered(rank), Buffered(0)
    expected = {name: bytes_of(getattr(first.blocks[0], name)) for name in QUANTIZED}
    seen = []
    block = model.blocks[0]
    block.register_forward_hook(
        lambda module, *_: seen.append({name: bytes_of(getattr(module, name)) for name in QUANTIZED})
    )
    engine = parts.STAGES[stage](model, parts.DECAY, param_dtype=param_dtype)
    before = engine.full_state_dict()
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(2, 5, generator=generator)
        engine.training_step(x, torch.tensor([0, 1]), lambda out, y: F.cross_entropy(out.float(), y))
    assert seen == [expected] * 3
    state = engine.full_state_dict()
    for name in QUANTIZED:
        assert bytes_of(state[f"blocks.0.{name}"]) == expected[name]
    assert not torch.equal(state["blocks.0.weight"], before["blocks.0.weight"])
    engine.load_full_state_dict({**state, "blocks.0.q8": state["blocks.0.q8"] - 1})
    assert torch.equal(engine.full_state_dict()["blocks.0.q8"], state["blocks.0.q8"] - 1)
    if stage == "zero3":
        with torch._C.DisableTorchFunctionSubclass():
            held = sum(getattr(block, name).untyped_storage().nbytes() for name in QUANTIZED)
        assert held == 0, "quantized parameters stay gathered"


class Keeps(nn.Module):
    """What it gives by `get_extra_state` is another value on each rank."""

    def __init__(self, kept):
        super().__init__()
        self.linear, self.kept = nn.Linear(3, 3), kept

    def forward(self, x):
        return self.linear(x)

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


KINDS = {
    "number": lambda rank: 3 + rank,
    "tensor": lambda rank: torch.arange(4.0) + rank,
    "dictionary": lambda rank: {"seen": rank, "sums": {"a": torch.ones(2) + rank, f"only {rank}": [rank]}},
    "empty": lambda rank: {} if rank == 0 else {"rank": rank},
    "numbered": lambda rank: {rank: "a", 7: torch.zeros(1) + rank},
    "list": lambda rank: [rank, torch.full((3,), rank), (1, 2)],
}


def keeping(rank: int) -> nn.Module:
    """As they are, in activation checkpointing, compiled, and the model's own."""
    model = nn.Sequential(*(Keeps(kind(rank)) for kind in KINDS.values()), Keeps({"wrapped": rank}), Keeps([rank]))
    model[6] = checkpoint_wrapper(model[6])
    model[7] = torch.compile(model[7])
    return parts.seeded(lambda: model, rank)


def kept(model) -> list:
    return [module.kept for module in model.modules() if isinstance(module, Keeps)]


def same_values(found, expected) -> None:
    assert str(found) == str(expected), (found, expected)  # kinds and dtypes as well; all values are whole numbers


def extra_state(stage: str, folder: str) -> None:
    """What modules keep besides tensors goes through the whole state, checkpoints and torch's own. All get rank 0's."""
    rank, expected = dist.get_rank(), kept(keeping(0))
    engine = parts.STAGES[stage](keeping(rank), parts.DECAY)
    state = engine.full_state_dict()
    same_values([value for key, value in state.items() if key.endswith("_extra_state")], expected)
    same_values(kept(engine.model)[0], 3 + rank)  # and asking has changed nothing
    engine.load_full_state_dict(state)
    same_values(kept(engine.model), expected)
    other = parts.STAGES[stage](keeping(rank + 5), parts.DECAY)
    checkpoint.save(engine, folder)
    checkpoint.load(other, folder)
    same_values(kept(other.model), expected)
    checkpoint.async_save(other, folder).result()
    checkpoint.load(engine, folder)
    same_values(kept(engine.model), expected)
    # torch's own, which makes texts of numbers as keys. An empty dictionary it leaves out.
    plain = nn.Sequential(Keeps(3), Keeps(torch.arange(4.0)), Keeps({"a": {"b": torch.ones(2)}, "c": [1]}), Keeps({}))
    theirs = {"model": get_model_state_dict(plain), "optim": {"param_groups": [{"params": []}]}}
    optimizer = parts.DECAY(plain.parameters())
    theirs["optim"] = get_optimizer_state_dict(plain, optimizer)
    dcp.save(theirs, checkpoint_id=folder + "/theirs")
    own = parts.STAGES[stage](nn.Sequential(Keeps(0), Keeps(0), Keeps(0), Keeps({})), parts.DECAY)
    checkpoint.load(own, folder + "/theirs")
    same_values(kept(own.model), kept(plain))
    saved = checkpoint.save(own, folder + "/again")
    again = nn.Sequential(Keeps(0), Keeps(torch.zeros(4)), Keeps({"a": {"b": torch.zeros(2)}, "c": 0}), Keeps({}))
    into = {"model": get_model_state_dict(again)}
    dcp.load(into, checkpoint_id=saved.path)
    set_model_state_dict(again, into["model"])
    same_values(kept(again), kept(plain))
