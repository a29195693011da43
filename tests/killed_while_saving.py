"""Two ranks load, train a step and save; one kills itself at its n-th act on a file. For every n, and both ranks.

`python killed_while_saving.py FOLDER`. The next two ranks load what is left. They compare its weights with a digest
that was saved beside them, so that a mix of two steps would show. The ranks are forked before torch has any thread.
"""

import contextlib
import hashlib
import multiprocessing
import os
import signal
import sys
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # AdamW would import it in every child
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.nn import functional as F

from harness.engine import checkpoint
from harness.properties import parts

ACTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}


class Acts:
    """Counts this process's acts on files, and kills it at the `last`. Of a file's writes every eighth kB is one."""

    def __init__(self, last: int, folder: str):
        self.left, self.folder, self.on = last, folder, False
        sys.addaudithook(self._event)
        create = FileSystem.create_stream

        @contextlib.contextmanager
        def create_stream(files, path, mode):
            with create(files, path, mode) as stream:
                stream.write = partial(self._write, stream, stream.write)
                yield stream

        FileSystem.create_stream = create_stream

    def _write(self, stream, write, data) -> int:
        before, result = stream.tell(), write(data)
        if before // 8192 != stream.tell() // 8192:
            stream.flush()  # a half of a file is on disk
            self._act()
        return result

    def _event(self, event: str, args) -> None:
        if self.on and event in ACTS and (event in ("os.remove", "os.rmdir") or str(args[0]).startswith(self.folder)):
            self._act()

    def _act(self) -> None:
        if self.on:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def digest(engine) -> str:
    values = b"".join(value.numpy().tobytes() for value in engine.full_state_dict().values())
    moments = [v for state in engine.optimizer.state.values() for v in state.values()]
    everyone = [None, None]
    dist.all_gather_object(everyone, b"".join(value.numpy().tobytes() for value in moments))
    return hashlib.sha256(values + b"".join(everyone)).hexdigest()


def run(rank: int, store: str, folder: str, last: int) -> None:
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", **where, timeout=timedelta(seconds=600))
    model = parts.seeded(partial(parts.Stack, layers=1, width=8))
    engine = parts.ZeRO2(model, partial(torch.optim.AdamW, lr=0.01), bucket_mb=0)
    step = 0
    if checkpoint.complete(folder):
        extra = checkpoint.load(engine, folder)
        assert digest(engine) == extra["digest"]
        step = extra["step"]
    engine.training_step(*parts.vector_batch(step, rank, 8, torch.float64), F.mse_loss)
    values = {"step": step + 1, "digest": digest(engine)}
    acts = Acts(last, folder)
    dist.barrier()
    acts.on = True
    checkpoint.save(engine, folder, keep=2, **values)
    acts.on = False
    dist.barrier()


def attempt(folder: str, who: int, last: int) -> bool:
    """Whether rank `who` was killed at act `last`. If not, both ranks must have come to their end."""
    with tempfile.TemporaryDirectory() as place:
        lasts = [last if rank == who else 0 for rank in (0, 1)]
        orders = [(rank, f"{place}/store", folder, of_rank) for rank, of_rank in enumerate(lasts)]
        ranks = [multiprocessing.get_context("fork").Process(target=run, args=order) for order in orders]
        for rank in ranks:
            rank.start()
        ranks[who].join()
        if killed := ranks[who].exitcode == -signal.SIGKILL:
            ranks[1 - who].kill()
        ranks[1 - who].join()
    assert killed or [rank.exitcode for rank in ranks] == [0, 0], (who, last)
    return killed


def main() -> None:
    folder = str(Path(sys.argv[1]).resolve())
    for _ in range(2):
        assert not attempt(folder, 0, 0)
    newest = 2
    for who in (0, 1):
        last = 1
        while attempt(folder, who, last):
            found = int(checkpoint.complete(folder)[-1].name)
            assert found in (newest, newest + 1), (found, newest)
            newest, last = found, last + 1
        newest = int(checkpoint.complete(folder)[-1].name)
        print(f"rank {who}: {last - 1} kills, newest {newest}")
    left = sorted(os.listdir(folder))
    assert len(left) == 2 and not any("partial" in name for name in left), left


if __name__ == "__main__":
    main()
