"""Run on every rank: outputs of any form, and checkpointing, reentrant or around the whole model."""

import dataclasses

import parts
import torch
import torch.distributed as dist
from cases_errors import message
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list


class Opaque:
    """An object that neither torch nor dataclasses know."""

    def __init__(self, logits, hidden):
        self.logits, self.hidden = logits, {"all": hidden}
        self.itself = self


class Outputs(parts.OddModel):
    def __init__(self, form: str):
        super().__init__()
        self.form = form

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1) * self.frozen + self.shift
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        logits = self.head(x)
        return {
            "dict": {"logits": logits, "hidden": hidden},
            "dataclass": Output(logits, hidden),
            "tuple": (hidden, logits, None, "text"),
            "object": Opaque(logits, hidden),
        }[self.form]


def logits_of(output):
    if isinstance(output, dict):
        return output["logits"]
    return output[1] if isinstance(output, tuple) else output.logits


def outputs(stage: str, form: str) -> None:
    """Whatever forward returns, of which the loss uses a part; and hidden states beside it every other step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Outputs(form)

        def forward(self, tokens):
            return self.inner(tokens)

    plain = parts.seeded(Both)
    optimizer = parts.DECAY([p for p in plain.parameters() if p.requires_grad])
    engine = parts.STAGES[stage](parts.seeded(Both), parts.DECAY)

    def loss_of(model, tokens, targets, step):
        output = model(tokens)
        loss = F.cross_entropy(logits_of(output), targets)
        if step % 2:
            hidden = output["hidden"] if form == "dict" else output[0] if form == "tuple" else output.hidden
            hidden = hidden["all"] if form == "object" else hidden
            loss = loss + hidden[1].square().mean()
        return loss

    for step in range(6):
        loss_of(plain, *parts.whole(parts.token_batch, step, world_size), step).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(engine, *parts.token_batch(step, rank), step).backward()
        engine.step()
        engine.zero_grad()
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


class Reentrant(nn.Module):
    def __init__(self, use_reentrant: bool, where: str = "unit"):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([parts.OddBlock(5, 7), parts.OddBlock(5, 9)])
        self.head = nn.Linear(5, 3)
        self.use_reentrant, self.where = use_reentrant, where

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x if self.where == "last" else self.head(x)


def reentrant_checkpoint(stage: str) -> list[str]:
    """ZeRO-3 refuses it, around a unit and around the model, and goes on after; ZeRO-1 and -2 do not mind."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    _, expected = parts.oracle(
        parts.seeded(lambda: Reentrant(False)), parts.DECAY, F.cross_entropy, parts.token_batch, 4, world_size
    )
    found = []
    model = parts.seeded(lambda: Reentrant(True))
    engine = parts.STAGES[stage](model, parts.DECAY)
    tokens, targets = parts.token_batch(0, rank)
    if stage == "zero3":
        for _ in range(2):
            loss = F.cross_entropy(engine(tokens), targets)
            found.append(message(loss.backward, RuntimeError))
            engine.zero_grad()
        model.use_reentrant = False
        embedded = torch.zeros((), dtype=torch.float64, requires_grad=True)
        out = checkpoint(lambda t, e: engine(t) + e, tokens, embedded, use_reentrant=True)
        found.append(message(F.cross_entropy(out, targets).backward, RuntimeError))
        engine.zero_grad()
    for step in range(4):
        engine.training_step(*parts.token_batch(step, rank), F.cross_entropy)
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)
    return found


def checkpoint_around_the_model(stage: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    _, expected = parts.oracle(
        parts.seeded(parts.OddModel), parts.DECAY, F.cross_entropy, parts.token_batch, 4, world_size
    )
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), parts.DECAY)
    for step in range(4):
        tokens, targets = parts.token_batch(step, rank)
        F.cross_entropy(checkpoint(engine, tokens, use_reentrant=False), targets).backward()
        engine.step()
        engine.zero_grad()
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)
