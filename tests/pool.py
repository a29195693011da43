"""Ranks that are started once per world size and then sent many cases: starting them is what costs time."""

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import tempfile
import traceback
from datetime import timedelta

from zerolab.run.parent import end_with_parent

TIMEOUT = 60  # seconds for a collective

# What every rank imports. torch takes a second and a half of it; the first optimizer imports torch._dynamo, a second
# more; and the compiler another one. Files of tests import pytest.
IMPORTED_ONCE = ["torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint",
                 "torch.distributed.optim", "torch.distributed.pipelining", "pytest"]  # fmt: skip


class CaseFailed(AssertionError):
    """A case failed on some rank; the message is that rank's traceback."""


def forking():
    """The context of processes that are forked from one that only imports, and has no thread.

    A fork of this one would not do: gloo's threads hang after it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    return context


def _destroy_what_the_last_case_made() -> None:
    """Every group of gloo has threads that wake up a hundred times a second: hundreds of them are a core's work.

    Groups with a description stay: those of meshes, whose names torch keeps for other meshes of the same shape
    (`fixtures.mesh` makes each shape once), and what `check` makes for all exercises. So do those that their ranks made
    among themselves (`use_local_synchronization`): torch would give the next one the same name, and it would look for
    its ranks where the old one's were. Torch numbers the others.
    """
    import torch.distributed as dist

    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc == "undefined" and group.group_name.isdigit():
            dist.destroy_process_group(group)


def _serve(rank: int, world_size: int, store: str, pipe, backend: str, device: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the test run ends this one
    end_with_parent(signal.SIGKILL)  # the server, which ends with the process that has started it
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS is not deterministic
    gc.freeze()  # what was imported is no garbage: a collection, of which the tests make many, need not look at it
    gc.set_threshold(7000)  # and a tenth as many of them
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # conftest.py has set it, if nobody else has
    own = None
    if device == "cuda":
        own = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(own)
        torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT),
        device_id=own if backend == "nccl" else None,
    )  # fmt: skip
    while (order := pipe.recv()) is not None:
        _destroy_what_the_last_case_made()  # by now it has ended on all ranks
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
    """`Pool(3).run(case, **arguments)` calls a module-level function on three ranks and returns their results.

    With `device="cuda"` each rank has taken a GPU; they share one where there are fewer than ranks.
    """

    def __init__(self, world_size: int, backend: str = "gloo", device: str = "cpu"):
        self.world_size, self.backend, self.device = world_size, backend, device
        self._start()

    def _start(self) -> None:
        # CUDA does not outlive a fork.
        context = multiprocessing.get_context("spawn") if self.device == "cuda" else forking()
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes, self._ranks = [], []
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world_size, store, theirs, self.backend, self.device)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._ranks.append(process)

    def run(self, case, /, **arguments) -> list:
        for pipe in self._pipes:
            pipe.send((case.__module__, case.__name__, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answers.append(pipe.recv() if pipe.poll(2 * TIMEOUT) else (False, f"rank {rank} does not answer"))
            except EOFError:
                answers.append((False, f"rank {rank} died"))
            except KeyboardInterrupt:  # it may be in a collective, and would not leave by itself
                self.kill()
                raise
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
            with contextlib.suppress(BrokenPipeError):  # it was killed
                pipe.send(None)

    def close(self) -> None:
        for process in self._ranks:
            process.join(30)
        self.kill()
