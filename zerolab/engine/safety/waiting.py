"""Ranks meet in collectives: what a rank waits for there, and whether all come to the same ones in the same order.

An error says what this rank waited for, and so does a wait that takes long. torch lets a rank wait for half an hour, in
silence. Here a thread looks once a second for how long this rank's other threads have waited. After a few seconds it
leaves a note in the store through which the ranks have met, so that each can tell who has come. A step costs that
nothing: it writes down what it waits for, and when it began.
"""

import contextlib
import os
import sys
import threading
import time

import torch.distributed as dist

from zerolab.engine import groups

MAX_NAMES = 5  # in an error message
NOTICE = 30.0  # seconds after which a rank says what it waits for


def name_some(names: list[str]) -> str:
    """The first few names, quoted, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:MAX_NAMES])
    return shown + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")


def not_alike(missing: list[str], unexpected: list[str]) -> str:
    """What a message says of names that a state lacks, or has too many."""
    return f"missing {name_some(missing) or 'nothing'}; unexpected {name_some(unexpected) or 'nothing'}"


class NamedWork:
    """A collective of `bucket` in flight. An error of its `wait` says what this rank has waited for."""

    def __init__(self, work, collective: str, bucket, group=None):
        self._work, self._group = work, group or bucket.group
        self._what = f"the {collective} of {bucket.label}"

    def wait(self) -> None:
        """On a CPU the host waits, on CUDA the stream."""
        with waiting_for(self._what, self._group):
            self._work.wait()


class waiting_for:
    """`with waiting_for(what, group):` an error of a collective inside says what this rank waited for."""

    def __init__(self, what: str, group=None):
        self.what, self.group = what, group
        self.since = time.monotonic()
        self.noted, self.told = False, False  # whether the store has a note of it, and whether it was said

    def __enter__(self):
        if not _watching.is_set():
            _watching.set()
            threading.Thread(target=_watch, name="waiting", daemon=True).start()
        _waits[threading.get_ident()] = self

    def __exit__(self, kind, error, traceback):
        _waits.pop(threading.get_ident(), None)
        if isinstance(error, RuntimeError):
            raise RuntimeError(
                f"rank {dist.get_rank()} waited in vain for {self.what}: some rank has died, hangs, or went another "
                f"way (a branch or a unit that not all ranks run). {error}"
            ) from error
        if self.noted:
            _store().delete_key(_key(dist.get_rank()))

    def look(self) -> None:
        """In the thread that watches."""
        waited = time.monotonic() - self.since
        if not self.noted and waited > NOTICE / 6:
            self.noted = True
            _store().set(_key(dist.get_rank()), self.what)
        if not self.told and waited > NOTICE:
            self.told = True
            print(f"[rank {dist.get_rank()}] {self._said()}", file=sys.stderr, flush=True)

    def _said(self) -> str:
        come, others = [], []
        for rank in dist.get_process_group_ranks(self.group):
            note = _store().get(_key(rank)).decode() if _store().check([_key(rank)]) else None
            if note == self.what:
                come.append(rank)
            else:
                others.append(f"rank {rank} waits for {note}" if note else f"rank {rank} has not come")
        return (
            f"has waited {NOTICE:.0f} seconds for {self.what}. Ranks that have come: {come}; {'; '.join(others)}. Who "
            "has not come computes, hangs, or makes other calls: all ranks must make the same calls and take equally "
            "many batches. Ctrl-C ends all ranks; else an error comes after the timeout of init_process_group()"
        )


_waits: dict[int, waiting_for] = {}  # number of a thread -> what it waits for
_watching = threading.Event()
os.register_at_fork(after_in_child=_watching.clear)  # a child has no such thread yet


def _watch() -> None:
    while True:
        time.sleep(NOTICE / 30)
        for each in list(_waits.values()):
            with contextlib.suppress(Exception):  # the process group may have gone
                each.look()


def _store():
    return dist.distributed_c10d._get_default_store()


def _key(rank: int) -> str:
    return f"zero waits {rank}"


class Sequence:
    """The collectives of one forward and its backward, checked against those of the one before.

    A collective is matched with the other ranks' by its turn alone. If one rank skips a unit, its next all-gather meets
    another unit's: at best the sizes differ and the process is aborted, at worst they are equal and the weights wrong.

    As long as every step goes like the last one, nothing is sent. Where this rank's differs (in the first step
    everything does) words are exchanged in a group of its own, which cannot be mistaken for anything else: ranks
    that differ alike go on, ranks that came to something else get an error that names both, and a
    rank that nobody joins gets the timeout's.
    """

    def __init__(self, group):
        self._control = None if groups.alone(group) else groups.beside(group, "gloo")
        self._known: dict = {}  # kind of step -> its events when it was last run
        self._kind, self._events = None, []

    def begin(self, kind) -> None:
        """Another forward begins, of a `kind` of its own: with gradients or without, under `no_sync` or not."""
        last = self._last_time()
        if last is not None:  # something came before it
            self._compare("the next forward", last)
        self._known[self._kind] = self._events
        self._kind, self._events = kind, []

    def next(self, collective: str, unit) -> None:
        """This rank comes to the `collective` of `unit`. Raises RuntimeError if others come to something else."""
        last, event = self._last_time(), f"the {collective} of unit {unit.name!r}"
        self._events.append(event)
        if event != last:
            self._compare(event, last)

    def _last_time(self) -> str | None:
        """What came at this place in the last step of this kind, if anything did."""
        known, position = self._known.get(self._kind, ()), len(self._events)
        return known[position] if position < len(known) else None

    def _compare(self, event: str, last: str | None) -> None:
        if self._control is None:
            return
        before = f" (the last time it was {last})" if last else ""
        everyone = [None] * dist.get_world_size(self._control)
        with waiting_for(f"the others to come to {event}{before}"):
            dist.all_gather_object(everyone, event, group=self._control)
        if set(everyone) == {event}:
            return
        where = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(everyone))
        raise RuntimeError(
            f"the ranks come to different collectives ({where}): every rank must run the same units in the same order. "
            "Let no branch depend on a rank's own data, or run the unit and multiply its output by 0"
        )
