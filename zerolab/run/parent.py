"""A process that ends when its parent ends, even after `kill -9` of the parent. Only Linux supports this."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Ask Linux to send this process the signal `number` when its parent ends. Elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
