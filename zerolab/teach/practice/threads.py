"""Ranks as threads of one process: the collectives of torch.distributed on small tensors, at once and with good errors.

    results = on_threads(4, lambda rank, dist: ...)

Only what the exercises of the notebooks need: sums, no groups. As over gloo, the output is there after `wait()`.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

SECONDS = 3.0  # until a rank that nobody joins gives up
NOBODY = "never calls it"


class Work:
    """A collective under way: its output is written in `wait()`."""

    def __init__(self, finish: Callable[[], None]):
        self._finish, self.waited = finish, False

    def wait(self) -> None:
        if not self.waited:
            self.waited = True
            self._finish()
            self._finish = None  # as torch's, it lets go of the tensors then


def require_memory(kind: str, name: str, tensor: torch.Tensor) -> None:
    """Raise RuntimeError if the storage is too small for `tensor`: torch would end the process there."""
    there = tensor.untyped_storage().nbytes()
    if there < tensor.nbytes:
        raise RuntimeError(
            f"{kind}: its {name} needs {tensor.nbytes} bytes, and its storage has {there} bytes. "
            "Does resize_() get bytes (numel() * element_size())?"
        )


class Collectives:
    """The collectives that a rank calls, three of torch.distributed: all-reduce, reduce-scatter and all-gather."""

    def __init__(self, rank: int, all_ranks: list):
        self.rank, self._ranks = rank, all_ranks
        self.calls, self.works = [], []  # the n-th call of each rank is one collective
        self.filled: list[int] = []  # addresses of the storages that collectives were to write to
        self._inputs = {}  # number of the call -> Future of ((kind, elements), the tensor)

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return len(self._ranks)

    def _input(self, number: int) -> Future:
        """This rank's input to its call `number`, once it has made that call. The first thread that asks creates it."""
        return self._inputs.setdefault(number, Future())

    def all_reduce(self, tensor: torch.Tensor, async_op: bool = False) -> Work | None:
        """Sum over the ranks, in place."""
        return self._start("all_reduce", tensor, tensor, sum, async_op)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Work | None:
        """Shard `rank` of the sum of all `input`s into `output`."""

        def own_shard(inputs: list[torch.Tensor]) -> torch.Tensor:
            return sum(inputs).view(self.get_world_size(), -1)[self.rank]

        return self._start("reduce_scatter_single", output, input, own_shard, async_op)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Work | None:
        """All ranks' `input`s, one after the other, into `output`."""
        return self._start("all_gather_single", output, input, torch.cat, async_op)

    # Their names before torch 2.13.
    reduce_scatter_tensor, all_gather_into_tensor = reduce_scatter_single, all_gather_single

    def _start(self, kind: str, output, input, result, async_op: bool) -> Work | None:
        require_memory(kind, "input", input)
        require_memory(kind, "output", output)
        number, call = len(self.calls), (kind, input.numel())
        self.calls.append(call)
        self._input(number).set_result((call, input.detach().flatten().clone()))
        self.filled.append(output.untyped_storage()._cdata)

        def finish() -> None:
            made = result(self._collect(number))
            require_memory(kind, "output, at wait(),", output)
            if made.numel() != output.numel():
                raise ValueError(f"{kind}: the output has {output.numel()} elements, and the result {made.numel()}")
            with torch.no_grad():
                output.copy_(made.view(output.shape))

        self.works.append(Work(finish))
        return self.works[-1] if async_op else self.works[-1].wait()

    def _collect(self, number: int) -> list[torch.Tensor]:
        """All ranks' inputs. Raises RuntimeError when somebody does not come, or calls another collective."""
        kind, numel = self.calls[number]
        inputs = []
        for other in self._ranks:
            try:
                call, tensor = other._input(number).result(SECONDS)
            except TimeoutError:
                raise RuntimeError(f"rank {self.rank} waits in {kind}, and rank {other.rank} {NOBODY}") from None
            if call != self.calls[number]:
                theirs = "{} with {}".format(*call)
                raise RuntimeError(
                    f"rank {self.rank} calls {kind} with {numel} elements while rank {other.rank} calls {theirs}"
                )
            inputs.append(tensor)
        return inputs


def on_threads(ranks: int, function: Callable) -> list:
    """`function(rank, dist)` on every rank at once; what each returned. Raises the first rank's error."""
    all_ranks = []
    all_ranks += [Collectives(rank, all_ranks) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(function, own.rank, own) for own in all_ranks]
    # An error about waiting for another rank is a consequence: the other error comes first.
    errors = sorted((f.exception() for f in futures if f.exception()), key=lambda error: NOBODY in str(error))
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
