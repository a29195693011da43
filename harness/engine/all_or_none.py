"""All ranks go on, or none: what one rank raises, all raise. So no rank waits for one that has given up."""

import torch.distributed as dist

_KINDS = (ValueError, TypeError, FileNotFoundError, PermissionError, RuntimeError)  # of Python's, and all of ours


def all_or_none(work, group) -> list:
    """Every rank does `work`, and gets what all ranks' `work` returned. An error of one rank is one on all."""
    result = problem = said = None
    try:
        result = work()
    except Exception as error:
        problem, said = error, (RuntimeError, f"{type(error).__name__}: {error}")
        for kind in reversed(type(error).__mro__):
            if kind in _KINDS or kind.__module__.startswith("harness.engine."):
                said = kind, str(error)
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (said, result), group=group)
    for rank, (said, _) in enumerate(everyone):
        if said is not None:  # the first rank's, on all of them, in the same words
            kind, words = said
            alike = all(other == said for other, _ in everyone)
            raise kind(words if alike else f"rank {rank}: {words}") from problem
    return [result for _, result in everyone]


def on_all(work, group):
    """As `all_or_none`, for results that the other ranks have no use for."""
    kept = []
    all_or_none(lambda: kept.append(work()), group)
    return kept[0]
