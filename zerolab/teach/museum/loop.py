"""What an exhibit trains: model, data and training step. A visit measures it, and `./launch.sh watch` records it."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.profiler import record_function

from zerolab.engine.gradients import GradScaler
from zerolab.run.data import Batches, load_text
from zerolab.run.model import GPT, GPTConfig, initialize, next_token_loss
from zerolab.teach import written
from zerolab.teach.museum.exhibits import Exhibit

TIMEOUT = 4  # seconds that a collective of the wrong engine may hang; the visitor waits for it
# An odd width, so that no parameter but the embeddings is a multiple of the ranks and there is padding; short
# sequences, so that live bytes are parameters and gradients rather than activations.
SHAPE = GPTConfig(layers=6, width=63, heads=3, seq=8)
OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=3e-3),
    "SGD": partial(torch.optim.SGD, lr=0.05),
}


class Tempered(GPT):
    """A GPT with a learned temperature: a parameter of one element, as many models have one somewhere.

    `around` puts each block into a larger one, with a layer more.
    """

    def __init__(self, config: GPTConfig, seed: int = 0, around: type | None = None):
        super().__init__(config, seed)
        if around is not None:
            self.blocks = nn.ModuleList(around(block, config.width) for block in self.blocks)
        for name, param in self.named_parameters():
            initialize(name, param.data, seed)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        return super().forward(tokens) / self.temperature


class Balanced(nn.Module):
    """A block that keeps a loss beside its output, as the router of a mixture of experts does."""

    def __init__(self, block: nn.Module, width: int):
        super().__init__()
        self.block, self.router = block, nn.Linear(width, 4)

    def forward(self, x):
        x = self.block(x)
        self.loss = torch.softmax(self.router(x), -1).mean((0, 1)).square().sum()  # least where all are used alike
        return x


class Written(nn.Module):
    """A block whose last layer returns a view, which the next block writes to, as `nn.ReLU(inplace=True)` would."""

    def __init__(self, block: nn.Module, width: int):
        super().__init__()
        self.block, self.last = block, nn.Linear(width, width)

    def forward(self, x):
        x += 0.01  # in place, on a view
        return self.last(self.block(x))


# What is around each block; and in exhibits.toml {a field of `Training`: how a visitor hears of it}.
AROUND = {"with a loss that each block keeps": Balanced, "on a model that writes to what its blocks return": Written}
TOLD = written.beside(__file__, "exhibits")["told"]


@dataclass(frozen=True)
class Training:
    """The loop around an engine: steps, backwards per step, clipping, what is frozen, a checkpoint on the way."""

    optimizer: str = "AdamW"
    steps: int = 5
    micro_batches: int = 1
    max_norm: float | None = None
    reload_at: int | None = None  # before that step (from 0) a new engine takes the old one's weights
    resume_at: int | None = None  # before that step the run stops, and goes on from a checkpoint
    frozen: str | None = None  # parameters with this in their name
    model: str | None = None  # one of AROUND
    overflow_at: int | None = None  # in that step a gradient of rank 1 is inf; a loss scaler is there for it

    def __str__(self):
        """All but the number of steps."""
        said = [self.optimizer]
        for name, words in TOLD.items():
            value = getattr(self, name)
            if value not in (None, 1):
                said.append(words.format(value))
        return ", ".join(said)


@functools.cache
def _text():
    return load_text(None, SHAPE.seq)


class Loop:
    """What this rank does of an exhibit: `engine = loop.build()`, then `loop.step(engine, number)` for each step.

    `engine_cls` is the exhibit's right engine or its wrong one. `group` is the ranks' group, in which something may
    hang. `steps` is for how many there is data, by default as many as the exhibit's training has.
    """

    def __init__(self, exhibit: Exhibit, engine_cls: type, rank: int, group=None, steps: int | None = None):
        self.training = training = Training(**exhibit.training)
        small = {} if exhibit.stage == "zero3" else {"bucket_mb": 0.0625}  # some buckets for each block
        self.rank, self._engine_cls, self._options = rank, engine_cls, {**small, **exhibit.options, "group": group}
        draw, count = Batches(_text(), 2, SHAPE.seq, 0), (steps or training.steps) * training.micro_batches
        self._batches = [draw(number, rank) for number in range(count)]  # before anything is counted
        self._overflow, self._scaler = 1.0, None  # what one gradient is multiplied with
        if training.overflow_at is not None:
            self._scaler = getattr(engine_cls, "scaler", GradScaler)("cpu", init_scale=1024.0)

    def build(self, seed: int = 0):
        """The engine over a new model. Every rank starts from other weights: an engine takes rank 0's."""
        training = self.training
        model = Tempered(SHAPE, seed + self.rank, AROUND.get(training.model))
        if training.overflow_at is not None:
            model.temperature.register_hook(lambda gradient: gradient * self._overflow)
        for name, param in model.named_parameters():
            param.requires_grad_(training.frozen is None or training.frozen not in name)
        return self._engine_cls(model, OPTIMIZERS[training.optimizer](model.parameters()), **self._options)

    def step(self, engine, number: int) -> None:
        """Train once; steps are numbered from 0."""
        for _ in self.moments(engine, number):
            pass

    def moments(self, engine, number: int) -> Iterator[tuple[str, float | None]]:
        """Train once, and stop wherever there is something to measure or to tell: (what it is, its number).

        "backward" of each micro-batch has just ended, and has no number; "norms", "losses", "scales" have one.
        """
        training, scaler, losses = self.training, self._scaler, []
        self._overflow = float("inf") if number == training.overflow_at and self.rank == 1 else 1.0
        first = number * training.micro_batches
        for inputs, targets in self._batches[first : first + training.micro_batches]:
            with record_function("step 1 forward"):
                loss = next_token_loss(engine(inputs), targets)
                loss = loss + sum(module.loss for module in engine.model.modules() if isinstance(module, Balanced))
            with record_function("step 2 backward"):
                part = loss / training.micro_batches
                (part if scaler is None else scaler.scale(part)).backward()
            yield "backward", None
            losses.append(loss.item())
        if training.max_norm is not None:
            yield "norms", engine.clip_grad_norm_(training.max_norm).item()
        yield "losses", sum(losses) / len(losses)
        if scaler is None:
            engine.step()
        else:
            scaler.step(engine)
            scaler.update()
            yield "scales", scaler.get_scale()
        engine.zero_grad()
