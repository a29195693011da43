"""Run in a process of its own: dry runs on a fake GPU with offload, right ones and some that are wrong on purpose."""

import contextlib
from types import SimpleNamespace
from unittest import mock

from harness.engine import gradients
from harness.engine.placement import Placement
from harness.measure import dry_run


def dry(name: str, argv: list[str], wrong: str | None = None) -> dict:
    """The row of `./launch.sh memory --offload ARGV` for one engine, with one of WRONG in place of what is right."""
    with WRONG[wrong]() if wrong else contextlib.nullcontext():
        return dry_run.measure_alone(name, dry_run.arguments(["--offload", *argv]))


def with_an_allocator(name: str, argv: list[str], peak: int) -> dict:
    """The same row where the device has an allocator that says that its peak was `peak` bytes."""
    allocator = SimpleNamespace(
        memory_allocated=lambda: 0, reset_peak_memory_stats=lambda: None, max_memory_allocated=lambda: peak
    )
    with mock.patch.object(dry_run, "allocator_of", lambda device: allocator):
        return dry(name, argv)


def _all_stays_on_the_device():
    """Shards, gradients and so the optimizer's state are where the model is."""
    return mock.patch.multiple(
        Placement,
        _host_memory=lambda self, like: like.new_empty(like.shape),
        _to_host=lambda self, bucket, shard: shard,
    )


def _whole_gradients_on_the_host():
    """ZeRO-1 brings them all and takes its part there. The others have them there for a moment."""
    plain = gradients.take

    def take(bucket):
        found = plain(bucket)
        for one in found:
            one.to("cpu")
        return found

    def brought(self, bucket, shard):
        whole = bucket.flat_gradient
        return bucket.own_part(self._host_memory(whole).copy_(whole))

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(gradients, "take", take))
    stack.enter_context(mock.patch.object(Placement, "brought", brought))
    return stack


WRONG = {
    "all stays on the device": _all_stays_on_the_device,
    "whole gradients on the host": _whole_gradients_on_the_host,
}
