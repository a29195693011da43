"""One training step, watched: what the rank holds right before the update, its peak, and what it sends.

    with MemoryLedger() as memory:
        engine = build()
        train(engine), train(engine)
        with watched_step(engine, memory) as seen:
            train(engine)
    print(seen.held, seen.peak, seen.sent_bytes)

The steps before it are no luxury: AdamW makes its state in the first one, DDP its buckets anew in the second.
"""

import contextlib

import torch

from zerolab.measure.held import held_bytes
from zerolab.measure.ledger import MemoryLedger, warm_up
from zerolab.measure.traffic import TrafficLedger


class Seen(TrafficLedger):
    """What was seen of one step on this rank: its `collectives`, also while the step goes on, and bytes.

    `held` is empty until the update begins: {"parameters", "gradients", "optimizer"} right before it, with all
    gradients, as the articles' tables count. `peak` is the ledger's, or on a GPU the allocator's; `ledger_peak` is
    always the ledger's. `reserved` is what the allocator has taken from the GPU, fragments included. These three are
    there when the step is over.
    """

    def __init__(self, story=None):
        super().__init__(story)
        self.held: dict[str, int] = {}
        self.peak = self.ledger_peak = self.reserved = 0


class Allocator:
    """A GPU's caching allocator, less what it has given out when this is made: before an engine is built."""

    def __init__(self, device: torch.device):
        warm_up(device)
        torch.accelerator.empty_cache()  # what it has reserved for the engine before is not this one's
        self._allocated = torch.accelerator.memory_allocated()
        self._reserved = torch.accelerator.memory_reserved()

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats()

    @property
    def peak(self) -> int:
        return torch.accelerator.max_memory_allocated() - self._allocated

    @property
    def reserved(self) -> int:
        return torch.accelerator.max_memory_reserved() - self._reserved


def allocator_of(device: torch.device) -> Allocator | None:
    """The allocator from now on; None on a CPU, which has none to ask."""
    return None if device.type == "cpu" else Allocator(device)


@contextlib.contextmanager
def watched_step(engine, memory: MemoryLedger, allocator: Allocator | None = None, story=None):
    """Around one training step of `engine`, inside the open ledger `memory`. Yields the `Seen` that it fills in.

    `allocator` was made before the engine was built; `story` is the traffic ledger's.
    """
    memory.begin(engine)
    meter = allocator or memory
    memory.reset_peak()
    meter.reset_peak()
    with Seen(story) as seen:
        handle = engine.optimizer.register_step_pre_hook(lambda *_: seen.held.update(held_bytes(engine)))
        try:
            yield seen
        finally:
            handle.remove()
    if not seen.held:  # an engine that does not step its optimizer
        seen.held.update(held_bytes(engine))
    seen.peak, seen.ledger_peak, seen.reserved = meter.peak, memory.peak, meter.reserved
