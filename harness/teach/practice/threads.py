"""Ranks as threads of one process: the collectives of torch.distributed on small tensors, at once and with good errors.

    results = run(4, lambda rank, dist: ...)

Only what the exercises of the notebooks need: sums, no groups. As over gloo, the output is there after `wait()`.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

SECONDS = 3.0  # until a rank that nobody joins gives up


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

    def __init__(self, rank: int, everyone: list, changed: threading.Condition):
        self.rank, self._everyone, self._changed = rank, everyone, changed
        self.over = False  # this rank has finished or failed: nobody needs to wait for it
        self.calls, self._inputs, self.works = [], [], []  # the n-th call of each rank is one collective
        self.filled: list[int] = []  # addresses of the storages that collectives were to write to

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return len(self._everyone)

    def all_reduce(self, tensor: torch.Tensor, async_op: bool = False) -> Work | None:
        """Sum over the ranks, in place."""
        return self._start("all_reduce", tensor, tensor, sum, async_op)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Work | None:
        """Shard `rank` of the sum of all `input`s into `output`."""
        if output.numel() * self.get_world_size() != input.numel():
            raise ValueError(f"reduce_scatter_single: the output must have 1/{self.get_world_size()} of the input's "
                             f"{input.numel()} elements, it has {output.numel()}")  # fmt: skip
        own = slice(self.rank * output.numel(), (self.rank + 1) * output.numel())
        return self._start("reduce_scatter_single", output, input, lambda all_: sum(all_)[own], async_op)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Work | None:
        """All ranks' `input`s, one after the other, into `output`."""
        if input.numel() * self.get_world_size() != output.numel():
            raise ValueError(f"all_gather_single: the output must have {self.get_world_size()} times the input's "
                             f"{input.numel()} elements, it has {output.numel()}")  # fmt: skip
        return self._start("all_gather_single", output, input, torch.cat, async_op)

    def _start(self, kind: str, output, input, result, async_op: bool) -> Work | None:
        for name, tensor in (("input", input), ("output", output)):  # torch would end the process here
            there, needed = tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
            if there == 0 < needed:
                raise RuntimeError(f"{kind}: its {name} has no memory (its storage has 0 bytes)")
            if there < needed:
                units = "Does resize_() get bytes (numel() * element_size())?"
                raise RuntimeError(f"{kind}: its {name} needs {needed} bytes, its storage has {there}. {units}")
        number = len(self.calls)
        with self._changed:
            self.calls.append((kind, input.numel()))
            self._inputs.append(input.detach().flatten().clone())
            self._changed.notify_all()
        self.filled.append(output.untyped_storage()._cdata)

        def finish() -> None:
            inputs = self._collect(number)
            if output.untyped_storage().nbytes() < output.numel() * output.element_size():
                raise RuntimeError(f"{kind}: its output was freed before wait()")
            with torch.no_grad():
                output.copy_(result(inputs).reshape(output.shape))

        self.works.append(Work(finish))
        return self.works[-1] if async_op else self.works[-1].wait()

    def _collect(self, number: int) -> list[torch.Tensor]:
        """All ranks' inputs. Raises RuntimeError when somebody does not come, or calls another collective."""

        def late() -> list[Collectives]:
            return [other for other in self._everyone if len(other._inputs) <= number]

        with self._changed:
            self._changed.wait_for(lambda: not late() or any(other.over for other in late()), SECONDS)
            missing = late()
        kind, numel = self.calls[number]
        if missing:
            raise RuntimeError(f"rank {self.rank} waits in {kind}, and rank {missing[0].rank} never calls it")
        for other in self._everyone:
            if other.calls[number] != (kind, numel):
                theirs = "{} with {}".format(*other.calls[number])
                raise RuntimeError(
                    f"rank {self.rank} calls {kind} with {numel} elements while rank {other.rank} calls {theirs}"
                )
        return [other._inputs[number] for other in self._everyone]


def run(ranks: int, function: Callable) -> list:
    """`function(rank, dist)` on every rank at once; what each returned. Raises the first rank's error."""
    everyone, changed = [], threading.Condition()
    everyone += [Collectives(rank, everyone, changed) for rank in range(ranks)]

    def one(own: Collectives):
        try:
            return function(own.rank, own)
        finally:
            with changed:
                own.over = True
                changed.notify_all()

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(one, own) for own in everyone]
    # Who waited for a rank that had failed says the less interesting thing.
    errors = sorted((f.exception() for f in futures if f.exception()), key=lambda error: "never calls it" in str(error))
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
