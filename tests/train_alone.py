"""Run by torchrun in a folder that has the three chapters and nothing else: they train beside DDP, and end equal.

A GPT-like model with a tied head, a model with odd sizes, a frozen part and a buffer with gaps, and an MLP whose
units have hooks of their own; other data on each rank; two backwards in every second step; an evaluation in between.
"""

import copy
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from zero1 import ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3

WORDS, WIDTH = 31, 16


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        block = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 33), nn.GELU(), nn.Linear(33, WIDTH)]
        self.blocks = nn.ModuleList([nn.Sequential(*copy.deepcopy(block)) for _ in range(3)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).flatten(0, 1)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.last = nn.Linear(5, 1)
        self.register_buffer("shift", torch.tensor([3]))
        self.register_buffer("columns", torch.arange(10.0).view(1, 10)[:, ::2])  # with gaps between its numbers

    def forward(self, x):
        return self.last(torch.tanh(self.frozen(x)) + self.columns) * self.scale + self.shift


class Halved(nn.Linear):
    """Its forward computes with half the weight, which a hook makes right before, as torch's pruning does."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_forward_pre_hook(halve)

    def forward(self, x):
        return F.linear(x, self.halved, self.bias)


def halve(module, inputs):
    module.halved = module.weight / 2


def tokens(generator):
    drawn = torch.randint(WORDS, (2, 6), generator=generator)
    return drawn[:, :-1], drawn[:, 1:].flatten()


def vectors(width, generator):
    return torch.randn(4, width, generator=generator), torch.randn(4, 1, generator=generator)


MODELS = {
    "tied": (Tied, tokens, F.cross_entropy),
    "odd": (Odd, partial(vectors, 7), F.mse_loss),
    "hooked": (
        lambda: nn.Sequential(nn.Linear(10, 33), Halved(33, 33), Halved(33, 1)),
        partial(vectors, 10),
        F.mse_loss,
    ),
}
STAGES = {
    "ZeRO-1": ZeRO1,
    "ZeRO-1, small buckets": partial(ZeRO1, bucket_mb=0.004),
    "ZeRO-2": partial(ZeRO2, bucket_mb=0.004),
    "ZeRO-3": ZeRO3,
    "ZeRO-3, prefetch 0": partial(ZeRO3, prefetch=0),
}


class DDP:
    """torch's own, used as the chapters are."""

    def __init__(self, model, optimizer_cls):
        self.model = nn.parallel.DistributedDataParallel(model)
        self.optimizer = optimizer_cls(model.parameters())
        self.step, self.zero_grad = self.optimizer.step, self.optimizer.zero_grad

    def __call__(self, *inputs):
        return self.model(*inputs)


def losses(build, model, batch, loss_fn) -> list[float]:
    engine = build(model, partial(torch.optim.AdamW, lr=1e-2))
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    found = []
    for step in range(4):
        for _ in range(1 + step % 2):
            inputs, targets = batch(generator)
            loss = loss_fn(engine(inputs), targets)
            loss.backward()
            found.append(loss.item())
        engine.step()
        engine.zero_grad()
        with torch.no_grad():
            engine(inputs)
    return found


def main() -> None:
    here = {path.name for path in Path(__file__).parent.glob("*.py")}
    assert here == {"zero1.py", "zero2.py", "zero3.py", Path(__file__).name}, here
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    for name, (make, batch, loss_fn) in MODELS.items():
        torch.manual_seed(0)
        model = make()
        expected = losses(DDP, copy.deepcopy(model), batch, loss_fn)
        for stage, build in STAGES.items():
            mine = copy.deepcopy(model)
            for tensor in (*mine.parameters(), *mine.buffers()):
                tensor.data += dist.get_rank()  # every rank another start: rank 0's counts
            found = losses(build, mine, batch, loss_fn)
            apart = max(abs(one - other) for one, other in zip(found, expected))
            assert apart < 1e-12, f"{stage} on the model {name}: {apart} from DDP's losses"
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mixed[0].bias.data = mixed[0].bias.data.float()
    try:
        ZeRO3(mixed, partial(torch.optim.AdamW, lr=1e-2))
    except ValueError as error:
        assert "unit '0'" in str(error), error
    else:
        raise AssertionError("a unit of two dtypes was not refused")
    assert not [name for name in sys.modules if name.startswith("zerolab")]
    dist.barrier()
    dist.destroy_process_group()


main()
