"""Ranks that are started once per world size and then sent many cases: starting them is what costs time."""

import importlib
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

TIMEOUT = 60  # seconds for a collective


class CaseFailed(AssertionError):
    """A case failed on some rank; the message is that rank's traceback."""


def _serve(rank: int, world_size: int, store: str, pipe) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT)
    )
    while (order := pipe.recv()) is not None:
        module, name, arguments = order
        try:
            torch.manual_seed(1000 + rank)  # every rank seeded otherwise, on purpose
            answer = (True, getattr(importlib.import_module(module), name)(**arguments))
        except BaseException:
            answer = (False, f"rank {rank} of {world_size}: {traceback.format_exc()}")
        pipe.send(answer)
    dist.barrier()  # leaving one by one can abort
    dist.destroy_process_group()


class Pool:
    """`Pool(3).run(case, **arguments)` calls a module-level function on three ranks and returns their results."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self._start()

    def _start(self) -> None:
        # spawn: after a fork, gloo's threads hang
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes, self._ranks = [], []
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, store, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._ranks.append(process)

    def run(self, case, **arguments) -> list:
        for pipe in self._pipes:
            pipe.send((case.__module__, case.__name__, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answers.append(pipe.recv() if pipe.poll(2 * TIMEOUT) else (False, f"rank {rank} does not answer"))
            except EOFError:
                answers.append((False, f"rank {rank} died"))
        failures = [text for right, text in answers if not right]
        if failures:
            self.kill()  # the others may be waiting in a collective; the next case gets new ranks
            self._start()
            raise CaseFailed("\n".join(failures))
        return [value for _, value in answers]

    def kill(self) -> None:
        for process in self._ranks:
            process.kill()
            process.join()
        self._folder.cleanup()

    def let_go(self) -> None:
        """Tell the ranks to leave; `close` waits for them."""
        for pipe in self._pipes:
            pipe.send(None)

    def close(self) -> None:
        for process in self._ranks:
            process.join(30)
        self.kill()
