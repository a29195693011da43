"""All ranks go on, or none: what one rank raises, all raise. So no rank waits for one that has given up."""

import torch.distributed as dist

from zerolab.engine import groups
from zerolab.engine.safety.waiting import waiting_for

# Of Python's errors; and all of ours.
_KINDS = (ValueError, TypeError, KeyError, FileNotFoundError, PermissionError, RuntimeError)


def all_or_none(work, group, what: str = "the other ranks' answers") -> list:
    """Every rank does `work`, and gets what all ranks' `work` returned. An error of one rank is one on all.

    `what` is what a message calls the wait for the others.
    """
    result = problem = said = None
    try:
        result = work()
    except Exception as error:
        problem, said = error, (RuntimeError, f"{type(error).__name__}: {error}")
        words = error.args[0] if isinstance(error, KeyError) and error.args else error
        for kind in reversed(type(error).__mro__):
            if kind in _KINDS or kind.__module__.startswith("zerolab.engine."):
                said = kind, str(words)
    everyone = [(said, result)] * dist.get_world_size(group)
    if not groups.alone(group):
        with waiting_for(what, group):
            dist.all_gather_object(everyone, (said, result), group=group)
    for rank, (said, _) in enumerate(everyone):
        if said is not None:  # the first rank's, on all of them, in the same words
            kind, words = said
            alike = all(other == said for other, _ in everyone)
            raise kind(words if alike else f"rank {rank}: {words}") from problem
    return [result for _, result in everyone]


def on_all(work, group, *how):
    """As `all_or_none`, for results that the other ranks have no use for."""
    kept = []
    all_or_none(lambda: kept.append(work()), group, *how)
    return kept[0]
