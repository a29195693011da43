"""An engine and plain PyTorch side by side: most properties of values are a few lines about such a pair."""

import contextlib
import copy
import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from harness.measure.held import storage_bytes
from harness.properties.fixtures import MOMENTUM, of_all_ranks, seeded, token_batch, vector_batch
from harness.properties.property import Subject, expect, same

EXACT = 1e-12  # in float64, where another order of a sum makes some 1e-15


def of_output(model, inputs, targets) -> torch.Tensor:
    return F.cross_entropy(model(inputs), targets)


def model_of(model) -> nn.Module:
    """The model, of an engine or as it is."""
    return getattr(model, "model", model)


def of_vectors(model, inputs, targets) -> torch.Tensor:
    return F.mse_loss(model(inputs), targets)


def vectors(width: int) -> Callable:
    """`batch(step, rank)` of vectors, in float64."""
    return functools.partial(vector_batch, width=width, dtype=torch.float64)


def _moved(batch: Callable, dtype: torch.dtype | None, device, step: int, rank: int) -> tuple[torch.Tensor, ...]:
    """The batch on the device (None: where it is), and what is no whole number in `dtype` (None: as it is)."""
    found = []
    for part in batch(step, rank):
        if torch.is_tensor(part):
            part = part.to(device=device, dtype=dtype if part.is_floating_point() else None)
        found.append(part)
    return tuple(found)


