"""Process groups that an engine needs beside the caller's: each is made once, and has the timeout of the caller's."""

import hashlib
from collections import Counter

import torch.distributed as dist

from zerolab.engine import accelerator

_made: dict[tuple, dist.ProcessGroup] = {}  # (name of the caller's group, backend, ranks) -> the group
_times = Counter()  # how often these ranks have made a group


def alone(group) -> bool:
    """Whether there is nobody to compare with."""
    return dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake"


def beside(group, backend: str, ranks: list[int] | None = None) -> dist.ProcessGroup:
    """A group of `ranks` (global numbers; default: those of `group`) over `backend`. A collective of these ranks."""
    group = dist.group.WORLD if group is None else group
    ranks = dist.get_process_group_ranks(group) if ranks is None else ranks
    key = (group.group_name, backend, *ranks)
    if _made.get(key) not in dist.distributed_c10d._world.pg_map:  # there is none, or it was destroyed since
        _made[key] = new(ranks, backend, timeout=_timeout(group))
    return _made[key]


def new(ranks: list[int], backend: str, timeout=None) -> dist.ProcessGroup:
    """Another group of `ranks`; the default is torch's own timeout. A collective of these ranks.

    torch names a group by a number, of the groups that a rank has made or is in. That may be another one on each rank,
    and under different names the ranks would wait for each other for ever. So here the number comes from the ranks.
    """
    world, key = dist.distributed_c10d._world, tuple(ranks)
    _times[key] += 1
    before = world.group_count
    world.group_count = int.from_bytes(hashlib.sha256(repr((key, _times[key])).encode()).digest()[:7], "big")
    try:
        return dist.new_group(ranks, backend=backend, timeout=timeout)
    finally:
        world.group_count = before


def _timeout(group):
    """None, which is torch's default, for a backend that has none."""
    backend = group._get_backend(accelerator.device_of(group))
    return getattr(getattr(backend, "options", None), "_timeout", None)
