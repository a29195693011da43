"""Functions that all ranks call together: raise one rank's error on every rank, so that none waits; make a group."""

import torch.distributed as dist


def on_all_ranks(work, group):
    """Call `work()` on every rank. Returns the list of the results of all ranks. A collective.

    If it raises an error on any rank, every rank raises the error of the first such rank.
    """
    result = error = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    everyone = [(error, result)]
    if dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake":
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (portable(error), result), group=group)
    for rank, (problem, _) in enumerate(everyone):
        if problem is not None:
            alike = all(str(other) == str(problem) for other, _ in everyone)
            text = problem.args[0] if problem.args else ""
            raise type(problem)(text if alike else f"rank {rank}: {text}") from error
    return [result for _, result in everyone]


def all_succeed(work, group):
    """Like `on_all_ranks`, but returns only the result of this rank, and does not send it."""
    results = []
    on_all_ranks(lambda: results.append(work()), group)
    return results[0]


def portable(error):
    """A copy of the error that every rank can unpickle, with a single message."""
    if error is None:
        return None
    message = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    for kind in type(error).__mro__:
        plain = kind.__module__ == "builtins" or kind.__module__.startswith("zerolab.")
        if plain and kind not in (OSError, UnicodeDecodeError, Exception, BaseException, object):
            try:
                return kind(message)
            except TypeError:
                continue
    return RuntimeError(f"{type(error).__name__}: {message}")


def make_group(ranks, groups):
    """A new process group of `ranks` over gloo, for objects and a few bytes. Only these ranks call it.

    Over gloo, because NCCL would split the communicator of the default group, and all ranks must take part in a split.

    torch names the group after its ranks and after the number of groups that this rank is in. Ranks that use different
    names wait for each other forever. So a rank that is in fewer groups than another one first makes groups of itself
    alone. The ranks compare their numbers over `groups`, which exist already and together reach all `ranks`.
    """
    names = dist.distributed_c10d._world.pg_names  # of all groups that this rank is in
    most = len(names)
    for group in groups:
        numbers = [None] * dist.get_world_size(group)
        dist.all_gather_object(numbers, most, group=group)
        most = max(numbers)
    while len(names) < most:
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
