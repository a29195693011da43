"""How ranks end: what their exit statuses mean, and what is said of them."""

import signal

SAID = 4  # exit status of ranks that did not fail, and have said what is wrong: the launcher adds nothing
LAUNCHER = "ZERO_LAUNCHER"  # the launcher's process id, for its ranks
ENDED = "ZERO_ENDED"  # of the launcher: a file for {rank: exit status} of those that failed


def killed_by(number: int) -> str:
    """What is said of a process that the signal `number` has ended."""
    name = signal.Signals(number).name
    # Nobody but the kernel sends SIGKILL unasked, and as a rule because the machine's memory is used up.
    return f"killed by {name} (out of memory? kill -9?)" if number == signal.SIGKILL else f"killed by {name}"


def what_failed(failures: dict) -> str:
    """In plain words what has ended the ranks, of torch's {rank: ProcessFailure}: the causes, not what followed."""
    # A killed rank's neighbours lose it and fail; those that are left, torchrun ends by SIGTERM.
    killed = []
    for rank, failure in sorted(failures.items()):
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            killed.append(f"rank {rank} was {killed_by(-failure.exitcode)}")
    if killed:
        return "; ".join(killed)
    first = min(failures, key=lambda rank: failures[rank].timestamp)
    return f"rank {first} was the first to fail, with exit status {failures[first].exitcode}: see its lines above"
