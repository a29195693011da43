"""Models that other people write: what they reuse, tie, freeze, mix and return."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.properties import parts
from harness.properties.training import EXACT, of_output
from harness.run.model import GPT, next_token_loss, preset


@dataclass(frozen=True)
class Model:
    """How a model is built, what its loss is, and which data it takes."""

    build: Callable[[], nn.Module]
    loss: Callable = of_output
    batch: Callable = parts.token_batch
    dtype: torch.dtype | None = torch.float64
    atol: float = EXACT


def vectors(step: int, rank: int):
    return parts.vector_batch(step, rank, 5, torch.float64)


class Keywords(nn.Module):
    """Units that take keyword arguments and return tuples, dictionaries and dataclasses."""

    class Unit(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.linear, self.kind = nn.Linear(5, 5), kind

        def forward(self, *, x):
            x = torch.tanh(self.linear(x))
            return {"tuple": (x, None), "dict": {"x": x}, "dataclass": Answer(x, {})}[self.kind]

    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList([self.Unit("tuple"), self.Unit("dict"), self.Unit("dataclass")])

    def forward(self, batch, scale=1.0):
        x = self.units[0](x=batch["x"])[0]
        x = self.units[1](x=x)["x"]
        x = self.units[2](x=x).logits
        return Answer(x * scale, {"unused": x.exp()})


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    hidden: object


class Opaque:
    """An object that neither torch nor dataclasses know."""

    def __init__(self, logits, hidden):
        self.logits, self.hidden = logits, {"all": hidden}
        self.itself = self


class Outputs(parts.OddModel):
    """Returns logits and hidden states in some form; the loss uses the first, and one of the others."""

    def __init__(self, form: str):
        super().__init__()
        self.form = form

    def forward(self, tokens):
        x, hidden = self.embedding(tokens).mean(1) * self.frozen + self.shift, []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        logits = self.head(x)
        return {
            "dict": {"logits": logits, "hidden": hidden},
            "dataclass": Answer(logits, hidden),
            "tuple": (hidden, logits, None, "text"),
            "object": Opaque(logits, hidden),
        }[self.form]


def of_any_output(model, tokens, targets):
    output = model(tokens)
    if isinstance(output, dict):
        logits, hidden = output["logits"], output["hidden"]
    elif isinstance(output, tuple):
        hidden, logits, *_ = output
    else:
        logits, hidden = output.logits, output.hidden
    hidden = hidden["all"] if isinstance(hidden, dict) else hidden
    return F.cross_entropy(logits, targets) + (tokens[0, 0] % 2) * hidden[1].square().mean()


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
        x = self.embedding(tokens).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


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
        for block in self.blocks:
            x = block(x)
        return x.double() * self.gain + self.bias


class TiedAcross(nn.Module):
    """An embedding outside the units whose weight is the head's, which lies inside one; 11 rows, uneven."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([parts.OddBlock(5, 7), nn.Sequential(nn.Tanh(), nn.Linear(5, 11, bias=False))])
        self.blocks[1][1].weight = self.embedding.weight

    def forward(self, tokens):
        return self.blocks[1](self.blocks[0](self.embedding(tokens).mean(1)))[:, :3]


class SharedInside(nn.Module):
    """Two units that hold the same layer, beside others of their own."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(5, 5)
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh(), shared) for _ in range(2)])

    def forward(self, tokens):
        return self.blocks[1](self.blocks[0](self.embedding(tokens).mean(1)))[:, :3]


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
        x = self.embedding(tokens).mean(1)
        for first in range(0, 4, 2) if self.where == "around several" else ():

            def run(x, first=first):
                return self.blocks[first + 1](self.blocks[first](x))

            x = checkpoint(run, x, use_reentrant=False)
        for block in self.blocks if self.where != "around several" else ():
            x = checkpoint(block, x, use_reentrant=self.use_reentrant) if self.where == "around" else block(x)
        return self.head(x)


class Skipping(nn.Module):
    """Units of different sizes or of the same, of which one may be skipped."""

    def __init__(self, sizes=(8, 9, 8, 9)):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, size), nn.Linear(size, 8)) for size in sizes])
        self.skip = None

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            if index != self.skip:
                x = block(x)
        return x


MODELS = {
    "a block twice, and tied": Model(parts.Twice),
    "keywords and dataclasses": Model(Keywords, lambda model, x, _: model({"x": x}, scale=2.0).logits.square().mean(),
                                      vectors),
    "partly frozen": Model(PartlyFrozen),
    # Float32 layers beside float64 gains: as exact as float32 is.
    "two dtypes": Model(TwoTypes, lambda model, x, _: model(x.float()).square().mean(), vectors, None, 1e-6),
    "tied across units": Model(TiedAcross),
    "shared inside units": Model(SharedInside),
    **{f"returns {form}": Model(lambda form=form: Outputs(form), of_any_output)
       for form in ("dict", "dataclass", "tuple", "object")},
}  # fmt: skip


# A small GPT, its data, which is another for every rank and step, and its loss.


def gpt(dtype: torch.dtype = torch.float32, device: str | None = None, seed: int = 0) -> GPT:
    return parts.seeded(lambda: GPT(preset("toy")), seed, dtype, device)


def byte_batch(step: int, rank: int, device: str | None = None):
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    rows = torch.randint(256, (2, 17), generator=generator).to(device)
    return rows[:, :-1], rows[:, 1:]


def of_bytes(model, inputs, targets) -> torch.Tensor:
    return next_token_loss(model(inputs), targets)
