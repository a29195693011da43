"""Run on every rank: a model on `meta` is materialised and sharded a unit at a time."""

import os
import tempfile
from functools import partial

import parts
import torch
import torch.distributed as dist
from cases_errors import message
from torch import nn
from torch.nn import functional as F

from harness.measure.memory import MemoryLedger, held_bytes
from harness.run.model import GPT, PRESETS, GPTConfig, initialize, next_token_loss

ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def on_meta(build):
    with torch.device("meta"):
        return build()


def batch(step: int):
    generator = torch.Generator().manual_seed(1_000 * step + dist.get_rank())
    tokens = torch.randint(256, (2, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def same_as_built_whole(options: dict) -> None:
    """The same seed gives the same weights, to the bit, and the same training after."""
    config = PRESETS["toy"]
    whole = GPT(config, seed=7)
    expected = {name: value.clone() for name, value in whole.state_dict().items()}
    model = on_meta(lambda: GPT(config))
    held_elsewhere = model.blocks[0].up.weight
    held_elsewhere.tag = "no decay"
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    engine = parts.ZeRO3(model, ADAMW, init_fn=partial(initialize, seed=7), param_groups=groups, **options)
    parts.assert_same_state(engine.full_state_dict(), expected, atol=0)
    assert model.head.weight is model.tokens.weight and model.blocks[0].up.weight is held_elsewhere
    assert held_elsewhere.tag == "no decay"
    assert not torch.equal(expected["tokens.weight"], GPT(config, seed=8).tokens.weight)
    assert not torch.equal(expected["blocks.0.up.weight"], expected["blocks.1.up.weight"])
    for name, value in expected.items():  # a GPT as it should start
        if value.ndim > 1:
            assert abs(value.mean()) < 2e-3 and abs(value.std() - 0.02) < 2e-3, name
        else:
            assert (value == ("norm" in name and name.endswith("weight"))).all(), name
    groups = [{**group, "params": []} for group in groups]
    for param in whole.parameters():
        groups[param.ndim < 2]["params"].append(param)
    other = parts.ZeRO3(whole, ADAMW, param_groups=groups, **options)
    for step in range(3):
        a = engine.training_step(*batch(step), next_token_loss)
        b = other.training_step(*batch(step), next_token_loss)
        assert torch.equal(a, b)
    parts.assert_same_state(engine.full_state_dict(), other.full_state_dict(), atol=0)


def peak_at_construction(from_file: bool, param_dtype=None) -> dict[str, int]:
    """Bytes alive at the worst moment of building, those that stay, and the largest unit's whole."""
    config = GPTConfig(layers=6, width=64, heads=2, vocab=64, seq=16)
    source = {"init_fn": initialize}
    folder = tempfile.TemporaryDirectory()
    if from_file:
        file = os.path.join(folder.name, "weights.pt")
        torch.save(GPT(config, seed=3).state_dict(), file)
        source = {"state_dict": torch.load(file, mmap=True)}
    model = on_meta(lambda: GPT(config))
    with MemoryLedger() as memory:
        engine = parts.ZeRO3(model, ADAMW, group=parts.silent_group(), param_dtype=param_dtype, **source)
    assert memory.live == held_bytes(engine)["parameters"], (memory.live, held_bytes(engine))
    return {
        "peak": memory.peak,
        "held": memory.live,
        "unit": max(4 * sum(bucket.numel for bucket in unit.buckets) for unit in (*engine.units, engine.root)),
        "whole": 4 * sum(param.numel() for param in model.parameters()),
    }


class Buffered(parts.OddModel):
    """Buffers, one of which is not in the state_dict."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(5.0) / 10, persistent=False)

    def forward(self, tokens):
        return super().forward(tokens) + self.table[:3]


def from_a_state_dict() -> None:
    """From another model's weights, memory-mapped; what the file lacks, the buffer, by init_fn."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    source = parts.seeded(Buffered, seed=5)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "weights.pt")
        torch.save(source.state_dict(), file)
        state = torch.load(file, mmap=True)
        model = on_meta(Buffered).double()
        asked = []

        def init_fn(name, tensor):
            asked.append(name)
            tensor.copy_(torch.arange(5.0) / 10)

        engine = parts.ZeRO3(model, ADAMW, state_dict=state, init_fn=init_fn)
        assert asked == ["table"]
        assert torch.equal(state["head.weight"], source.head.weight)  # nothing was written into the file
    parts.assert_same_state(engine.full_state_dict(), source.state_dict(), atol=0)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    _, expected = parts.oracle(source, ADAMW, F.cross_entropy, parts.token_batch, 5, world_size)
    for step in range(5):
        engine.training_step(*parts.token_batch(step, rank), F.cross_entropy)
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)


def only_rank_0s_values_count() -> None:
    """init_fn may draw from a generator that differs between the ranks: all get rank 0's."""
    rank = dist.get_rank()
    engine = parts.ZeRO3(
        on_meta(parts.OddModel), ADAMW, init_fn=lambda name, tensor: tensor.fill_(rank + len(name)), prefetch=0
    )
    for name, value in engine.full_state_dict().items():
        assert (value == len(name)).all()


def partly_on_meta() -> None:
    """Only what is on meta is filled."""
    model = parts.seeded(parts.OddModel, dtype=torch.float32)
    before = model.head.weight.detach().clone()
    model.blocks[1] = on_meta(lambda: parts.OddBlock(5, 9))
    names = []
    engine = parts.ZeRO3(model, ADAMW, init_fn=lambda name, tensor: (names.append(name), tensor.fill_(0.5)))
    assert sorted(names) == sorted(
        f"blocks.1.{name}" for name in ("up.weight", "up.bias", "down.weight", "scale", "pair")
    )
    state = engine.full_state_dict()
    assert torch.equal(state["head.weight"], before) and (state["blocks.1.up.weight"] == 0.5).all()


def refusals() -> list[str]:
    found = []
    for stage in ("zero1", "zero2"):
        model = on_meta(parts.OddModel)
        found.append(message(lambda s=stage, m=model: parts.STAGES[s](m, ADAMW)))
    good = parts.OddModel().state_dict()
    for source in (
        {},
        {"init_fn": "normal"},
        {"state_dict": ["head.weight"]},
        {"state_dict": {name: value for name, value in good.items() if name != "head.bias"}},
        {"state_dict": {**good, "tail.weight": torch.zeros(1)}},
        {"state_dict": {**good, "head.weight": torch.zeros(3, 4)}},
    ):
        found.append(message(lambda s=source: parts.ZeRO3(on_meta(parts.OddModel), ADAMW, **s)))
    found.append(message(lambda: parts.ZeRO3(parts.OddModel(), ADAMW, init_fn=lambda name, tensor: None)))
    model = on_meta(parts.OddModel)
    found.append(message(lambda: parts.ZeRO3(model, ADAMW, init_fn=lambda name, tensor: torch.zeros_like(tensor))))
    # what is wrong on one rank is an error on all
    source = {"init_fn": lambda name, tensor: tensor.zero_()} if dist.get_rank() != 1 else {}
    found.append(message(lambda: parts.ZeRO3(on_meta(parts.OddModel), ADAMW, **source)))
    return found


def on_meta_in_mixed_precision() -> None:
    engine = parts.ZeRO3(
        on_meta(lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))),
        ADAMW,
        init_fn=lambda name, tensor: tensor.fill_(1 + 2**-12),
        param_dtype=torch.bfloat16,
    )
    for value in engine.full_state_dict().values():
        assert value.dtype == torch.float32 and (value == 1 + 2**-12).all()
    engine.training_step(torch.ones(2, 6), torch.ones(2, 3, dtype=torch.bfloat16), F.mse_loss)
