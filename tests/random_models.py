"""Random models: a few layers in a row, each with something unusual about it.

A `Model` is a description that can be printed and made smaller. `Network(model)` is the module. It takes a batch of
`make_batch` and returns (samples, 3); `loss_of(network, batch)` adds the losses that layers keep as attributes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORDS, LENGTH, WIDTH = 11, 4, 6


@dataclass(frozen=True)
class Part:
    """The description of a layer.

    kind        a name in LAYERS
    frozen      "": trained. "first": its first parameter is frozen. "whole": all are
    recomputed  "": no activation checkpoint. "whole": one around the layer. "inside": one inside of its forward
    returns     what forward returns: "tensor", "dictionary" or "dataclass"
    side_loss   "": none. "kept": the layer keeps a loss as an attribute. "recomputed": and computes it in a checkpoint
    calls       how often it runs in a forward
    skipped     whether batches with an odd number do not use it
    """

    kind: str = "linear"
    frozen: str = ""
    recomputed: str = ""
    returns: str = "tensor"
    side_loss: str = ""
    calls: int = 1
    skipped: bool = False


@dataclass(frozen=True)
class Model:
    """The description of a network.

    tied             whether the head has the embedding's weight
    recomputed_head  whether the head, which belongs to the root, is in a checkpoint
    frozen_start     whether the embedding is frozen, so that the first layer's inputs need no gradient
    in_pairs         whether the first two layers share a checkpoint
    """

    parts: tuple[Part, ...] = ()
    tied: bool = False
    recomputed_head: bool = False
    frozen_start: bool = False
    in_pairs: bool = False


class MultiLayer(nn.Module):
    """Two linear layers and a scalar."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        h = self.norm(x)
        return x + self.attention(h, h, h, need_weights=False)[0]


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return x + torch.relu_(self.convolution(x.transpose(1, 2))).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return x + self.cell(x)[0]


class Turned(nn.Module):
    """A complex parameter, an empty one, and one that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, WIDTH))
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH).t())

    def forward(self, x):
        y = x * self.turn  # both parts are used, so that a lost imaginary part is noticed
        return x + torch.tanh(F.linear(y.real + y.imag.square(), self.mix) + self.empty.sum())


class Experts(nn.Module):
    """Two experts. The batch decides which one is used, so it may differ between ranks."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        return x + torch.tanh(self.experts[int(x.detach().sum() > 0)](x))


class Product(torch.autograd.Function):
    """A function that saves a weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).T @ x.flatten(0, 1)


class Computed(nn.Module):
    """Weights that are computed from other weights, and a custom function."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = torch.tanh(F.linear(x, self.a.weight * self.b.weight, self.a.bias))
        return x + F.linear(Product.apply(h, self.b.weight[1:]), self.b.weight[1:].T, self.b.bias)


LAYERS = {
    "linear": MultiLayer,
    "attention": Attention,
    "convolution": Convolution,
    "recurrent": Recurrent,
    "turned": Turned,
    "experts": Experts,
    "computed": Computed,
}


@dataclass
class Answer:
    hidden: torch.Tensor
    note: Any = None


class Layer(nn.Module):
    """A layer as its `Part` describes it."""

    def __init__(self, part):
        super().__init__()
        self.part = part
        self.layer = LAYERS[part.kind]()
        self.loss = 0.0
        if part.side_loss:
            self.side = nn.Linear(WIDTH, 2)
        params = list(self.parameters())
        for param in params[: {"": 0, "first": 1, "whole": len(params)}[part.frozen]]:
            param.requires_grad_(False)

    def forward(self, x):
        part = self.part
        h = checkpoint(self.layer, x, use_reentrant=False) if part.recomputed == "inside" else self.layer(x)
        if part.side_loss == "recomputed":
            self.loss = checkpoint(self.make_loss, h, use_reentrant=False)
        elif part.side_loss:
            self.loss = self.make_loss(h)
        if part.returns == "dictionary":
            return {"hidden": h}
        if part.returns == "dataclass":
            return Answer(h)
        return h

    def make_loss(self, h):
        return self.side(h).square().mean()


class Network(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.description = model
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(part) for part in model.parts)
        self.head = nn.Linear(WIDTH, WORDS)
        if model.tied:
            self.head.weight = self.embedding.weight
        if model.frozen_start:
            self.embedding.requires_grad_(False)

    def forward(self, tokens, shift, number):
        x = self.embedding(tokens) + shift
        layers = list(self.layers)
        if self.description.in_pairs:
            x = checkpoint(self.run, layers[:2], x, number, use_reentrant=False)
            layers = layers[2:]
        x = self.run(layers, x, number)
        if self.description.recomputed_head:
            return checkpoint(self.head, x.mean(1), use_reentrant=False)[:, :3]
        return self.head(x.mean(1))[:, :3]

    def run(self, layers, x, number):
        for layer in layers:
            layer.loss = 0.0
            for _ in range(layer.part.calls):
                if layer.part.skipped and number % 2:
                    continue
                recompute = layer.part.recomputed == "whole"
                out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
                if isinstance(out, dict):
                    out = out["hidden"]
                x = out.hidden if isinstance(out, Answer) else out
        return x


def make_network(model, seed=0, device="cpu"):
    """The same network on every rank, in float64. `model.frozen_start` and frozen parts have `requires_grad=False`."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        network = Network(model)
    for param in network.parameters():
        param.data = param.data.to(torch.complex128 if param.is_complex() else torch.float64)
    return network


def make_batch(number, rank):
    """(tokens, shift, targets) of a rank, whose size also differs between ranks."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    size = 1 + (number + rank) % 3
    tokens = torch.randint(WORDS, (size, LENGTH), generator=generator)
    shift = torch.randn(size, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return tokens, shift, torch.randn(size, 3, generator=generator, dtype=torch.float64)


def output_of(network, number, rank, shift=None):
    """`network` is a network or an engine. The masks of dropout depend on the batch only."""
    tokens, own_shift, _ = make_batch(number, rank)
    torch.manual_seed(1000 * number + rank)
    return network(tokens, own_shift if shift is None else shift, number).double()


def loss_of(network, number, rank, shift=None):
    loss = F.mse_loss(output_of(network, number, rank, shift), make_batch(number, rank)[2])
    layers = getattr(network, "model", network).layers
    return loss + 0.1 * sum(layer.loss for layer in layers)
