"""What the cases share: models of awkward shapes, data that differs per rank, oracles and an impostor."""

import copy
import importlib
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zero1 import ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3

STAGES = {"zero1": ZeRO1, "zero2": ZeRO2, "zero3": ZeRO3}

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "maximize": partial(torch.optim.AdamW, lr=0.01, maximize=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.001, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
}


class OddBlock(nn.Module):
    """Sizes that no N from 2 to 4 divides, a scalar, and a parameter of two elements."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.pair = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(x))) + self.pair.sum()


class OddModel(nn.Module):
    """An embedding (whose input needs no gradient), blocks of different sizes, a frozen scale and a buffer."""

    def __init__(self, blocks: int = 3, width: int = 5):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(OddBlock(width, 7 + 2 * i) for i in range(blocks))
        self.frozen = nn.Parameter(torch.full((width,), 1.5), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-1, 1, width))
        self.head = nn.Linear(width, 3)

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1) * self.frozen + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Twice(nn.Module):
    """A block that runs twice in one forward, and a weight that embedding and head share."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([OddBlock(5, 7), OddBlock(5, 9)])
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = block(x)
        return self.head(x)[:, :3]


class Stack(nn.Module):
    """Wide layers and hardly any activations, so that live bytes are parameters and gradients."""

    def __init__(self, layers: int = 8, width: int = 64, reverse: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.reverse = reverse  # use the last layer first: gradients then finish in the opposite order

    def forward(self, x):
        for layer in reversed(self.layers) if self.reverse else self.layers:
            x = layer(x)
        return x


def seeded(build, seed: int = 0, dtype=torch.float64) -> nn.Module:
    """The same model wherever it is called, without disturbing the rank's own random state."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().to(dtype)


def token_batch(step: int, rank: int, batch: int = 4):
    """(tokens (batch, 6) int64, classes (batch,) int64), another for every rank and step."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    tokens = torch.randint(11, (batch, 6), generator=generator)
    return tokens, torch.randint(3, (batch,), generator=generator)


def vector_batch(step: int, rank: int, width: int = 64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    x = torch.randn(1, width, generator=generator, dtype=dtype)
    return x, torch.randn(1, width, generator=generator, dtype=dtype)


def whole(batch_of, step: int, world_size: int):
    parts = [batch_of(step, rank) for rank in range(world_size)]
    return tuple(torch.cat(tensors) for tensors in zip(*parts))


def oracle(model: nn.Module, optimizer_cls, loss_fn, batch_of, steps: int, world_size: int):
    """One process, plain PyTorch, the whole batch: (losses, state_dict)."""
    optimizer = optimizer_cls([param for param in model.parameters() if param.requires_grad])
    losses = []
    for step in range(steps):
        inputs, targets = whole(batch_of, step, world_size)
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), model.state_dict()


def assert_same_state(state: dict, expected: dict, atol: float) -> None:
    assert list(state) == list(expected), (list(state), list(expected))
    for name in expected:
        assert state[name].device.type == "cpu" and state[name].shape == expected[name].shape, name
        torch.testing.assert_close(state[name], expected[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


class DDPInDisguise:
    """Right losses and nothing sharded: plain AdamW under DDP, behind an engine's face."""

    def __init__(self, model, optimizer_cls, **options):
        self.model = model
        self.ddp = DistributedDataParallel(model)
        self.optimizer = optimizer_cls([param for param in model.parameters() if param.requires_grad])

    def __call__(self, *args, **kwargs):
        return self.ddp(*args, **kwargs)

    def training_step(self, inputs, targets, loss_fn):
        loss = loss_fn(self(inputs), targets)
        loss.backward()
        self.step()
        self.zero_grad()
        return loss.detach()

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

    def full_state_dict(self):
        return copy.deepcopy(self.model.state_dict())


def engine_class(name: str):
    return DDPInDisguise if name == "impostor" else STAGES[name]


def build_engine(stage: str, model: nn.Module, optimizer_cls, options: dict):
    """The stage over `model`; options travel to the ranks by name, so a unit that is the model itself is named."""
    if options.get("units") == ["the whole model"]:
        options = {**options, "units": [model]}
    return STAGES[stage](model, optimizer_cls, **options)


def silent_group():
    """A process group whose collectives move nothing and take no memory.

    Gloo works on a copy of a reduce-scatter's input and lets go of buffers from a thread of its own, a moment
    after `wait()`: for the exact bytes of what an engine itself keeps alive, it is left out.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    return dist.new_group(backend="fake")


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()
