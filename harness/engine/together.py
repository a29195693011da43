"""All ranks go on, or none: what one rank raises, all raise. So no rank waits for one that has given up."""

import torch.distributed as dist

from harness.engine.safe_reader import Damaged, Unsafe


def together(work, group) -> list:
    """Every rank does `work`, and gets what all ranks' `work` returned. An error of one rank is one on all."""
    result = problem = None
    try:
        result = work()
    except Exception as error:
        problem = error
    everyone = [None] * dist.get_world_size(group)
    said = None if problem is None else (type(problem).__name__, str(problem))
    dist.all_gather_object(everyone, (said, result), group=group)
    if problem is not None:
        raise problem
    for rank, (said, _) in enumerate(everyone):
        if said is not None:
            raise _KINDS.get(said[0], RuntimeError)(f"rank {rank}: {said[1]}")
    return [result for _, result in everyone]


_KINDS = {kind.__name__: kind for kind in (Damaged, Unsafe, ValueError, TypeError, FileNotFoundError, PermissionError)}


def on_all(work, group):
    """As `together`, for results that the other ranks have no use for."""
    kept = []
    together(lambda: kept.append(work()), group)
    return kept[0]
