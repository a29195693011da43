"""Small models of awkward shapes, data that differs per rank, and what plain PyTorch makes of both.

Used by harness/properties, and so by the tests and by `./launch.sh check`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

# Models: awkward sizes for values, large layers for bytes.


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
    """An embedding (whose input needs no gradient), blocks of different sizes, and a head.

    Frozen is a scale outside of the blocks, beside a buffer; or, with `frozen_block`, a layer inside that block.
    """

    def __init__(self, blocks: int = 3, width: int = 5, frozen_block: int | None = None):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(OddBlock(width, 7 + 2 * i) for i in range(blocks))
        self.scaled = frozen_block is None
        if self.scaled:
            self.frozen = nn.Parameter(torch.full((width,), 1.5), requires_grad=False)
            self.register_buffer("shift", torch.linspace(-1, 1, width))
        else:
            self.blocks[frozen_block].up.requires_grad_(False)
        self.head = nn.Linear(width, 3)

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        if self.scaled:
            x = x * self.frozen + self.shift
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


def seeded(build: Callable[[], nn.Module], seed: int = 0, dtype=torch.float64, device=None) -> nn.Module:
    """The same model wherever it is called, without disturbing the rank's own random state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's, where it is built; `manual_seed` sets the GPUs' too
        return build().to(dtype).to(device)


# Data.


def token_batch(step: int, rank: int, batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens (batch, 6) int64, classes (batch,) int64), another for every rank and step."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    tokens = torch.randint(11, (batch, 6), generator=generator)
    return tokens, torch.randint(3, (batch,), generator=generator)


def vector_batch(step: int, rank: int, width: int = 64, dtype=torch.float32, batch: int = 1):
    """(inputs (batch, width), targets (batch, width)), another for every rank and step."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    x = torch.randn(batch, width, generator=generator, dtype=dtype)
    return x, torch.randn(batch, width, generator=generator, dtype=dtype)


def whole(batch_of, step: int, ranks: int | Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The batches of all `ranks` (their numbers, or how many) in one."""
    ranks = range(ranks) if isinstance(ranks, int) else ranks
    return tuple(torch.cat(tensors) for tensors in zip(*(batch_of(step, rank) for rank in ranks)))


# What is right.


def oracle(model: nn.Module, optimizer_cls, loss_fn, batch_of, steps: int, ranks: int | Sequence[int]):
    """One process, plain PyTorch, the whole batch: (losses, state_dict). The last step's gradients stay on `model`."""
    optimizer = optimizer_cls([param for param in model.parameters() if param.requires_grad])
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = whole(batch_of, step, ranks)
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), model.state_dict()
