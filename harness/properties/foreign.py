"""Engines that are not ours, under the names that properties call: each used as its own documentation says.

What an engine documents nothing of is `NotApplicable`: there is nothing that could be right or wrong.
"""

import contextlib

import torch
from torch import nn

from harness.properties.property import NotApplicable


class Foreign:
    """`engine`, anything with `model`, `optimizer`, and a step, called `name`."""

    def __init__(self, name: str, engine):
        self._name, self._engine = name, engine
        self.optimizer = engine.optimizer
        self.model = getattr(engine.model, "module", engine.model)  # DDP's own is inside of it

    def __call__(self, *args, **kwargs):
        called = self._engine if not kwargs else self._engine.model  # `PlainStep` takes inputs alone
        return called(*args, **kwargs)

    def step(self) -> None:
        self._engine.step()

    def zero_grad(self) -> None:
        self._engine.zero_grad()

    def training_step(self, inputs, targets, loss_fn) -> torch.Tensor:
        return self._engine.training_step(inputs, targets, loss_fn)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """{name: whole tensor on the CPU}. Who shards parameters in a way of its own has this method, too."""
        if hasattr(self._engine, "full_state_dict"):
            return self._engine.full_state_dict()
        state = self.model.state_dict()
        return {name: whole(value).detach().cpu().clone() for name, value in state.items()}

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """torch's own, which DDP and FSDP2 are used with."""
        if hasattr(self._engine, "clip_grad_norm_"):
            return self._engine.clip_grad_norm_(max_norm, norm_type)
        if hasattr(self._engine, "held_tensors"):
            raise NotApplicable(f"{self._name} clips by its configuration, and not by a call")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
        return whole(norm)

    @contextlib.contextmanager
    def no_sync(self):
        """DDP's `no_sync`, FSDP2's `set_requires_gradient_sync`."""
        model = self._engine.model
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)
        elif hasattr(model, "no_sync") or hasattr(self._engine, "no_sync"):
            with (model if hasattr(model, "no_sync") else self._engine).no_sync():
                yield
        else:
            raise NotApplicable(f"{self._name} has no way to keep gradients unsent")

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotApplicable(f"{self._name} documents nothing like `{name}`")


def whole(value: torch.Tensor) -> torch.Tensor:
    """A DTensor's whole value, of which this rank has a part. A collective."""
    return getattr(value, "full_tensor", lambda: value)()