class Pair:
    """`trained` is the engine under test; `plain` has the same start, and its step is on the batches of all ranks.

    Plain PyTorch adds up the gradients of the ranks' losses, each divided by N, so a loss may be any function
    `loss(model, *batch)` of the model (on the other side: of the engine). `batch(step, rank)` is another for every step
    and rank. `build` makes the model of either side, or is (the plain one, the engine's). `groups(model)` gives the
    optimizer's groups. The model is in float64, unless `dtype` says otherwise (None: as it was built), and values agree
    to `atol`. With a `param_dtype` a rounded copy of `plain` computes.
    """

    def __init__(self, engine: Subject, build, optimizer=MOMENTUM, *, loss=of_output, batch=token_batch, groups=None,
                 dtype=torch.float64, atol: float = EXACT, seed: int = 0, device=None, **options):  # fmt: skip
        other = None
        if dtype is torch.float64 and engine.dtype is not dtype:  # it does not train in float64
            dtype = other = engine.dtype
            atol = max(atol, engine.atol)
        self.engine, self.loss, self.atol = engine, loss, atol
        self.keeps = False  # units may stay gathered
        self.batch = functools.partial(_moved, batch, other, device)
        group = options.get("group")
        if isinstance(group, DeviceMesh):  # on a grid of two dimensions all ranks train together
            group = group.get_group() if group.ndim == 1 else None
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        built = build if isinstance(build, tuple) else [seeded(build, seed, dtype, device) for _ in range(2)]
        self.plain, model = (each.to(dtype) for each in built)
        params = [param for param in self.plain.parameters() if param.requires_grad]
        self.optimizer = optimizer(groups(self.plain) if groups else params)
        low = options.get("param_dtype")
        self.computes = self._rounded(low) if low else self.plain
        more = {"param_groups": groups(model)} if groups else {}
        self.trained = engine(model, optimizer, **more, **options)

    def _rounded(self, dtype: torch.dtype) -> nn.Module:
        """Mixed precision by hand: a copy in `dtype`, which hands each gradient over to `plain` and its dtype."""
        low = copy.deepcopy(self.plain).to(dtype)
        for param, of_low in zip(self.plain.parameters(), low.parameters()):

            def hand_over(of_low, param=param):
                gradient = of_low.grad.to(param.dtype) / self.size
                param.grad = gradient if param.grad is None else param.grad + gradient
                of_low.grad = None

            if param.requires_grad:
                of_low.register_post_accumulate_grad_hook(hand_over)
        return low

    @property
    def both(self):
        """(model, optimizer) of both sides, for what a loop does to each alike: schedulers, modes, flags."""
        return (self.plain, self.optimizer), (self.trained.model, self.trained.optimizer)

    def backward(self, step: int, *, loss=None, scale: float = 1.0, quiet=False) -> torch.Tensor:
        """Forward and backward of both; returns this rank's loss. `quiet`: the engine's under `no_sync`."""
        loss = loss or self.loss
        expected = self.backward_of_plain(step, loss, scale)[self.rank]
        with self.trained.no_sync() if quiet else contextlib.nullcontext():
            found = loss(self.trained, *self.batch(step, self.rank)) * scale
            found.backward()
        same("this rank's loss", found, expected, self.atol)
        self.nothing_gathered("backward")
        return found

    def backward_of_plain(self, step: int, loss=None, scale: float = 1.0) -> list[torch.Tensor]:
        """What is right: one process, plain PyTorch, the backwards of all ranks' losses, which are returned."""
        loss, parts, losses = loss or self.loss, self.size, []
        if self.computes is not self.plain:
            self.computes.load_state_dict(self.plain.state_dict())
            parts = 1  # a rounded gradient is divided when it is handed over
        for rank in range(self.size):
            losses.append(loss(self.computes, *self.batch(step, rank)) * scale)
            (losses[-1] / parts).backward()
        return losses

    def training_step(self, step: int) -> torch.Tensor:
        """A step of both, by `training_step` of the engine. Returns all ranks' losses.

        They are compared on every rank: where one is wrong, no rank waits for another that has left.
        """
        expected = self.backward_of_plain(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        found = self.trained.training_step(*self.batch(step, self.rank), F.cross_entropy)
        expect(not found.requires_grad, "the loss that training_step returns", "detached", "it requires a gradient")
        everyone = of_all_ranks(found)
        same(f"the ranks' losses of step {step}", everyone, torch.stack(expected), self.atol)
        self.nothing_gathered("the step")
        return everyone

    def backward_by(self, way: Callable, step: int) -> None:
        """`way(model, batch, scale)` does the backwards of a step itself, of losses that it multiplies by `scale`."""
        for other in range(self.size):
            way(self.plain, self.batch(step, other), 1 / self.size)
        way(self.trained, self.batch(step, self.rank), 1)
        self.nothing_gathered(way.__name__)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Both clip; the norms are the same, and returned."""
        expected = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm, norm_type)
        norm = self.trained.clip_grad_norm_(max_norm, norm_type)
        what = f"the gradients' norm with norm_type {norm_type:g}"
        same(what, norm, expected, self.atol * max(1.0, expected.item()))
        return norm

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.trained.step()
        self.nothing_gathered("the step")
        self.trained.zero_grad()

    def scaled_step(self, step: int, scaler, max_norm: float | None, skipped=False, spoil=lambda trained: None) -> None:
        """Backward and step of both, with a scaled loss and clipping. A step that overflows is to be `skipped`.

        `spoil` is called with the engine before its gradients are unscaled. Without a `max_norm` nothing is clipped,
        and `scaler.step` unscales.
        """
        scale = scaler.scale(torch.ones((), dtype=torch.float64, device=next(self.plain.parameters()).device))
        self.backward(step, scale=scale)
        spoil(self.trained)
        for param in self.plain.parameters():
            param.grad = None if skipped or param.grad is None else (param.grad / scale).to(param.dtype)
        if max_norm is not None:
            scaler.unscale_(self.trained)
        if max_norm is not None and skipped:
            self.trained.clip_grad_norm_(max_norm)  # nobody knows what it will be: all ranks call it
        elif max_norm is not None:
            self.clip(max_norm)
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()
        scaler.step(self.trained)
        scaler.update()
        self.nothing_gathered("the step")
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
        same("the weights", found, self.plain.state_dict(), self.atol)

    def nothing_gathered(self, after: str) -> None:
        """ZeRO-3 has freed all units, and the root; the chapter leaves frozen parameters whole."""
        if self.engine.like == "zero3" and not self.keeps:
            params = list(self.trained.model.parameters())
            if self.engine.chapter:
                params = [param for param in params if param.requires_grad]
            same(f"bytes of parameters that are gathered after {after}", storage_bytes(params), 0)
