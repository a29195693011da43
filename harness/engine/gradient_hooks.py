"""When a gradient is final, in the cases that are hard.

A chapter has autograd call its `on_gradient` when a parameter's gradient is final. That call passes through here, for
what would make the chapter long: sparse gradients, parameters without a gradient, several backwards, `no_sync`.

A hook that held its engine would keep model and engine alive for ever: parameter, hook, engine, parameter is a cycle
that runs through C++, where Python's garbage collector cannot see it. So all hooks are `WeakHook`s.
"""

import contextlib
import weakref

import torch

from harness.engine import gradients, guard
from harness.engine.hooks import GradientHook, WeakHook, when_backward_ends
from harness.engine.unchanged import Look, watch_forward


class Hooks:
    """The hooks of one engine, until it is closed. ZeRO-1 has these alone."""

    def __init__(self, engine):
        self._engine = weakref.proxy(engine)
        self.reduced = False  # whether step 3 was made since the last gradient came
        for bucket in engine.buckets:
            guard.adopt(bucket, engine)
        self._look = Look(engine)
        self._handles = watch_forward(engine, self._look)

    def calling(self, on_gradient, *where) -> GradientHook:
        """A parameter's hook: `on_gradient(*where)`, `where` ending with (bucket, number of the parameter in it)."""
        return GradientHook(on_gradient, *where)

    def came(self, bucket, index: int) -> bool:
        """A gradient is final. Returns whether the chapter is to hear of it."""
        if guard.gradient_of(bucket.params[index]).layout is not torch.strided:
            gradients.refuse_sparse(bucket, index)
        bucket.params[index].zero_moved, self.reduced = True, False
        return True

    def reset(self) -> None:
        """All gradients were dropped. A parameter that this rank does not use must contribute zeros, not an old one."""
        self.reduced = False
        if self._engine.find_unused:
            for bucket in self._engine.trained_buckets:
                bucket.flat_gradient.zero_()

    def no_sync(self):
        """ZeRO-1 sends nothing before `step()` anyway."""
        return contextlib.nullcontext()

    def stepped(self) -> None:
        """The optimizer has changed the shards."""
        guard.stepped([param for bucket in self._engine.trained_buckets for param in bucket.params])

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        for bucket in self._engine.trained_buckets:
            for param in bucket.params:
                hooks = param._post_accumulate_grad_hooks or {}
                for key in [key for key, hook in hooks.items() if type(hook) is GradientHook]:
                    del hooks[key]


class BucketHooks(Hooks):
    """ZeRO-2: the chapter calls its `gradients_final(bucket)` when a bucket's last gradient has come.

    A bucket that lacks some is final when backward ends, if an earlier backward of this step has brought them (several
    losses, each with a backward of its own), or with `find_unused`. Under `no_sync` none is final: gradients are kept.
    ZeRO-3 has the same with units in the place of buckets: `parts` are then {unit: its trained buckets}.
    """

    def __init__(self, engine, parts=None):
        super().__init__(engine)
        self._buckets_of = {bucket: [bucket] for bucket in engine.trained_buckets} if parts is None else parts
        self._sync = True  # False under `no_sync`
        self._backward = None  # autograd's number of the backward that is running, once it has shown itself
        self._came = False  # whether that backward has brought any gradient

    def reset(self) -> None:
        """All gradients were dropped, also those of a backward that did not finish."""
        self.reduced, self._backward = False, None

    @contextlib.contextmanager
    def no_sync(self):
        """For all but the last of several backwards before a step: gradients add up on this rank, whole, unsent."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _begin_backward(self) -> None:
        """A backward shows its first sign. Autograd has no hook for its end, so queue a callback."""
        if self._backward is None:
            self._backward, self._came = when_backward_ends(WeakHook(self._end_backward)), False
            for bucket in self._engine.trained_buckets:
                bucket.missing = set(range(len(bucket.params)))

    def came(self, *where) -> bool:
        *_, bucket, index = where
        self._begin_backward()
        param = bucket.params[index]
        if index not in bucket.missing or guard.gradient_of(param).layout is not torch.strided:
            gradients.refuse(bucket, index, param)
        bucket.used.add(index)
        param.zero_moved = self._came = True
        if self._sync:
            self.reduced = False
        else:
            gradients.keep(bucket, index)
            bucket.missing.discard(index)
        return self._sync

    def _deliver(self, part) -> None:
        """Tell the chapter that the gradients of `part` are final, although some did not come in this backward."""
        for bucket in self._buckets_of[part]:
            bucket.missing = set()
        if self._sync and self._buckets_of[part]:
            self.reduced = False
            self._engine.gradients_final(part)

    def _end_backward(self) -> None:
        """What waits for gradients that do not come is final now, if it may be: with zeros for these on this rank."""
        self._backward = None
        for part, buckets in self._buckets_of.items():
            earlier = self._came and all(bucket.missing <= bucket.used for bucket in buckets)
            if any(bucket.missing for bucket in buckets) and (self._engine.find_unused or earlier):
                self._deliver(part)
