"""Progress of long work, on stderr: one live line on a terminal, few lines in a file."""

import sys
import time
from collections.abc import Iterable, Iterator

QUIET = 15.0  # seconds between two lines in a file, and before the first


def with_progress(things: Iterable, what: str, shown: bool = True) -> Iterator:
    """Yield the `things`, one after the other, and show "[2/8] what: thing, about 40 s left".

    The things should take equally long, because the time that is left is estimated from those that are done. Of several
    ranks only one has `shown=True`.
    """
    things, live = list(things), sys.stderr.isatty()
    began = last = time.monotonic()
    for done, thing in enumerate(things):
        now = time.monotonic()
        if shown and (live or now - last > QUIET):
            line = f"[{done + 1}/{len(things)}] {what}: {thing}"
            if done:
                line += f", about {in_words((now - began) / done * (len(things) - done))} left"
            # A live line replaces the one before it.
            print(f"\r\033[K{line}" if live else line, end="" if live else "\n", file=sys.stderr, flush=True)
            last = now
        yield thing
    if shown and live:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def in_words(seconds: float) -> str:
    """ "40 s", or "2 min 30 s"."""
    seconds = round(seconds)
    return f"{seconds} s" if seconds <= 90 else f"{seconds // 60} min {seconds % 60 // 10 * 10} s"
