"""A process that ends when the one that has started it is gone: after `kill -9` nobody is left to end its ranks.

Who starts processes writes its number into their environment, and what was started looks for it twice a second. The
kernel has a signal for this (PR_SET_PDEATHSIG), but only Linux's has, and it comes when the *thread* ends that started
a process, and from a parent alone: a fork of a fork server has another one.
"""

import contextlib
import os
import signal
import threading
import time

import psutil

STARTER = "ZERO_STARTER"


def end_with_starter(parent: int | None = None) -> None:
    """From here on this process ends with its starter, and what it starts ends with this one.

    The starter is the process that the environment names. Where it names none it is `parent`; without one this process
    is on its own, as a run under nohup must be. To call it twice is to call it once.
    """
    own = os.getpid()
    named = os.environ.get(STARTER, parent)
    os.environ[STARTER] = str(own)
    if named is not None and int(named) != own:
        threading.Thread(target=_watch, args=(int(named),), daemon=True).start()


def _watch(starter: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(starter)
        # A process that was killed may stay listed until its own parent asks for it.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.5)
    for child in psutil.Process().children(recursive=True):  # not every child watches: nvidia-smi, a user's script
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)
