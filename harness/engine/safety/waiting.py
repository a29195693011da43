"""Waiting for collectives, so that an error says what this rank waited for; and how messages name things."""

import contextlib

import torch.distributed as dist

MAX_NAMES = 5  # in an error message


def name_some(names: list[str]) -> str:
    """The first few names, quoted, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:MAX_NAMES])
    return shown + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")


def not_alike(missing: list[str], unexpected: list[str]) -> str:
    """What a message says of names that a state lacks, or has too many."""
    return f"missing {name_some(missing) or 'nothing'}; unexpected {name_some(unexpected) or 'nothing'}"


def label(bucket) -> str:
    """What a message calls `bucket`: its unit, or the names of its parameters."""
    return getattr(bucket, "label", None) or f"the bucket of {name_some(bucket.names)}"


def wait(work, collective: str, bucket) -> None:
    """`work.wait()`; on CUDA the stream waits and not the host. An error names the collective and the bucket."""
    with waiting_for(f"the {collective} of {label(bucket)}"):
        work.wait()


@contextlib.contextmanager
def waiting_for(what: str):
    """Let an error of a collective inside say what this rank waited for."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {dist.get_rank()} waited in vain for {what}: some rank has died, hangs, or went another way "
            f"(a branch or a unit that not all ranks run). {error}"
        ) from error
