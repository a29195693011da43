"""Hooks that hold nobody alive and that a copy of the model does not inherit, and the end of a backward."""

import dataclasses
import weakref

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

compiler = torch._C._dynamo.eval_frame


def not_compiled(function):
    """`torch.compiler.disable`, in a form that costs a call nothing.

    `torch.compile` traces Python code into a graph, and follows what it calls. A hook must stay outside of every graph:
    it gathers, frees and sends. Marked so, it is called as it is; FSDP2's hooks are marked, too. torch's own mark wraps
    the function in two more, and a step of ZeRO-3 calls some marked function at every weight.
    """
    if not hasattr(compiler, "set_code_exec_strategy"):  # torch's own, and may be renamed
        return torch.compiler.disable(function)
    function._torchdynamo_disable = function._torchdynamo_disable_recursive = True  # for who traces a call of it
    function._torchdynamo_disable_msg = None
    skip = compiler._FrameAction.SKIP  # for who calls it: neither this nor what it calls is traced
    compiler.set_code_exec_strategy(function.__code__, compiler._FrameExecStrategy(skip, skip))
    return function


class WeakHook:
    """A hook that calls a method as long as the method's object lives, and does nothing in a copy of the model."""

    def __init__(self, method, *first):
        self._object, self._function = weakref.ref(method.__self__), method.__func__
        self._first = [weakref.ref(argument) for argument in first]  # of the method's arguments

    @not_compiled
    def __call__(self, *args):
        this = self._object()
        if this is not None:
            return self._function(this, *[argument() for argument in self._first], *args)

    def __reduce__(self):  # also of a deep copy
        return no_hook, ()


class GradientHook(WeakHook):
    """On a parameter: calls `on_gradient(bucket, index, param)` of an engine."""

    def __init__(self, on_gradient, bucket, index: int):
        super().__init__(on_gradient, bucket)
        self._index = index

    @not_compiled
    def __call__(self, param):
        engine, bucket = self._object(), self._first[0]()
        if engine is None:
            return
        if torch.is_grad_enabled():  # a backward that builds a graph must not record what happens here
            with torch.no_grad():
                self._function(engine, bucket, self._index, param)
        else:
            self._function(engine, bucket, self._index, param)


def nothing(*args, **kwargs) -> None:
    """The hook of a copied model: the copy belongs to no engine."""


def no_hook():
    return nothing


def in_backward() -> bool:
    """Whether a backward runs on this thread."""
    return torch._C._current_graph_task_id() != -1


def when_backward_ends(callback) -> int:
    """Have autograd call `callback()` when the backward that is running is over; returns that backward's number."""
    Variable._execution_engine.queue_callback(callback)
    return torch._C._current_graph_task_id()


def tensors_in(value) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists, dictionaries, dataclasses and other plain objects, each once."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: dict[int, torch.Tensor] = {}
    seen, left = set(), [value]  # no function that calls itself: objects may be a long chain
    while left:
        for leaf in tree_leaves(left.pop()):
            if isinstance(leaf, torch.Tensor):
                found.setdefault(id(leaf), leaf)
            elif id(leaf) not in seen and not isinstance(leaf, (type, nn.Module)):
                seen.add(id(leaf))
                left.append(_inside(leaf))
    return list(found.values())


def _inside(thing) -> list:
    """What a plain object or a dataclass has."""
    if dataclasses.is_dataclass(thing):
        return [getattr(thing, field.name, None) for field in dataclasses.fields(thing)]
    return list(vars(thing).values()) if hasattr(thing, "__dict__") else []
