"""The steps of real engines, watched."""

import time
import types
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2_compare as referee
from harness.measure import step_time, timeline
from harness.run.model import GPTConfig

DELAY = 0.12  # seconds
KINDS = {
    "ddp": {"all-reduce"},
    "zero1": {"all-reduce", "all-gather"},
    "zero_redundancy_optimizer": {"all-reduce", "broadcast"},
    "zero2": {"reduce-scatter", "all-gather"},
    "fsdp2_no_reshard": {"reduce-scatter", "all-gather"},
    "zero3": {"reduce-scatter", "all-gather"},
    "fsdp2": {"reduce-scatter", "all-gather"},
    "fsdp1": {"reduce-scatter", "all-gather"},
}


def built(name: str):
    """(engine, its batch) of a GPT that takes no time."""
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    engine = referee.build(name, referee.GPT(GPTConfig(2, 16, 2, vocab=32, seq=8)), adamw, torch.device("cpu"))
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
    return engine, (tokens[:, :-1], tokens[:, 1:], referee.next_token_loss)


def watched(name: str, delay: float, **more) -> dict:
    engine, batch = built(name)
    for _ in range(2):  # in the second one DDP makes its buckets anew
        engine.training_step(*batch)

    def train():
        if dist.get_rank() == 1:
            time.sleep(delay)
        engine.training_step(*batch)

    return step_time.summary(step_time.watch(train, 3, engine, **more))


def a_slow_rank(delay: float) -> dict[str, dict]:
    return {name: watched(name, delay) for name in KINDS}


def exposed_and_overlapped() -> None:
    """Against the union of all intervals in which a collective moved bytes, and the time that nobody waited in them."""
    for name in ("ddp", "zero1", "zero3"):
        engine, batch = built(name)
        engine.training_step(*batch)
        dist.barrier()
        with timeline.Timeline(engine) as line:
            line.mark()
            engine.training_step(*batch)
            line.mark()
        issued = [None] * dist.get_world_size()
        dist.all_gather_object(issued, [(span.ranks, span.start + line.opened) for span in line.collectives])
        last = [moment - line.opened for moment in step_time.last_issues(issued, dist.get_rank())]
        begin, end = line.marks
        found = step_time.divide(begin, end, line.operations, [], line.waits, line.collectives, last)
        together = sum(found["exposed"].values()) + sum(found["overlapped"].values())
        moving = [(max(start, span.start), span.end) for start, span in zip(last, line.collectives)]
        waiting = [(wait.start, min(wait.end, last[wait.collective])) for wait in line.waits]
        # In thousands of a step's moments: does something move, and does this rank wait for the other one?
        moments = [begin + (end - begin) * (number + 0.5) / 4000 for number in range(4000)]
        share = sum(
            any(a <= moment < b for a, b in moving) and not any(a <= moment < b for a, b in waiting)
            for moment in moments
        )
        expected = (end - begin) * share / 4000
        assert abs(together - expected) < 0.02 * (end - begin), (name, together, expected, found)
        assert line.collectives and all(span.ranks == (0, 1) for span in line.collectives)


def offsets(ahead: float) -> tuple[float, float]:
    rank = dist.get_rank()
    return step_time.clock_offset(f"machine {rank}", lambda: time.perf_counter() + ahead * rank)


def offsets_of_one_machine() -> tuple[float, float]:
    return step_time.clock_offset()


def shifted_clocks(ahead: float, delay: float) -> dict:
    """As if the ranks were on machines whose clocks differ by `ahead` seconds."""
    shift, plain = ahead * dist.get_rank(), timeline.time
    timeline.time = types.SimpleNamespace(perf_counter=lambda: plain.perf_counter() + shift)
    try:
        return watched("zero1", delay, offset=shift)
    finally:
        timeline.time = plain


def trained(name: str, *options: str) -> dict:
    options = referee.arguments(["--preset", "toy", "--steps", "3", "--batch", "4", *options])
    me = referee.Rank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", "")
    text = torch.arange(5000).remainder(251).to(torch.uint8)
    return referee.Referee(options, text, me).train(name)


def trained_in_parts() -> dict[str, tuple[dict, ...]]:
    ways = ((), ("--accumulate", "2"), ("--checkpoint-activations",))
    return {name: tuple(trained(name, *way) for way in ways) for name in ("ddp", "zero1", "zero3")}


class Full(TorchDispatchMode):
    """A device on which the `nth` call of an operation that `of` picks finds no memory."""

    def __init__(self, of, nth: int):
        super().__init__()
        self.of, self.left = of, nth

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.of(func._schema.name):
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("Tried to allocate too much.")
        return func(*args, **(kwargs or {}))


def out_of_memory() -> list[str]:
    said = []

    def fails(steps: str = "3") -> None:
        try:
            trained("zero3", "--steps", steps)
        except torch.OutOfMemoryError as error:
            said.append(str(error))

    blocks = 2
    with Full(lambda name: name == "aten::gelu", blocks + 2):  # the second block's in the second step
        fails()
    plain = torch.UntypedStorage.resize_
    left = 5 + 2  # a step gathers the root and two blocks in forward, and the blocks in backward

    def resize_(storage, size):
        nonlocal left
        left -= size > 0
        if left == 0 and size > 0:
            raise torch.OutOfMemoryError("Tried to allocate too much.")
        return plain(storage, size)

    torch.UntypedStorage.resize_ = resize_
    try:
        fails()
    finally:
        torch.UntypedStorage.resize_ = plain
    loss, calls = F.cross_entropy, []

    def cross_entropy(*args):
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("Tried to allocate too much.")
        return loss(*args)

    F.cross_entropy = cross_entropy  # after the ledger's three steps
    try:
        fails("5")
    finally:
        F.cross_entropy = loss
    return said
