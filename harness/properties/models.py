"""Models that other people write: what they reuse, tie, freeze, mix and return."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.properties import parts
from harness.run.model import GPT, next_token_loss, preset


class PartlyFrozen(nn.Module):
    """Units that mix frozen and trainable parameters, one of them trained only after its frozen part (LoRA)."""

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(5, 5)
            self.base.requires_grad_(False)
            self.low, self.high = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)

        def forward(self, x):
            return torch.tanh(self.base(x) + self.high(self.low(x)))

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([self.Adapter() for _ in range(3)])
        self.blocks[1].requires_grad_(False)  # a unit with nothing to train, in between
        self.head = nn.Linear(5, 3)

    def forward(self, tokens):
        return self.head(through(self.embedding(tokens).mean(1), self.blocks))


class TwoTypes(nn.Module):
    """Parameters of two dtypes, in the root and in every unit."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.gain = nn.Linear(5, 5), nn.Parameter(torch.ones(5, dtype=torch.float64))

        def forward(self, x):
            return torch.tanh(self.linear(x).double() * self.gain).float()

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(), self.Block()])
        self.gain, self.bias = nn.Parameter(torch.ones(5, dtype=torch.float64)), nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return through(x.float(), self.blocks).double() * self.gain + self.bias


class TiedAcross(nn.Module):
    """An embedding outside the units whose weight is the head's, which lies inside one; 11 rows, uneven."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([parts.OddBlock(5, 7), nn.Sequential(nn.Tanh(), nn.Linear(5, 11, bias=False))])
        self.blocks[1][1].weight = self.embedding.weight

    def forward(self, tokens):
        return through(self.embedding(tokens).mean(1), self.blocks)[:, :3]


class SharedInside(TiedAcross):
    """Two units that hold the same layer, beside others of their own."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh(), shared) for _ in range(2)])


class Nested(nn.Module):
    """Containers in containers, a shared block, a bare parameter beside them: all must be managed by somebody."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(5, 5)
        self.towers = nn.ModuleList(
            [nn.ModuleList([nn.Linear(5, 5), shared]), nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.ReLU()]
        )
        self.by_name = nn.ModuleDict({"a": nn.Linear(5, 5)})
        self.tail = nn.Sequential(shared, nn.Linear(5, 3))
        self.loose = nn.ParameterList([nn.Parameter(torch.ones(5))])

    def forward(self, x):
        for module in (*self.towers[0], self.towers[1], self.towers[2], self.by_name["a"], self.tail):
            x = module(x * self.loose[0])
        return x


class Checkpointed(nn.Module):
    """Activation checkpointing around each unit, inside the units, or around several."""

    class Inside(parts.OddBlock):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    def __init__(self, where: str, use_reentrant: bool = False):
        super().__init__()
        self.where, self.use_reentrant = where, use_reentrant
        self.embedding = nn.Embedding(11, 5)
        kind = self.Inside if where == "inside" else parts.OddBlock
        self.blocks = nn.ModuleList(kind(5, 7 + 2 * i) for i in range(4))
        self.head = nn.Linear(5, 3)

    def forward(self, tokens):
        x, blocks = self.embedding(tokens).mean(1), list(self.blocks)
        if self.where == "inside":
            return self.head(through(x, blocks))
        several = 2 if self.where == "around several" else 1
        for first in range(0, len(blocks), several):
            x = checkpoint(through, x, blocks[first : first + several], use_reentrant=self.use_reentrant)
        return self.head(x)


class Lanes(nn.Module):
    """Units of different sizes, which their bytes tell, or of the same: run in the order of `way`, without `skip`."""

    def __init__(self, sizes=(8, 9, 8, 9)):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, size), nn.Linear(size, 8)) for size in sizes])
        self.way, self.skip = range(len(sizes)), None

    def forward(self, x):
        return through(x, [self.blocks[index] for index in self.way if index != self.skip])


def through(x, blocks):
    for block in blocks:
        x = block(x)
    return x


# A small GPT, its data, which is another for every rank and step, and its loss.


def gpt(dtype: torch.dtype = torch.float32, device: str | None = None, seed: int = 0) -> GPT:
    return parts.seeded(lambda: GPT(preset("toy")), seed, dtype, device)


def byte_batch(step: int, rank: int, device: str | None = None, rows: int = 2):
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    drawn = torch.randint(256, (rows, 17), generator=generator).to(device)
    return drawn[:, :-1], drawn[:, 1:]


def of_bytes(model, inputs, targets) -> torch.Tensor:
    return next_token_loss(model(inputs), targets)
