"""The lock of a training run's folder, which rank 0 of the run holds, so that no other run uses the folder."""

import fcntl
import shutil
import time
from pathlib import Path

from zerolab.run import enough_memory, journal
from zerolab.run.names import PRESETS

LEAVING = 5.0  # seconds for a run that is about to leave, when another one is started


def check_folder(folder: Path, preset: str) -> None:
    """Raise ValueError if a run still uses the folder, if it has a run of another preset, or if the disk is full."""
    for line in journal.read(folder)[-1:]:
        if (other := line.get("preset", preset)) != preset:
            raise ValueError(
                f"--folder {str(folder)!r} contains a run of --preset {other}: use that preset, or a different folder"
            )
    lock(folder, LEAVING).close()
    free = shutil.disk_usage(folder).free
    need = 12 * enough_memory.parameters(PRESETS[preset])  # weights and two moments, in float32
    if free < need:
        needed = f"a checkpoint needs {need / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free"
        raise ValueError(f"--folder {str(folder)!r}: {needed}. Free space, or use a different folder")


def lock(folder: Path, seconds: float):
    """Lock `folder` until the returned file is closed. Raises ValueError if a run still has it after `seconds`.

    It is the operating system's lock on the file `.lock`. The system releases it when the process ends for any reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / ".lock", "w")  # noqa: SIM115  the caller closes it
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > until:
                file.close()
                in_use = f"--folder {str(folder)!r} is in use by a run: stop it first, or use a different folder"
                raise ValueError(in_use) from None
        time.sleep(0.05)
