"""Progress of long work, on stderr: one live line on a terminal, few lines in a file."""

import sys
import time
from collections.abc import Iterable, Iterator

LIVE = 0.2  # seconds between two looks of the live line
QUIET = 15.0  # seconds between two lines in a file, and before the first


class Progress:
    """Work of `total` units. `show("[1/8] ddp")` names what begins, `advance()` counts a unit that is done.

    The units should take equally long, because the time that is left is estimated from those that are done.

    Of several ranks only one has `shown=True`.
    """

    def __init__(self, total: float, shown: bool = True):
        self.total, self.done, self.what = total, 0.0, ""
        self.began = self._last = time.monotonic()
        self._live = sys.stderr.isatty()
        self._shown = shown

    def show(self, what: str) -> None:
        if not self.done:
            self.began = time.monotonic()
        self.what = what
        self._write()

    def advance(self, units: float = 1) -> None:
        self.done += units
        self._write()

    def clear(self) -> None:
        """Remove the live line, so that other output can follow."""
        if self._shown and self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _write(self) -> None:
        now = time.monotonic()
        if not self._shown or now - self._last < (LIVE if self._live else QUIET):
            return
        self._last = now
        line = f"{self.what}{self._time_left(now)}"
        if self._live:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _time_left(self, now: float) -> str:
        if not self.done:
            return ""
        seconds = round((now - self.began) / self.done * max(self.total - self.done, 0))
        if seconds <= 90:
            return f", about {seconds} s left"
        return f", about {seconds // 60} min {seconds % 60 // 10 * 10} s left"


def with_progress(things: Iterable, what: str, shown: bool = True) -> Iterator:
    """Yield the `things`, one after the other, and show "[2/8] what: thing, about 40 s left"."""
    things = list(things)
    progress = Progress(len(things), shown)
    for index, thing in enumerate(things, 1):
        progress.show(f"[{index}/{len(things)}] {what}: {thing}")
        yield thing
        progress.done += 1
    progress.clear()
