"""Equal blocks, and equal micro-batches, are recorded a few times and then repeated.

A model of L blocks does with each block in the middle what it does with the next. So the events of two recordings, one
with one block more than the other, determine the events for any number of blocks: the additional events of the longer
one are a loop's last round, and are repeated. If that fails, for example because buckets end at a different place in
every block, all blocks are recorded.
"""

from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from extra.planner import recorder
from extra.planner.events import Collective, Event, Memory, Operation, Recording
from extra.planner.one_rank import BUCKETED, BY_UNIT, DDP_BUCKET_MB, Setup, parameters_of
from zerolab.run.deepspeed_engine import default_bucket_mb

WINDOW = 24  # events after a loop that must be the same again
MICRO_BATCHES = 4  # the first, two in the middle that must be equal, the last


class NotRepeating(ValueError):
    """The longer recording is not the shorter one with another round of its loops."""


def strictly(event: Event):
    """The part of an event that must be equal in equal events. The optimizer's kernels grow with the model."""
    if type(event) is Operation and event.step.startswith("4"):
        return event.stream, event.name, event.step
    return event


def but_for_size(event: Event):
    """Like `strictly`, but if a bucket holds the whole model, events of buckets also grow with the model."""
    if type(event) is Operation and not event.step.startswith(("1", "2")):
        return event.stream, event.name, event.step
    if type(event) is Collective:
        return event._replace(nbytes=0)
    return event.nbytes > 0 if type(event) is Memory else event


def extend(shorter: Recording, longer: Recording, rounds: int, key=strictly) -> Recording:
    """The recording with `rounds` more rounds than `longer`, which has one more than `shorter`. Raises NotRepeating.

    `key`: the fields that must be equal for two events to be the same.
    """
    a, b = [list(map(key, recording.events)) for recording in (shorter, longer)]
    events, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        if i < len(a) and j < len(b) and a[i] == b[j]:
            events.append(_grown(shorter.events[i], longer.events[j], rounds))
            i, j = i + 1, j + 1
            continue
        length = _round(a, b, i, j)
        events.extend(longer.events[j : j + length] * (1 + rounds))
        j += length
    more = longer.live_bytes - shorter.live_bytes, longer.parameters - shorter.parameters
    return Recording(tuple(events), longer.live_bytes + rounds * more[0], longer.parameters + rounds * more[1])


def _round(a: list, b: list, i: int, j: int) -> int:
    """How many events from `j` on the longer recording `b` has more: a round that repeats the events before it."""
    for length in range(1, min(j, len(b) - j) + 1):
        after = b[j + length : j + length + WINDOW]
        if a[i : i + len(after)] == after and (after or i == len(a)) and b[j - length : j] == b[j : j + length]:
            return length
    raise NotRepeating(f"event {j} of the longer recording belongs to no loop")


def _grown(short: Event, long: Event, rounds: int) -> Event:
    """The event `long` in a model with more blocks: its size grows by the same amount for each block."""
    if short == long:
        return long
    grow = {name: getattr(long, name) - getattr(short, name) for name in ("flops", "nbytes") if hasattr(long, name)}
    return long._replace(**{name: getattr(long, name) + rounds * more for name, more in grow.items()})


@lru_cache(maxsize=256)
def recording(setup: Setup) -> Recording:
    """The events of a step of `setup`, recorded with as few blocks and micro-batches as possible."""
    if setup.accumulate > MICRO_BATCHES:
        with suppress(NotRepeating):
            few, more = (recording(replace(setup, accumulate=n)) for n in (MICRO_BATCHES - 1, MICRO_BATCHES))
            return extend(few, more, setup.accumulate - MICRO_BATCHES)
    return _blocks(setup)


def _blocks(setup: Setup) -> Recording:
    blocks = 4 + (setup.prefetch if setup.engine in BY_UNIT else 1)
    if setup.config.layers <= blocks + 2:
        return recorder.record(setup)
    key = strictly
    if setup.engine in BUCKETED:  # of one size for any number of blocks
        named = parameters_of(setup.config)
        bucket_mb = setup.bucket_mb or (
            DDP_BUCKET_MB if setup.engine == "ddp" else default_bucket_mb([param for _, param in named])
        )
        setup = replace(setup, bucket_mb=bucket_mb)
        if 4 * sum(param.numel() for _, param in named) <= bucket_mb * 2**20:
            key = but_for_size
    few, more = (recorder.record(replace(setup, config=replace(setup.config, layers=n))) for n in (blocks, blocks + 1))
    try:
        return extend(few, more, setup.config.layers - blocks - 1, key)
    except NotRepeating:  # for example as buckets end elsewhere in every block
        return recorder.record(setup)
