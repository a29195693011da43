"""Ranks as threads of this process: three collectives of torch.distributed on small tensors, with clear errors.

    results = on_threads(4, function)    # function(rank, dist) on every rank

Only what the notebooks' cells need: sums, and no groups. As over gloo, an output is complete after `wait()`.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

SECONDS = 3.0  # a rank waits so long for the others in a collective


class Alone(RuntimeError):
    """Another rank never joined this rank's collective."""


class Work:
    """A collective under way: its output is written in `wait()`."""

    def __init__(self, finish: Callable[[], None]):
        self.finish, self.waited = finish, False

    def wait(self) -> None:
        if not self.waited:
            self.waited = True
            self.finish()


class Collectives:
    """The collectives of one rank. `inputs` has a place for each rank, and `barrier` waits for all of them."""

    def __init__(self, rank: int, inputs: list, barrier: threading.Barrier):
        self.rank, self.inputs, self.barrier = rank, inputs, barrier
        self.calls: list[tuple[str, int]] = []  # (kind, elements of the input), in the order of the calls
        self.works: list[Work] = []

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return len(self.inputs)

    def all_reduce(self, tensor: torch.Tensor, async_op: bool = False) -> Work | None:
        """Sum over the ranks, in place."""
        return self.start("all_reduce", tensor, tensor, sum, async_op)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Work | None:
        """Shard `rank` of the sum of all `input`s into `output`."""

        def own_shard(inputs: list[torch.Tensor]) -> torch.Tensor:
            return sum(inputs).view(self.get_world_size(), -1)[self.rank]

        return self.start("reduce_scatter_single", output, input, own_shard, async_op)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Work | None:
        """All ranks' `input`s, one after the other, into `output`."""
        return self.start("all_gather_single", output, input, torch.cat, async_op)

    def start(self, kind: str, output, input, combine, async_op: bool) -> Work | None:
        for tensor in (input, output):
            there = tensor.untyped_storage().nbytes()
            if there < tensor.nbytes:  # reading or writing it would end the process
                raise RuntimeError(
                    f"{kind}: a tensor of {tensor.nbytes} bytes has a storage of {there} bytes. "
                    "Does resize_() get bytes (numel() * element_size())?"
                )
        call, sent = (kind, input.numel()), input.detach().flatten().clone()
        self.calls.append(call)

        def finish() -> None:
            with torch.no_grad():
                output.copy_(combine(self.exchange(call, sent)).view(output.shape))

        work = Work(finish)
        self.works.append(work)
        return work if async_op else work.wait()

    def exchange(self, call: tuple[str, int], sent: torch.Tensor) -> list[torch.Tensor]:
        """The inputs of all ranks to this call, when all ranks wait for it."""
        self.inputs[self.rank] = call, sent
        try:
            self.barrier.wait(SECONDS)
            inputs = list(self.inputs)
            self.barrier.wait(SECONDS)  # no rank writes its next input before all ranks have read
        except threading.BrokenBarrierError:
            raise Alone(f"rank {self.rank} waits in {call[0]}, and another rank does not") from None
        for rank, (other, _) in enumerate(inputs):
            if other != call:
                one, two = "{} with {} elements".format(*call), "{} with {}".format(*other)
                raise RuntimeError(f"rank {self.rank} calls {one} while rank {rank} calls {two}")
        return [tensor for _, tensor in inputs]


def on_threads(ranks: int, function: Callable) -> list:
    """`function(rank, dist)` on every rank at once; what each returned. Raises the first rank's error."""
    inputs, barrier = [None] * ranks, threading.Barrier(ranks)

    def run(rank: int):
        try:
            return function(rank, Collectives(rank, inputs, barrier))
        except Exception:
            barrier.abort()  # the other ranks need not wait for this one
            raise

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
    errors = [future.exception() for future in futures if future.exception()]
    errors.sort(key=lambda error: isinstance(error, Alone))  # that a rank is alone follows from the other's error
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
