"""When a stage acts.

A chapter says *what* it does at a moment: before a unit's forward, when a bucket's gradients are final. This file finds
out *when* the moment has come, and calls the chapter's method of that name. torch offers many hooks for that. Each one
used here says why no simpler one will do.

    ZeRO-1   no moment: `CollectingHooks` only moves each gradient into the chapter's buffer
    ZeRO-2   `BucketHooks`: gradients_final(bucket)
    ZeRO-3   before_forward(unit, upcoming), after_forward(unit), before_backward(unit, upcoming), after_backward(unit),
             gradients_final(unit): `UnitHooks` in engine/unit_hooks.py

A hook that held its engine would keep model and engine alive for ever: parameter, hook, engine, parameter is a cycle
that runs through C++, where Python's garbage collector cannot see it. So all hooks are `WeakHook`s.
"""

import contextlib
import weakref

import torch
from torch import nn

from harness.engine import gradients, guard
from harness.engine.hooks import WeakHook, when_backward_ends
from harness.engine.unchanged import watch_forward


class Hooks:
    """What ZeRO-1's and the others' have in common: hooks on model and gradients, until the engine is closed."""

    def __init__(self, engine):
        self._engine = weakref.proxy(engine)
        for bucket in engine.buckets:
            guard.adopt(bucket, engine)
        self._handles = watch_forward(engine)
        for bucket in engine.trained_buckets:
            for param in bucket.params:
                # Called when `param.grad` is final for this backward, however often `param` was used.
                self._handles.append(param.register_post_accumulate_grad_hook(WeakHook(self._on_gradient)))
                param.zero_hook = self._handles[-1].id

    def stepped(self) -> None:
        """The optimizer has changed the shards."""
        guard.stepped([param for bucket in self._engine.trained_buckets for param in bucket.params])

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class CollectingHooks(Hooks):
    """ZeRO-1: a gradient moves into its bucket's `flat_gradient` as soon as it is final. So it exists only once."""

    def __init__(self, engine):
        super().__init__(engine)
        self._place = {}  # id of a parameter -> (its bucket, its number there, its view of `flat_gradient`)
        self.reduced = False  # whether step 3 was made since the last gradient came
        for bucket in engine.trained_buckets:
            for index, view in enumerate(bucket.views(bucket.flat_gradient)):
                self._place[id(bucket.params[index])] = bucket, index, view

    def _on_gradient(self, param: nn.Parameter) -> None:
        bucket, index, place = self._place[id(param)]
        gradient = guard.take_gradient(param)
        if gradient.layout is not torch.strided:
            gradients.refuse_sparse(bucket, index)
        # The first gradient since `zero_grad()` overwrites what the step before has left there. With `find_unused`
        # zeros are there: a parameter that this rank does not use must contribute zeros, not an earlier gradient.
        store = place.add_ if self._engine.find_unused or index in bucket.used else place.copy_
        store(gradient.detach())
        bucket.used.add(index)
        param.zero_moved, self.reduced = True, False

    def reset(self) -> None:
        """All gradients were dropped."""
        self.reduced = False
        if self._engine.find_unused:
            for bucket in self._engine.trained_buckets:
                bucket.flat_gradient.zero_()

    def no_sync(self):
        """ZeRO-1 sends nothing before `step()` anyway."""
        return contextlib.nullcontext()


class BucketHooks(Hooks):
    """ZeRO-2: calls `engine.gradients_final(bucket)` when backward has finished all gradients of a bucket.

    A bucket that lacks some is final when backward ends, if an earlier backward of this step has brought them (several
    losses, each with a backward of its own), or with `find_unused`. Under `no_sync` none is final: gradients are kept.
    ZeRO-3 has the same moment with units in the place of buckets: `parts` are then {unit: its trained buckets}.
    """

    def __init__(self, engine, parts=None):
        super().__init__(engine)
        self._buckets_of = {bucket: [bucket] for bucket in engine.trained_buckets} if parts is None else parts
        self._home = {}  # id of a parameter -> (bucket or unit, bucket, the parameter's number there)
        self._sync = True  # False under `no_sync`
        self._backward = None  # autograd's number of the backward that is running, once it has shown itself
        self._open = {}  # buckets or units (as keys) whose gradients that backward has still to finish
        self._came = False  # whether that backward has brought any gradient
        self.reduced = False  # whether step 3 was finished since the last reduction
        for part, buckets in self._buckets_of.items():
            for bucket in buckets:
                for index, param in enumerate(bucket.params):
                    self._home[id(param)] = part, bucket, index

    def reset(self) -> None:
        """All gradients were dropped, also those of a backward that did not finish."""
        self.reduced, self._backward, self._open = False, None, {}

    @contextlib.contextmanager
    def no_sync(self):
        """For all but the last of several backwards before a step: gradients add up on this rank, whole, unsent."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _begin_backward(self) -> None:
        """A backward shows its first sign. Nothing tells its end, but autograd takes a callback for it."""
        if self._backward is None:
            self._backward, self._came = when_backward_ends(WeakHook(self._end_backward)), False
            for part in self._open:  # what the backward before has left open, this one adds to
                self._expect_all(part)
            self._open = dict.fromkeys(self._buckets_of)

    def _expect_all(self, part) -> None:
        for bucket in self._buckets_of[part]:
            bucket.missing = set(range(len(bucket.params)))

    def _on_gradient(self, param: nn.Parameter) -> None:
        if torch.is_grad_enabled():  # a backward that builds a graph must not record what happens here
            with torch.no_grad():
                return self._on_gradient(param)
        part, bucket, index = self._home[id(param)]
        self._see_gradient()
        if index not in bucket.missing or guard.gradient_of(param).layout is not torch.strided:
            gradients.refuse(bucket, index, param)
        bucket.used.add(index)
        param.zero_moved = self._came = True
        if not self._sync:
            gradients.keep(bucket, index)
        bucket.missing.discard(index)
        if not bucket.missing and not any(b.missing for b in self._buckets_of[part]):
            self._complete(part)

    def _see_gradient(self) -> None:
        if self._backward is None:
            self._begin_backward()

    def _complete(self, part) -> None:
        """This rank has all gradients of `part`."""
        self._deliver(part)

    def _deliver(self, part) -> None:
        """Tell the chapter that the gradients of `part` are final; from here on those of the next backward count."""
        self._open.pop(part, None)
        self._expect_all(part)
        if self._sync and self._buckets_of[part]:
            self.reduced = False
            self._engine.gradients_final(part)

    def _end_backward(self) -> None:
        """What waits for gradients that do not come is final now, if it may be: with zeros for these on this rank."""
        self._backward = None
        for part in list(self._open):
            earlier = all(bucket.missing <= bucket.used for bucket in self._buckets_of[part])
            if self._engine.find_unused or (self._came and earlier):
                self._deliver(part)
