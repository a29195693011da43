"""Where a training step is: in which labelled step and in which module, in forward and in backward."""

import bisect

import torch
from torch import nn
from torch.nn.modules import module as global_hooks


class PositionInStep:
    """Open it around a step, pass every dispatched operation to `see`, and read `phase`, `step` and `module()`.

    Steps are the `record_function` labels that begin with "step ". Modules are found by hooks in forward, and in
    backward by the sequence number that autograd gave to the operation in forward.

    `listener.begins(step, depth)` and `listener.ends(step, depth)` are called for every step; depth 1 is the outermost.
    """

    def __init__(self, listener=None):
        self._listener = listener
        self.labels: list[str] = []  # the open `record_function` labels, outermost first
        self._handles: list = []
        self.forget()

    def forget(self, model: nn.Module | None = None) -> None:
        """A step begins. The modules have their names in `model`."""
        named = () if model is None else model.named_modules()
        self._names = {id(module): name or type(module).__name__ for name, module in named}
        self._modules: list[str] = []  # whose forward runs now, outermost first
        self._entered: list[tuple[int, str]] = []  # (autograd's number of the next node, module from there on)
        self._last = ""

    def see(self, func, args) -> bool:
        """An operation is about to run. Returns whether it is the beginning or the end of a label."""
        if func._schema.name == "profiler::_record_function_enter_new":
            self.labels.append(args[0])
            if self._is_a_step():
                self._listener.begins(self.step, len(self.steps))
            return True
        if func._schema.name == "profiler::_record_function_exit" and self.labels:
            if self._is_a_step():
                self._listener.ends(self.step, len(self.steps))
            self.labels.pop()
            return True
        return False

    def _is_a_step(self) -> bool:
        return self._listener is not None and self.labels[-1].startswith("step ")

    @property
    def steps(self) -> list[str]:
        """The steps that run now, outermost first: ["2 backward", "3 reduce gradients"]."""
        return [label.removeprefix("step ") for label in self.labels if label.startswith("step ")]

    @property
    def phase(self) -> str:
        """The outermost of the steps, or ""."""
        return self.steps[0] if self.steps else ""

    @property
    def step(self) -> str:
        """The innermost of the steps, or ""."""
        return self.steps[-1] if self.steps else ""

    def module(self) -> str:
        """The innermost module whose forward runs or whose operation backward differentiates, or ""."""
        if self._modules:
            return self._modules[-1]
        node = torch._C._current_autograd_node()
        if node is None or not self._entered:
            return ""
        number = node._sequence_nr()
        if number < 2**63:  # higher numbers are accumulations of gradients, which belong to the last module
            place = bisect.bisect_right(self._entered, number, key=lambda entry: entry[0])
            self._last = self._entered[place - 1][1] if place else ""
        return self._last

    def _enter(self, module: nn.Module, inputs) -> None:
        self._modules.append(self._names.get(id(module), type(module).__name__))
        self._entered.append((torch.autograd._get_sequence_nr(), self._modules[-1]))

    def _leave(self, module: nn.Module, inputs, outputs) -> None:
        if self._modules:
            self._modules.pop()
        outer = self._modules[-1] if self._modules else ""
        self._entered.append((torch.autograd._get_sequence_nr(), outer))

    def open(self) -> None:
        self._handles = [
            global_hooks.register_module_forward_pre_hook(self._enter),
            # always_call: activation checkpointing ends its second forward with an exception.
            global_hooks.register_module_forward_hook(self._leave, always_call=True),
        ]

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
