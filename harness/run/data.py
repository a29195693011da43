"""Real text as bytes, without a download: the sources of the Python that is running, or a file."""

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist

from harness.engine import accelerator

DEFAULT_BYTES = 4 * 2**20  # enough that no batch of a short run repeats
SHORTER = "take a longer --data or a preset with a shorter sequence"


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
        raise ValueError(f"{need}: {SHORTER}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


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


def hold_out(text: torch.Tensor, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(text to train on, the last twentieth of the text, of which no byte is trained on).

    Raises ValueError if one of them has no whole sequence of `seq` bytes with its targets.
    """
    cut = len(text) - max(len(text) // 20, seq + 1)
    if cut <= seq:
        need = f"{seq + 1} are held out, and sequences of {seq} need as many again"
        raise ValueError(f"a text of {len(text)} bytes is too short: {need}: {SHORTER}")
    return text[:cut], text[cut:]


def _cut(text: torch.Tensor, starts: list[int], seq: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), both (len(starts), seq) int64; targets are the inputs moved by one byte."""
    rows = torch.stack([text[start : start + seq + 1] for start in starts]).long()
    return rows[:, :-1].to(device), rows[:, 1:].to(device)


class Sequences:
    """A text as an endless row of sequences: number 0, 1, 2 and so on, the same on every rank.

    An epoch is all of the text's sequences, in an order of its own. So one number, of the next sequence, is the
    position in the data, on however many ranks. `sequences(range(8, 12))` returns (inputs, targets) of four.
    """

    def __init__(self, text: torch.Tensor, seq: int, seed: int = 0, device="cpu"):
        self.text, self.seq, self.seed, self.device = text, seq, seed, device
        self.per_epoch = (len(text) - 1) // seq
        self._epoch, self._order = None, None

    def __call__(self, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
        return _cut(self.text, [self._start(number) for number in numbers], self.seq, self.device)

    def _start(self, number: int) -> int:
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(hash((self.seed, epoch)) % 2**63)
            self._epoch, self._order = epoch, torch.randperm(self.per_epoch, generator=generator)
        return int(self._order[place]) * self.seq


class Batches:
    """Batch number `step` of rank `rank`, as (inputs, targets): the same for every engine, another for every rank."""

    def __init__(self, text: torch.Tensor, batch: int, seq: int, seed: int, device="cpu"):
        self.text, self.batch, self.seq, self.seed, self.device = text, batch, seq, seed, device

    def __call__(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        # One generator per (seed, step, rank): any rank can make any other's batch, which is how
        # the single process of the referee gets the whole batch.
        generator = torch.Generator().manual_seed(hash((self.seed, step, rank)) % 2**63)
        starts = torch.randint(len(self.text) - self.seq, (self.batch,), generator=generator)
        return _cut(self.text, starts.tolist(), self.seq, self.device)

    def whole(self, step: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All ranks' batches of this step as one of (world_size * batch, seq)."""
        return tuple(torch.cat(parts) for parts in zip(*(self(step, rank) for rank in range(world_size))))
