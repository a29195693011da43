"""All ranks go on, or none: what one rank raises, all raise. So no rank waits for one that has given up."""

import torch.distributed as dist

from harness.engine.safe_reader import Damaged, Unsafe


def together(work, group) -> list:
    """Every rank does `work`, and gets what all ranks' `work` returned. An error of one rank is one on all."""
    result = problem = said = None
    try:
        result = work()
    except Exception as error:
        problem, said = error, ("RuntimeError", f"{type(error).__name__}: {error}")
        if kinds := [kind.__name__ for kind in type(error).__mro__ if _KINDS.get(kind.__name__) is kind]:
            said = kinds[0], str(error)
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (said, result), group=group)
    for rank, (said, _) in enumerate(everyone):
        if said is not None:  # the first rank's, on all of them, in the same words
            alike = len({other for other, _ in everyone}) == 1
            raise _KINDS[said[0]](said[1] if alike else f"rank {rank}: {said[1]}") from problem
    return [result for _, result in everyone]


_KINDS = (Damaged, Unsafe, ValueError, TypeError, FileNotFoundError, PermissionError, RuntimeError)
_KINDS = {kind.__name__: kind for kind in _KINDS}


def on_all(work, group):
    """As `together`, for results that the other ranks have no use for."""
    kept = []
    together(lambda: kept.append(work()), group)
    return kept[0]
