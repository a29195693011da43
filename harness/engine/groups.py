"""Process groups that an engine needs beside the caller's: each is made once, and has the timeout of the caller's."""

import torch
import torch.distributed as dist

from harness.engine.together import together

_made: dict[tuple, dist.ProcessGroup] = {}  # (name of the caller's group, backend, ranks) -> the group


def beside(group, backend: str, ranks: list[int] | None = None) -> dist.ProcessGroup:
    """A group of `ranks` (global numbers; default: those of `group`) over `backend`. A collective of these ranks."""
    group = dist.group.WORLD if group is None else group
    ranks = dist.get_process_group_ranks(group) if ranks is None else ranks
    key = (group.group_name, backend, *ranks)
    if key not in _made or not _alive(_made[key]):
        _made[key] = dist.new_group(ranks, timeout=_timeout(group), backend=backend, use_local_synchronization=True)
    return _made[key]


def another(group, backend: str) -> dist.ProcessGroup:
    """A new group of the ranks of `group`, with torch's own timeout. A collective of these ranks.

    torch names it by its ranks and by the number of groups that this rank is in. Under different names the ranks would
    wait for each other for ever. So a rank that is in fewer groups than another one first makes some for itself alone.
    """
    here = dist.distributed_c10d._world.pg_map
    for _ in range(max(together(lambda: len(here), group)) - len(here)):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return dist.new_group(ranks, backend=backend, use_local_synchronization=True)


def _timeout(group):
    """None, which is torch's default, for a backend that has none."""
    backend = group._get_backend(torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu"))
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _alive(group) -> bool:
    try:
        return dist.get_rank(group) >= 0
    except ValueError:  # of a process group that was destroyed since
        return False
