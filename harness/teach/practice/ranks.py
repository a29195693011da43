"""Ranks as threads of one process: the collectives of torch.distributed on small tensors, at once and with good errors.

    results = run(4, lambda rank, dist: ...)

Only what the exercises of the notebooks need: sums, no groups. As over gloo, the output is there after `wait()`.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

SECONDS = 3.0  # until a rank that nobody joins gives up


class _Meeting:
    """Where the ranks meet: the n-th collective of each is one collective."""

    def __init__(self, ranks: int):
        self.ranks, self.rounds, self.changed = ranks, {}, threading.Condition()
        self.gone: set[int] = set()  # ranks that have finished or failed: nobody needs to wait for them

    def post(self, number: int, rank: int, kind: str, tensor: torch.Tensor) -> None:
        with self.changed:
            self.rounds.setdefault(number, {})[rank] = (kind, tensor.detach().clone())
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()

    def collect(self, number: int, rank: int) -> list[torch.Tensor]:
        """All ranks' tensors. Raises RuntimeError when somebody does not come, or calls another collective."""
        with self.changed:
            found = self.rounds[number]
            everyone = set(range(self.ranks))
            self.changed.wait_for(lambda: len(found) == self.ranks or self.gone - set(found), SECONDS)
            missing = sorted(everyone - set(found))
            if missing:
                raise RuntimeError(f"rank {rank} waits in {found[rank][0]}, and rank {missing[0]} never calls it")
        for other, (kind, tensor) in sorted(found.items()):
            if (kind, tensor.shape) != (found[rank][0], found[rank][1].shape):
                raise RuntimeError(
                    f"rank {rank} calls {found[rank][0]} with {found[rank][1].numel()} elements while "
                    f"rank {other} calls {kind} with {tensor.numel()}"
                )
        return [found[other][1] for other in range(self.ranks)]


class Work:
    """A collective under way: its output is written in `wait()`."""

    def __init__(self, finish: Callable[[], None]):
        self._finish, self.waited = finish, False

    def wait(self) -> None:
        if not self.waited:
            self.waited = True
            self._finish()
            self._finish = None  # as torch's, it lets go of the tensors then


class Collectives:
    """What one rank calls: `all_reduce`, `reduce_scatter_single` and `all_gather_single`, as in torch.distributed."""

    def __init__(self, meeting: _Meeting, rank: int):
        self._meeting, self.rank, self.calls, self.works = meeting, rank, [], []
        self.filled: list[int] = []  # addresses of the storages that collectives were to write to

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return self._meeting.ranks

    def all_reduce(self, tensor: torch.Tensor, async_op: bool = False) -> Work | None:
        """Sum over the ranks, in place."""
        return self._start("all_reduce", tensor, tensor, lambda all_: sum(all_[1:], all_[0]), async_op)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Work | None:
        """Shard `rank` of the sum of all `input`s into `output`."""
        if output.numel() * self.get_world_size() != input.numel():
            raise ValueError(f"reduce_scatter_single: the output must have 1/{self.get_world_size()} of the input's "
                             f"{input.numel()} elements, it has {output.numel()}")  # fmt: skip
        own = slice(self.rank * output.numel(), (self.rank + 1) * output.numel())
        return self._start("reduce_scatter_single", output, input, lambda all_: sum(all_[1:], all_[0])[own], async_op)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Work | None:
        """All ranks' `input`s, one after the other, into `output`."""
        if input.numel() * self.get_world_size() != output.numel():
            raise ValueError(f"all_gather_single: the output must have {self.get_world_size()} times the input's "
                             f"{input.numel()} elements, it has {output.numel()}")  # fmt: skip
        return self._start("all_gather_single", output, input, torch.cat, async_op)

    def _start(self, kind: str, output, input, result, async_op: bool) -> Work | None:
        for name, tensor in (("input", input), ("output", output)):
            # torch would end the process here.
            there, needed = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
            if there < needed:
                raise RuntimeError(
                    f"{kind}: its {name} has no memory (its storage has 0 bytes)"
                    if there == 0
                    else f"{kind}: its {name} needs {needed} bytes, its storage has {there}. Does resize_() get bytes "
                    "(numel() * element_size())?"
                )
        number = len(self.calls)
        self.calls.append((kind, input.numel()))
        self.filled.append(output.untyped_storage()._cdata)
        self._meeting.post(number, self.rank, kind, input.reshape(-1))

        def finish() -> None:
            everyone = self._meeting.collect(number, self.rank)
            if output.untyped_storage().nbytes() < output.numel() * output.element_size():
                raise RuntimeError(f"{kind}: its output was freed before wait()")
            with torch.no_grad():
                output.copy_(result(everyone).reshape(output.shape))

        work = Work(finish)
        self.works.append(work)
        if async_op:
            return work
        work.wait()
        return None


def run(ranks: int, function: Callable) -> list:
    """`function(rank, dist)` on every rank at once; what each returned. Raises the first rank's error."""
    meeting = _Meeting(ranks)

    def one(rank: int):
        try:
            return function(rank, Collectives(meeting, rank))
        finally:
            meeting.leave(rank)

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(one, rank) for rank in range(ranks)]
        errors = [(rank, error) for rank, error in enumerate(f.exception() for f in futures) if error]
    # Who waited for a rank that had failed says the less interesting thing.
    errors.sort(key=lambda pair: "never calls it" in str(pair[1]))
    if errors:
        raise errors[0][1]
    return [future.result() for future in futures]
