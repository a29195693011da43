"""A training run's folder belongs to one run: its rank 0 holds a lock on it."""

from pathlib import Path

from filelock import FileLock, Timeout


def lock(folder: Path, seconds: float) -> FileLock:
    """Hold `folder` as long as the returned lock is kept. Raises ValueError if a run still has it after `seconds`.

    It is the system's lock on the file `.lock`: the system releases it when the process ends, in whatever way.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = FileLock(folder / ".lock")
    try:
        held.acquire(timeout=seconds)
    except Timeout:
        raise ValueError(f"--folder {str(folder)!r} is in use by a run: stop it first, or take another") from None
    return held
