"""torchrun, but the last lines are the project's: what happened, on which rank, and what to do.

    python -m zerolab.run.torchrun --standalone --nproc-per-node 2 -m fsdp2_compare

The options are torchrun's, and its `run` starts the ranks, by torch's `elastic_launch`. torchrun itself would end with
a table of all failures, below the traceback of `elastic_launch`.

Ranks that are not restarted print no error. Each writes its error to the file that torch gives it (`ErrorFile` in
process_group.py), and this process prints the first one: all ranks raise the same error where all make the same
mistake, and after one has failed the others fail because it is gone.
"""

import logging
import os
import signal
import sys

from zerolab.run.command_line import ERRORS_ARE_COLLECTED

PATIENCE = 25  # seconds, fewer than torch waits
HINTS = {
    signal.SIGKILL: "by `kill -9`, or by Linux because the machine ran out of memory, which `dmesg` shows",
    signal.SIGSEGV: "a crash outside of Python; the lines above show where each thread was",
    signal.SIGABRT: "torch or a library gave up; the lines above have its reason",
}


def main(argv: list[str]) -> int:
    # Without ranks there is nothing to end, so until torch sets its own handlers a signal ends this process at once.
    # Python's KeyboardInterrupt would end one of torch's imports with a traceback, or be lost in it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import torch.distributed as dist
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    options = torchrun.parse_args(argv)
    if options.max_restarts == 0:
        os.environ[ERRORS_ARE_COLLECTED] = "1"
    show_log(options.max_restarts)
    try:
        torchrun.run(options)
        return 0
    except SignalException as received:
        return 128 + received.sigval
    except ChildFailedError as error:
        text, status = report(error.failures, options.max_restarts)
        print(text, end="", file=sys.stderr, flush=True)
        return status
    except (RendezvousError, dist.DistError, OSError) as error:
        where = options.rdzv_endpoint or "this machine"
        print(f"error: the ranks could not be started at {where}: {error}", file=sys.stderr, flush=True)
        return 1


def show_log(max_restarts: int) -> None:
    """Print one line for each restart, and nothing else of torch's log: `report` has the rest."""
    log = logging.getLogger("torch.distributed.elastic")
    log.propagate = False
    log.addHandler(logging.NullHandler())
    if max_restarts:
        lines = logging.StreamHandler()
        lines.setLevel(logging.ERROR)
        lines.setFormatter(logging.Formatter("torchrun: %(message)s"))
        log.addHandler(lines)


def report(failures: dict, max_restarts: int = 0) -> tuple[str, int]:
    """(what to print, the exit status) for {rank: torch's ProcessFailure}."""
    rank, first = first_failure(failures)
    text, status = f"error: {how_it_ended(rank, first.exitcode)}\n", first.exitcode
    if first.exitcode < 0:
        status = 128 - first.exitcode
    elif first.exitcode == 128 + signal.SIGPIPE:  # the reader has closed the pipe, as `head` does
        text = ""
    elif isinstance(first.message, dict):  # from the rank's error file
        text = first.message["message"]
        if text and is_consequence(first, first.timestamp):
            text += who_is_missing(failures)
    if max_restarts and text:
        text = f"The ranks have failed {max_restarts + 1} times. The last time:\n{text}"
    return text, status


def first_failure(failures: dict) -> tuple:
    """(rank, failure) of the one that made the others fail.

    Times are in whole seconds, so they cannot tell a rank that fails from one that misses it a moment later.
    """
    first_time = min(failure.timestamp for failure in failures.values())
    ranks = sorted(failures, key=lambda rank: failures[rank].timestamp)
    causes = [rank for rank in ranks if not is_consequence(failures[rank], first_time)]
    rank = causes[0] if causes else ranks[0]
    return rank, failures[rank]


def is_consequence(failure, first_time: int) -> bool:
    """Whether a rank failed because another one did, or was ended by torch after another had failed at `first_time`."""
    if isinstance(failure.message, dict):
        return bool(failure.message.get("extraInfo", {}).get("lost"))
    if failure.exitcode == -signal.SIGKILL:  # torch's SIGKILL follows its SIGTERM after 30 s
        return failure.timestamp >= first_time + PATIENCE
    return failure.exitcode == -signal.SIGTERM


def who_is_missing(failures: dict) -> str:
    """Below an error of a rank that waited for another rank in vain, where no rank has failed by itself."""
    running = [
        str(rank) for rank, failure in failures.items() if failure.exitcode in (-signal.SIGTERM, -signal.SIGKILL)
    ]
    if running:
        return (
            f"Rank(s) {', '.join(running)} were still running, and were ended: they hang, or wait in another "
            "collective than the others.\n"
        )
    return "No rank on this machine failed before. With several machines, look for the first error on the others.\n"


def how_it_ended(rank: int, exitcode: int) -> str:
    """A sentence for a rank that has recorded no error."""
    if exitcode >= 0:
        return f"rank {rank} ended with exit status {exitcode}; if it printed a reason, that is above"
    number = -exitcode
    hint = f": {HINTS[number]}" if number in HINTS else ""
    return f"rank {rank} was killed by {signal.Signals(number).name}{hint}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
