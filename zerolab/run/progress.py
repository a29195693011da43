"""Signs of life of work that takes longer than a few seconds: lines on stderr, in a terminal and in a file alike."""

import sys
import time
from collections.abc import Iterable, Iterator

PATIENCE = 5.0  # seconds without a word


def told(things: Iterable, what: str, speaks: bool = True) -> Iterator:
    """Yield the `things`, one after the other. Every five seconds at most: how many are done, and about how long yet.

    On ranks only one `speaks`.
    """
    things = list(things)
    began = said = time.monotonic()
    for done, thing in enumerate(things):
        now = time.monotonic()
        if speaks and done and now - said > PATIENCE:
            left = (now - began) / done * (len(things) - done)
            words = f"  {what}: {done} of {len(things)} done, now {thing}; about {left:.0f} s more"
            print(words, file=sys.stderr, flush=True)
            said = now
        yield thing
