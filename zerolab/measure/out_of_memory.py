"""Out of memory, in words: in which step and unit, and what the memory was for."""

import contextlib

import torch

from zerolab.measure.held import held_bytes, unit_names, unit_of
from zerolab.measure.memory_parts import PartsLedger
from zerolab.measure.tables import in_words


@contextlib.contextmanager
def explained(what: str, engine, ledger: PartsLedger | None = None):
    """Let torch's OutOfMemoryError inside say more. It is raised again, with one line in front of torch's own words.

    `what` names the training step; `engine` is anything with `model` and `optimizer`, or None while it is built, and
    `ledger` the one that watches it, if one is open: without it the line has what the engine holds, and no place.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(describe(what, engine, ledger, str(error))) from error


def describe(what: str, engine, ledger: PartsLedger | None, said: str) -> str:
    """The line: `what`, where, the bytes that were alive (MB of 10^6 or GB of 10^9), the four largest parts of them."""
    failed = ledger and ledger.failed
    if failed:
        unit = "" if engine is None else unit_of(failed.module, unit_names(engine.model))
        where = f", in step {failed.step}" if failed.step else ""
        where += f" inside step {failed.phase}" if failed.phase != failed.step else ""
        where += f", unit {unit!r}" if unit else ", outside all units"
        parts, live = failed.parts, failed.live
    else:
        where, parts = "", {} if engine is None else held_bytes(engine)
        live = sum(parts.values())
    largest = [f"{part} {in_words(n)}" for part, n in sorted(parts.items(), key=lambda pair: -pair[1])[:4] if n > 0]
    alive = f"{'Alive were' if failed else 'This rank held'} {in_words(live)}: {', '.join(largest) or 'nothing'}."
    reserved = ""
    if torch.accelerator.is_available():
        reserved = f" The allocator had {in_words(torch.accelerator.memory_reserved())} of the GPU."
    return f"out of memory in {what}{where}. {alive}{reserved} {said}"
