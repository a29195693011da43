"""One training step, watched: what the rank holds right before the update, its peak, and what it sends.

    with MemoryLedger() as memory:
        engine = build()
        train(engine), train(engine)
        with watched_step(engine, memory) as seen:
            train(engine)
    print(seen.held, seen.peak, seen.sent_bytes)

The steps before it are needed: AdamW allocates its state in the first one, and DDP rebuilds its buckets in the second.
"""

import contextlib

import torch

from zerolab.measure.held import held_bytes
from zerolab.measure.ledger import MemoryLedger, warm_up
from zerolab.measure.traffic import TrafficLedger


class Seen(TrafficLedger):
    """Measurements of one step on this rank: `collectives` (also during the step) and bytes.

    `held` has {"parameters", "gradients", "optimizer"} right before the update, with all gradients, as in the articles'
    tables. It is empty until then. When the step has ended, `peak` is the ledger's peak, or on a GPU the allocator's,
    `ledger_peak` always the ledger's, and `reserved` what the allocator has reserved, fragments included.
    """

    def __init__(self):
        super().__init__()
        self.held: dict[str, int] = {}
        self.peak = self.ledger_peak = self.reserved = 0


class Allocator:
    """A GPU's caching allocator, minus what was allocated when this is made: before an engine is built."""

    def __init__(self, device: torch.device):
        warm_up(device)
        torch.accelerator.empty_cache()  # what it reserved for an earlier engine
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
    """The allocator from now on; None on a CPU."""
    return None if device.type == "cpu" else Allocator(device)


@contextlib.contextmanager
def watched_step(engine, memory: MemoryLedger, allocator: Allocator | None = None):
    """Around one training step of `engine`, inside the open ledger `memory`. Yields a `Seen`, and fills it in.

    `allocator` was made before the engine was built.
    """
    memory.start_step(engine)
    if allocator:
        allocator.reset_peak()
    meter = allocator or memory
    with Seen() as seen:
        handle = engine.optimizer.register_step_pre_hook(lambda *_: seen.held.update(held_bytes(engine)))
        try:
            yield seen
        finally:
            handle.remove()
    if not seen.held:  # the engine does not call its optimizer's step
        seen.held.update(held_bytes(engine))
    seen.peak, seen.ledger_peak, seen.reserved = meter.peak, memory.peak, meter.reserved
