"""Real text as bytes, without a download: the sources of the Python that is running, or a file."""

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist

from zerolab.engine import accelerator

DEFAULT_BYTES = 4 * 2**20  # enough that no batch of a short run repeats


def load_text(path: str | None, seq: int) -> torch.Tensor:
    """The corpus as a 1-D uint8 tensor, long enough for one sequence of `seq` bytes and its targets.

    By default the top-level modules of the standard library, in alphabetical order, so that it is
    the same on every rank (of one Python version). Raises ValueError naming a file that is too
    short to cut a batch from, and OSError for one that cannot be read.
    """
    if path is None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[:DEFAULT_BYTES]
    else:
        text = Path(path).read_bytes()
    if len(text) <= seq:
        need = f"{path or 'the standard library'} holds {len(text)} bytes; sequences of {seq} need at least {seq + 1}"
        raise ValueError(f"{need}: use a longer file for --data, or a preset with shorter sequences")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def split(text: torch.Tensor, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the text to train on, the last tenth to evaluate on), both long enough for a sequence. Raises ValueError."""
    held_out = max(len(text) // 10, seq + 1)
    if len(text) - held_out <= seq:
        need = f"{2 * (seq + 1)} bytes, to train and to evaluate on sequences of {seq}"
        raise ValueError(
            f"the text has {len(text)} bytes, and a training run needs {need}: use a longer file for --data"
        )
    return text[:-held_out], text[-held_out:]


def while_all_have(batches, group=None):
    """Yield this rank's `batches` as long as every rank of `group` has another one.

    Ranks with unequal numbers of batches would wait for each other in the step that only some make. Here all stop
    together, and what the longer ones still have is left out. One all-reduce of a byte per batch, which the host
    waits for.
    """
    iterator = iter(batches)
    device = accelerator.device_of(group)
    while True:
        batch = next(iterator, None)
        have = torch.tensor([batch is not None], dtype=torch.uint8, device=device)
        dist.all_reduce(have, op=dist.ReduceOp.MIN, group=group)
        if not have.item():
            return
        yield batch


class Batches:
    """Batch number `step` of rank `rank`, as (inputs, targets): the same for every engine, another for every rank.

    Both are (batch, seq) int64; targets are the inputs moved by one byte.
    """

    def __init__(self, text: torch.Tensor, batch: int, seq: int, seed: int, device="cpu"):
        self.text, self.batch, self.seq, self.seed, self.device = text, batch, seq, seed, device

    def __call__(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        # One generator per (seed, step, rank): any rank can make any other's batch, which is how
        # the single process of the referee gets the whole batch.
        generator = torch.Generator().manual_seed(hash((self.seed, step, rank)) % 2**63)
        starts = torch.randint(len(self.text) - self.seq, (self.batch,), generator=generator)
        rows = torch.stack([self.text[start : start + self.seq + 1] for start in starts.tolist()]).long()
        return rows[:, :-1].to(self.device), rows[:, 1:].to(self.device)

    def part(self, step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rank `rank`'s part of one batch that all ranks share."""
        inputs, targets = self(step, 0)
        start, end = (len(inputs) * each // world_size for each in (rank, rank + 1))
        return inputs[start:end], targets[start:end]

    def whole(self, step: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All ranks' batches of this step as one of (world_size * batch, seq)."""
        return tuple(torch.cat(parts) for parts in zip(*(self(step, rank) for rank in range(world_size))))
