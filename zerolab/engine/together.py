"""Functions that all ranks call together: one raises an error of one rank on all ranks, another makes a group."""

import secrets

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
    answers = [(error, result)]
    if dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake":
        answers = [None] * dist.get_world_size(group)
        try:
            dist.all_gather_object(answers, (portable(error), result), group=group)
        except RuntimeError as lost:
            raise RuntimeError(
                "another rank did not take part. All ranks of the engine must call this together, and not only rank 0. "
                f"If another rank has printed an error, that error is the cause. ({lost})"
            ) from lost
    for rank, (problem, _) in enumerate(answers):
        if problem is not None:
            alike = all(str(other) == str(problem) for other, _ in answers)
            text = problem.args[0] if problem.args else ""
            raise type(problem)(text if alike else f"rank {rank}: {text}") from error
    return [result for _, result in answers]


def all_succeed(work, group):
    """Like `on_all_ranks`, but returns only the result of this rank, and does not send it."""
    results = []
    on_all_ranks(lambda: results.append(work()), group)
    return results[0]


def portable(error):
    """A copy of the error that every rank can unpickle, with the message as its only argument."""
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

    torch names a group after the number of groups that this rank has made. If this number differs between ranks, so do
    the names, and the ranks wait for each other forever. So the first rank chooses a number and broadcasts it over
    `groups`, which exist already and together reach all `ranks`. The counter of torch then continues as before, because
    the other ranks have not made this group. (With `use_local_synchronization=True` torch 2.14 counts it, so that a
    later `new_group` on all ranks would hang, and earlier versions count the groups that a rank is in.)
    """
    number = [secrets.randbits(60)]
    for group in groups:
        dist.broadcast_object_list(number, group_src=0, group=group)
    world = dist.distributed_c10d._world
    before, world.group_count = world.group_count, number[0]
    try:
        return dist.new_group(ranks, backend="gloo")
    finally:
        world.group_count = before
