"""Whether all ranks come to the same collectives in the same order.

A collective is matched with the other ranks' by its turn alone. If one rank skips a unit, its next all-gather meets
another unit's: at best the sizes differ and the process is aborted, at worst they are equal and the weights
wrong. So whoever comes to something else than in the step before compares notes with the other ranks first.
"""

import hashlib

import torch
import torch.distributed as dist

from harness.engine import groups
from harness.engine.all_or_none import alone
from harness.engine.safety.waiting import waiting_for


class Sequence:
    """The collectives of one forward and its backward, checked against those of the one before.

    As long as every step goes like the last one, nothing is sent. Where this rank's differs (in the first step
    everything does) a number is exchanged in a group of its own, which cannot be mistaken for anything else: ranks
    that differ alike go on, ranks that came to something else get an error that names both, and a
    rank that nobody joins gets the timeout's.
    """

    def __init__(self, group):
        self._control = None if alone(group) else groups.beside(group, "gloo")
        self._known: dict = {}  # kind of step -> its events when it was last run
        self._kind, self._events = None, []

    def begin(self, kind) -> None:
        """Another forward begins, of a `kind` of its own: with gradients or without, under `no_sync` or not."""
        if len(self._events) < len(self._known.get(self._kind, [])):
            self._compare(("next forward", ""), len(self._events))  # the last time something came before it
        self._known[self._kind] = self._events
        self._kind, self._events = kind, []

    def next(self, collective: str, unit) -> None:
        """This rank comes to the `collective` of `unit`. Raises RuntimeError if others come to something else."""
        known, event = self._known.get(self._kind, ()), (collective, unit.name)
        position = len(self._events)
        self._events.append(event)
        if position >= len(known) or known[position] != event:
            self._compare(event, position)

    def _compare(self, event: tuple[str, str], position: int) -> None:
        if self._control is None:
            return
        known, event = self._known.get(self._kind, ()), _told(event)
        before = f" (the last time it was {_told(known[position])})" if position < len(known) else ""
        # 7 bytes of its SHA-256 stand for it in the collective, positive as an int64.
        digest = int.from_bytes(hashlib.sha256(event.encode()).digest()[:7], "big")
        mine = torch.tensor([digest], device="cpu")
        everyone = torch.empty(dist.get_world_size(self._control), dtype=torch.int64, device="cpu")
        with waiting_for(f"the others to come to {event}{before}"):
            dist.all_gather_single(everyone, mine, group=self._control)
            if (everyone == mine).all():
                return
            events = [None] * len(everyone)
            dist.all_gather_object(events, event, group=self._control)
        where = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(events))
        raise RuntimeError(
            f"the ranks come to different collectives ({where}): every rank must run the same units in the same order. "
            "Let no branch depend on a rank's own data, or run the unit and multiply its output by 0"
        )


def _told(event: tuple[str, str]) -> str:
    collective, unit = event
    return f"the {collective} of unit {unit!r}" if unit else f"the {collective}"
