"""Replaces the streams and events that an engine such as FSDP2 uses on a CPU, and records them.

torch has `torch.cpu.Stream` and similar classes so that the same code runs on every device. On a CPU they do nothing.
"""

import contextlib
from unittest import mock

import torch

from extra.planner.events import COMPUTE


class Streams:
    """`with Streams(mark, wait).replaced: ...`: `mark(stream)` numbers an event, `wait(stream, number)` waits.

    `current` is the name of the stream in which work is put now.
    """

    def __init__(self, mark, wait):
        self.current, made = COMPUTE, 0
        streams = self

        class Event:
            number = None

            def record(self, stream=None):
                self.number = mark(streams.current if stream is None else stream.name)

            def wait(self, stream=None):
                (stream or current_stream()).wait_event(self)

            def synchronize(self):
                raise NotImplementedError(
                    "the engine makes the host wait for the GPU, which the replay does not support"
                )

            def query(self):
                return True

        class Stream:
            def __init__(self, *_, name=None, **__):
                nonlocal made
                made += name is None
                self.name = name or f"stream {made}"

            def record_event(self, event=None):
                event = Event() if event is None else event
                event.record(self)
                return event

            def wait_event(self, event):
                if event.number is not None:
                    wait(self.name, event.number)

            def wait_stream(self, other):
                if other.name != self.name:
                    self.wait_event(other.record_event())

        @contextlib.contextmanager
        def stream(chosen):
            before = streams.current
            streams.current = before if chosen is None else chosen.name
            try:
                yield
            finally:
                streams.current = before

        def current_stream(device=None):
            return Stream(name=streams.current)

        ours = {"Stream": Stream, "Event": Event, "current_stream": current_stream, "stream": stream}
        self.replaced = mock.patch.multiple(torch.cpu, create=True, **ours)
