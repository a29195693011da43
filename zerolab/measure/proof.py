"""Does an engine compute what one process computes? Tested in float64, where the order of a sum hardly matters.

Float32 losses cannot answer this. On three ranks or more, or with micro-batches, correct engines add the same numbers
in different orders, and their losses differ by 1e-6 to 1e-5. AdamW divides each gradient by its own size, so it hides a
gradient that is twice as large as it should be. Training without weight decay changes the loss by less than 1e-3.

Here a small GPT of the same architecture takes a few steps of SGD with momentum and weight decay. A different order of
a sum changes these losses by less than 1e-13. A learning rate that is off by 1e-5, one bias that no rank updates, or a
reduction in float32 changes them by more than 1e-9.
"""

import gc
from dataclasses import replace

import torch

from zerolab.run import micro_batches, process_group
from zerolab.run.data import Batches
from zerolab.run.engines import ENGINES, build
from zerolab.run.model import GPT, GPTConfig, next_token_loss
from zerolab.run.process_group import World
from zerolab.run.recompute import checkpoint_blocks

STEPS = 4  # the third loss is the first that momentum has changed
TOLERANCE = 1e-12  # nats; seen on 2 to 4 ranks: correct engines 2e-15, wrong ones 1e-9 and more
BATCH = 2  # sequences in each micro-batch of a rank
SHAPE = {"layers": 3, "width": 96, "heads": 4, "vocab": 256, "seq": 16}  # 2.9 MB in float64: more than one bucket


class Proof:
    """The pass over one engine after the other: `difference(name)`.

    `config` is the architecture of the model that is compared, whatever its size; the rest is as in that comparison.
    """

    def __init__(self, config: GPTConfig, text: torch.Tensor, accumulate: int, recomputed: bool, world: World):
        self.config = replace(config, **SHAPE, kv_heads=None, ffn=None)
        self.accumulate, self.recomputed, self.world = accumulate, recomputed, world
        self.batches = Batches(text, BATCH * accumulate, self.config.seq, 0, world.device)
        self.expected = self._one_process()

    def difference(self, name: str, as_engine: bool = False) -> float:
        """The largest difference between the losses of the engine `name` and of one process. A collective.

        Every rank compares the loss of its part of the batch, in every step.
        `as_engine` asks for a stage's engine where the chapter would be built.
        """
        model, optimizer = self._model()
        if self.recomputed:
            checkpoint_blocks(model, casts=False)
        options = {"engine": True} if as_engine and "engine" in ENGINES[name].takes else {}
        engine = build(name, model, optimizer, self.world.device, **options)
        differences = []
        for step, expected in enumerate(self.expected):
            batch = self.batches(step, self.world.rank)
            loss = micro_batches.training_step(engine, *batch, next_token_loss, self.accumulate)
            differences.append(abs(loss.item() - expected))
        del engine, model, optimizer
        gc.collect()
        return torch.tensor(process_group.gathered(differences)).max().item()  # which keeps a NaN

    def _model(self) -> tuple[GPT, torch.optim.Optimizer]:
        model = GPT(self.config).to(self.world.device, torch.float64)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def _one_process(self) -> list[float]:
        """The loss of this rank's part of the batch before every step, by plain torch on the batches of all ranks.

        Every rank computes all of it, so nothing is sent.
        """
        model, optimizer = self._model()
        losses = []
        for step in range(STEPS):
            inputs, targets = self.batches(step, self.world.rank)
            with torch.no_grad():
                losses.append(next_token_loss(model(inputs), targets).item())
            inputs, targets = self.batches.whole(step, self.world.world_size)
            next_token_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses
