"""A thread beside the training: it ends a rank that hangs, and says where it stood.

A rank that waits in a collective gets an error after the timeout, but a rank that hangs elsewhere gets none. And that
error says nothing of the other ranks. So every rank watches itself. When nothing moves, all of them tell their places.
The rank that has begun fewer collectives than the others is the one to look at.
"""

import os
import pickle
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

EARLY = 0.9  # of the collectives' timeout: the first error would end all ranks before they could tell
GRACE = 2.0  # seconds from telling to leaving, for the same reason


class Watchdog:
    """Ends this process, with status 1, when it has made no `progress` for nearly `timeout` seconds; or if it is alone.

    `lost(why)` is called before, in the watchdog's thread. Make it in the main thread, which it watches.
    """

    def __init__(self, rank: int, timeout: float, lost=lambda why: None):
        self._rank, self._limit, self._lost = rank, EARLY * timeout, lost
        self._main, self._launcher = threading.get_ident(), os.getppid()
        self.progress("the start")
        threading.Thread(target=self._watch, daemon=True).start()

    def progress(self, doing: str, watched: bool = True) -> None:
        """This rank begins with `doing`, which must end within the timeout; or may take its time if not `watched`."""
        self._doing, self._since = doing, time.monotonic() if watched else float("inf")

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._limit / 10))
            if os.getppid() != self._launcher:  # somebody has killed torchrun, and torchrun cannot stop this rank
                # At once: the same line may start again now, and two runs in one folder would damage each other.
                self._leave(f"its launcher is gone, in {self._doing}", grace=0)
            if time.monotonic() - self._since > self._limit:
                self._leave(f"no progress for {self._limit:g} s in {self._doing}")

    def _leave(self, why: str, grace: float = GRACE) -> None:
        lines = [f"[rank {self._rank}] {why}", f"at {place(self._main)}", *position()]
        print("\n    ".join(lines), file=sys.stderr, flush=True)
        try:
            self._lost(why)
        finally:
            time.sleep(grace)
            os._exit(1)


def place(thread: int) -> str:
    """Where a thread of this process is: the functions that were called, the innermost last, without torch's own."""
    stack = traceback.extract_stack(sys._current_frames()[thread])
    inside = str(Path(torch.__file__).parent)
    shown = [frame for frame in stack[:-1] if not frame.filename.startswith((inside, "<frozen"))] + stack[-1:]
    return " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in shown[-6:])


def position() -> list[str]:
    """This process's last collective in each process group, a line each, from torch's flight recorder.

    torch keeps the last collectives of NCCL and gloo in memory (how many: TORCH_FR_BUFFER_SIZE). Each group counts its
    collectives from 1, so equal numbers on two ranks are the same collective.
    """
    last = {}
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):  # NCCL's, in builds that have it, and all others'
        dump = getattr(torch._C._distributed_c10d, name, None)
        for entry in pickle.loads(dump())["entries"] if dump else ():
            last[tuple(entry["process_group"])] = entry
    lines = []
    for (name, description), entry in last.items():
        group = "all ranks" if description == "default_pg" else f"group {name[:8]}"
        kind = entry["profiling_name"].rpartition(":")[2]
        shapes = ", ".join(str(tuple(shape)) for shape in entry["input_sizes"])
        ended = entry["retired"] or entry["state"] == "completed"
        number = f"collective {entry['collective_seq_id']} of {group}"
        lines.append(f"{number}, {kind} of {shapes}: {'over' if ended else 'begun and not over'}")
    return lines or ["no collective is recorded"]
