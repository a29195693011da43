"""An engine and plain PyTorch side by side: most properties of values are a few lines about such a pair."""

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from harness.measure.memory import storage_bytes
from harness.properties import parts
from harness.properties.property import Subject, same

EXACT = 1e-12  # in float64, where another order of a sum makes some 1e-15


def of_output(model, inputs, targets) -> torch.Tensor:
    return F.cross_entropy(model(inputs), targets)


def inside(model) -> nn.Module:
    """The model, of an engine or as it is."""
    return getattr(model, "model", model)


class Pair:
    """`trained` is the engine under test; `plain` has the same start, and its step is on the batches of all ranks.

    Plain PyTorch adds up the gradients of the ranks' losses, each divided by N, so a loss may be any function
    `loss(model, *batch)` of the model (on the other side: of the engine). `batch(step, rank)` is another for every step
    and rank. `groups(model)` gives the optimizer's groups. The model is in float64, unless `dtype` says otherwise
    (None: as it was built), and values agree to `atol`.
    """

    def __init__(
        self, engine: Subject, build: Callable[[], nn.Module], optimizer=parts.MOMENTUM, *, loss=of_output,
        batch=parts.token_batch, groups=None, dtype=torch.float64, atol: float = EXACT, seed: int = 0, **options,
    ):  # fmt: skip
        self.engine, self.loss, self.batch, self.atol = engine, loss, batch, atol
        group = options.get("group")
        if isinstance(group, DeviceMesh):  # on a grid of two dimensions all ranks train together
            group = group.get_group() if group.ndim == 1 else None
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.plain, model = parts.seeded(build, seed, dtype), parts.seeded(build, seed, dtype)
        params = [param for param in self.plain.parameters() if param.requires_grad]
        self.optimizer = optimizer(groups(self.plain) if groups else params)
        more = {"param_groups": groups(model)} if groups else {}
        self.trained = engine(model, optimizer, **more, **options)

    @property
    def both(self):
        """(model, optimizer) of both sides, for what a loop does to each alike: schedulers, modes, flags."""
        return (self.plain, self.optimizer), (self.trained.model, self.trained.optimizer)

    def backward(self, step: int, *, loss=None, scale: float = 1.0, inside=contextlib.nullcontext) -> torch.Tensor:
        """Forward and backward of both; returns this rank's loss. `inside` is a context for the engine's alone."""
        loss, expected = loss or self.loss, []
        for other in range(self.size):
            expected.append(loss(self.plain, *self.batch(step, other)) * scale)
            (expected[-1] / self.size).backward()
        with inside():
            found = loss(self.trained, *self.batch(step, self.rank)) * scale
            found.backward()
        same("this rank's loss", found, expected[self.rank], self.atol, step=1)
        self.nothing_gathered("backward", 2)
        return found

    def backward_by(self, way: Callable, step: int) -> None:
        """`way(model, batch, scale)` does the backwards of a step itself, of losses that it multiplies by `scale`."""
        for other in range(self.size):
            way(self.plain, self.batch(step, other), 1 / self.size)
        way(self.trained, self.batch(step, self.rank), 1)
        self.nothing_gathered(way.__name__, 2)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Both clip; the norms are the same, and returned."""
        expected = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm, norm_type)
        norm = self.trained.clip_grad_norm_(max_norm, norm_type)
        same("the gradients' norm", norm, expected, self.atol * max(1.0, expected.item()), step=3)
        return norm

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.trained.step()
        self.nothing_gathered("the step", 5)
        self.trained.zero_grad()

    def scaled_step(self, step: int, scaler, max_norm: float, skipped=False, spoil=lambda trained: None) -> None:
        """Backward and step of both, with a scaled loss and clipping. A step that overflows is to be `skipped`.

        `spoil` is called with the engine before its gradients are unscaled.
        """
        scale = scaler.scale(torch.ones((), dtype=torch.float64))
        self.backward(step, scale=scale)
        spoil(self.trained)
        scaler.unscale_(self.trained)
        for param in self.plain.parameters():
            param.grad = None if skipped or param.grad is None else param.grad / scale
        if skipped:
            self.trained.clip_grad_norm_(max_norm)  # nobody knows what it will be: all ranks call it
        else:
            self.clip(max_norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        scaler.step(self.trained)
        scaler.update()
        self.nothing_gathered("the step", 5)
        self.trained.zero_grad()

    def train(self, steps: int, **how) -> None:
        for step in range(steps):
            self.backward(step, **how)
            self.step()

    def alike(self, steps: int = 2, **how) -> None:
        """Both train, to the same weights."""
        self.train(steps, **how)
        self.same_weights()

    def alone(self, step: int = 9) -> torch.Tensor:
        """A forward of the engine's alone: this rank's loss."""
        return self.loss(self.trained, *self.batch(step, self.rank))

    def step_alone(self) -> None:
        self.alone().backward()
        self.trained.step()

    def same_weights(self) -> None:
        """All ranks take part."""
        found = self.trained.full_state_dict()
        same("the weights", found, {n: v.cpu() for n, v in self.plain.state_dict().items()}, self.atol, step=5)

    def nothing_gathered(self, after: str, step: int) -> None:
        """ZeRO-3 has freed all units, and the root."""
        if self.engine.like == "zero3" and not getattr(self, "keeps", False):
            nbytes = storage_bytes(self.trained.model.parameters())
            same(f"bytes of parameters that are gathered after {after}", nbytes, 0, step=step)
