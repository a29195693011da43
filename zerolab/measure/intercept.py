"""Replaces functions of torch while something is recorded, for all instruments of this package.

The instruments see almost everything through torch's dispatcher. Two things do not pass it: a storage that is resized,
and a wait for a collective. So `resize_` and `wait` are replaced while at least one instrument listens. Any number can
listen at a time, and they may stop in any order.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

Listener = Callable[..., AbstractContextManager]  # called with the arguments of the call, and entered around it


class Intercepted:
    """A method of a torch class. While there are listeners, each of them is entered around each call."""

    def __init__(self, owner: type, name: str):
        self._owner, self._name = owner, name
        self._plain = getattr(owner, name)
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Enter `listener(*arguments)` around every call from now on. The last one to listen is the innermost."""
        if not self._listeners:
            self._replace()
        self._listeners.append(listener)

    def stop(self, listener: Listener) -> None:
        self._listeners.remove(listener)
        if not self._listeners:
            setattr(self._owner, self._name, self._plain)

    def _replace(self) -> None:
        # Read now and not at the import, because a test may also have replaced the method.
        self._plain = plain = getattr(self._owner, self._name)
        listeners = self._listeners

        def method(*arguments):
            with contextlib.ExitStack() as around:
                for listener in [*listeners]:
                    around.enter_context(listener(*arguments))
                return plain(*arguments)

        setattr(self._owner, self._name, method)


RESIZE = Intercepted(torch.UntypedStorage, "resize_")
WAIT = Intercepted(dist.Work, "wait")
