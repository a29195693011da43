"""Small models of awkward shapes, and data that differs between ranks and steps.

Every model has `batch(step, rank)` and `loss(outputs, targets)`.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Sizes that no N from 2 to 4 divides, a scalar, and a parameter of two elements."""

    def __init__(self, hidden: int):
        super().__init__()
        self.up = nn.Linear(5, hidden)
        self.down = nn.Linear(hidden, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.pair = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(x))) + self.pair.sum()


class OfTokens(nn.Module):
    """The data of a model that is given tokens."""

    loss = staticmethod(F.cross_entropy)

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tokens(step, rank)


class OfVectors(nn.Module):
    """The data of a model that is given `rows` vectors of `width`."""

    width, rows = 8, 8

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs, targets)

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return vectors(step, rank, self.width, self.rows, next(self.parameters()).dtype)


class Odd(OfTokens):
    """An embedding, blocks of different sizes, of which one has a frozen layer, and a head.

    In ZeRO-3 the root's `scale` is the last weight that backward reads, when all units are done.
    """

    def __init__(self, blocks: int = 3):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.scale = nn.Parameter(torch.full((5,), 1.1))
        self.blocks = nn.ModuleList(Block(7 + 2 * index) for index in range(blocks))
        self.blocks[1].up.requires_grad_(False)
        self.head = nn.Linear(5, 3)

    def embed(self, tokens):
        return self.scale * self.embedding(tokens).mean(1)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Checkpointed(Odd):
    """Activation checkpointing around each unit."""

    several = 1

    def __init__(self):
        super().__init__(blocks=4)

    def part(self, x, first):
        for block in self.blocks[first : first + self.several]:
            x = block(x)
        return x

    def forward(self, tokens):
        x = self.embed(tokens)
        for first in range(0, 4, self.several):
            x = checkpoint(self.part, x, first, use_reentrant=False)
        return self.head(x)


class TwoCheckpointed(Checkpointed):
    """Activation checkpointing around two units at a time."""

    several = 2


class Lanes(OfVectors):
    """Equal units that run in the order of `way`, without the one in `skip`.

    Because they are equal, buckets that are mixed up are added without an error.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(4)])
        self.way, self.skip = [0, 1, 2, 3], None

    def forward(self, x):
        for index in self.way:
            if index != self.skip:
                x = self.blocks[index](x)
        return x


class Stack(OfVectors):
    """Wide layers and hardly any activations, so that live bytes are parameters and gradients."""

    width, rows = 48, 1

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class OneWeight(OfVectors):
    """A bucket so small that all ranks but the first own only padding."""

    width, rows = 2, 1

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 1, bias=False))

    def forward(self, x):
        return self.layers(x)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.square().sum()


class UnevenBlocks(nn.Sequential):
    """Blocks of unequal size: the one in the middle has eight layers, the six others have one."""

    loss = staticmethod(F.mse_loss)

    def __init__(self):
        super().__init__(*[Linears(layers, 16) for layers in (1, 1, 1, 8, 1, 1, 1)])

    def batch(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = vectors(step, rank, 16, 64)
        return inputs.requires_grad_(), targets  # else torch warns of the hooks with which `measure` looks at backward


class Linears(nn.Sequential):
    """Equal square matrices and nothing else."""

    def __init__(self, layers: int, width: int):
        super().__init__(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def seeded(make, seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model that `make()` returns, with the weights of this seed. Leaves the rank's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(dtype)


def _generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000 * step + rank)


def tokens(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of shape (4, 6) and 4 classes, different for every rank and step."""
    generator = _generator(step, rank)
    inputs = torch.randint(11, (4, 6), generator=generator)
    return inputs, torch.randint(3, (4,), generator=generator)


def vectors(step: int, rank: int, width: int, rows: int = 1, dtype: torch.dtype = torch.float64):
    """Inputs and targets of shape (rows, width), different for every rank and step."""
    generator = _generator(step, rank)
    inputs = torch.randn(rows, width, generator=generator, dtype=dtype)
    return inputs, torch.randn(rows, width, generator=generator, dtype=dtype)
