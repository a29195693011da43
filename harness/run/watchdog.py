"""A thread beside the training: it ends a rank that hangs, and says where it stood.

A rank that waits in a collective gets an error after the timeout, but a rank that hangs elsewhere gets none. And the
error says nothing of the other ranks. So every rank watches itself. Where all stop, each tells its place, and the one
that has finished fewer collectives than the others is the one to look at.
"""

import os
import pickle
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

GRACE = 2.0  # seconds between telling and leaving: torchrun stops all ranks when the first one has left
FRAMES = 6  # of Python's stack that are told


class Watchdog:
    """Ends this process, with status 1, when `progress` was not called for `limit` seconds; or if its launcher is gone.

    `lost(text)` is called before, in the watchdog's thread.
    """

    def __init__(self, rank: int, limit: float, lost=lambda text: None):
        self._rank, self._limit, self._lost = rank, limit, lost
        self._main, self._launcher = threading.get_ident(), os.getppid()
        self.progress("the start")
        threading.Thread(target=self._watch, daemon=True).start()

    def progress(self, doing: str, watched: bool = True) -> None:
        """This rank begins with `doing`, which must end within the limit; or may take its time if not `watched`."""
        self._doing, self._since = doing, time.monotonic() if watched else float("inf")

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._limit / 10))
            if os.getppid() != self._launcher:
                self._leave("its launcher is gone")
            if time.monotonic() - self._since > self._limit:
                self._leave(f"no progress for {self._limit:g} s in {self._doing}")

    def _leave(self, why: str) -> None:
        stack = traceback.extract_stack(sys._current_frames()[self._main])[-FRAMES:]
        path = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in stack)
        lines = [f"[rank {self._rank}] {why}", f"at {path}", *position()]
        print("\n    ".join(lines), file=sys.stderr, flush=True)
        try:
            self._lost(why)
        finally:
            time.sleep(GRACE)
            os._exit(1)


def position() -> list[str]:
    """This process's last collective in each process group, a line each, from torch's flight recorder.

    torch keeps the last collectives of NCCL and gloo in memory (their number: TORCH_FR_BUFFER_SIZE). Collectives are
    counted from 1 in each group, so equal numbers on two ranks are the same collective.
    """
    last = {}
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):  # NCCL's, in builds that have it, and all others'
        dump = getattr(torch._C._distributed_c10d, name, None)
        for entry in pickle.loads(dump())["entries"] if dump else ():
            last[tuple(entry["process_group"])] = entry
    lines = []
    for (name, description), entry in last.items():
        kind = entry["profiling_name"].replace("nccl:", "").replace("gloo:", "")
        shapes = ", ".join(str(tuple(shape)) for shape in entry["input_sizes"])
        ended = entry["retired"] or entry["state"] == "completed"
        group = description if description not in ("", "undefined") else f"group {name}"
        number = f"collective {entry['collective_seq_id']} of {group}"
        lines.append(f"{number}, {kind} of {shapes}, {'is over' if ended else 'has not ended'}")
    return lines or ["no collective is recorded"]
