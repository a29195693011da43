"""The engines that can be planned: how one rank builds an engine, and how it takes a step."""

from dataclasses import dataclass

import torch

from zerolab.run import engines
from zerolab.run.counterparts import DDPStandIn
from zerolab.run.model import GPT, GPTConfig, next_token_loss
from zerolab.run.recompute import checkpoint_blocks

DDP_BUCKET_MB = 25  # MiB, torch's default


@dataclass(frozen=True)
class Setup:
    """An engine on `ranks` ranks, in bfloat16.

    A step has `accumulate` micro-batches of `micro_batch` sequences. `recompute`: the activations inside the blocks are
    not kept, but computed again in backward. `bucket_mb` (MiB) is for engines with buckets (default: the engine's).
    """

    config: GPTConfig
    engine: str
    ranks: int
    micro_batch: int = 1
    accumulate: int = 1
    recompute: bool = False
    bucket_mb: float | None = None

    @property
    def tokens(self) -> int:
        """The tokens of a rank in a step."""
        return self.micro_batch * self.accumulate * self.config.seq


def build(setup: Setup):
    """The engine with a new model."""
    model = GPT(setup.config)
    if setup.recompute:
        checkpoint_blocks(model, casts=False)
    # fused, as on a GPU: one kernel reads and writes each number once.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if setup.engine == "ddp":
        return DDPStandIn(model, optimizer, setup.bucket_mb or DDP_BUCKET_MB, torch.bfloat16)
    options = {"bucket_mb": setup.bucket_mb} if "bucket_mb" in engines.ENGINES[setup.engine].takes else {}
    return engines.build(setup.engine, model, optimizer, torch.device("cpu"), dtype=torch.bfloat16, **options)


def train(engine, setup: Setup) -> None:
    """One step. DDP and ZeRO-1 send once in a step, and ZeRO-2 and ZeRO-3 in every backward."""
    tokens = torch.zeros(setup.micro_batch, setup.config.seq + 1, dtype=torch.int64)
    for number in range(setup.accumulate):
        if isinstance(engine, DDPStandIn):
            engine.sends = number == setup.accumulate - 1
        next_token_loss(engine(tokens[:, :-1]), tokens[:, 1:]).backward()
    engine.step()
    engine.zero_grad()
