"""Faults in a step, and freed weights: clear errors, and training goes on."""

import contextlib
import copy
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.measure.traffic import TrafficLedger
from harness.properties import parts
from harness.properties.property import STAGES, holds, refused, same
from harness.properties.training import Pair
from harness.properties.unused import forked

ADAMW = parts.ADAMW


class Trip(torch.autograd.Function):
    """An error in the middle of backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("tripped in backward")


def trip(pair: Pair, where: str) -> None:
    """A forward and a backward of the engine, with an error in one of them or between."""

    def hook(module, args):
        if where == "forward":
            raise ZeroDivisionError("tripped in forward")
        return (Trip.apply(args[0]), *args[1:]) if where == "backward" else None

    handle = pair.trained.model.blocks[1].register_forward_pre_hook(hook)
    try:
        with pair.trained.no_sync() if where == "no_sync" else contextlib.nullcontext():
            loss = pair.alone(0)
            if where in ("loss", "no_sync"):
                raise ZeroDivisionError(f"tripped in {where}")
        loss.backward()
    finally:
        handle.remove()


@holds("life", engines=STAGES, further_sizes=(1, 3),
       cases=({"options": {}}, {"options": {"bucket_mb": 0}, "on": ("zero2",)}, {"options": {}, "build": forked}),
       further_cases=({"options": {"find_unused": True}},))  # fmt: skip
def faults_reach_the_caller_and_training_goes_on(engine, options, build=None):
    """An exception anywhere in a step reaches the caller as it is; after `zero_grad` training goes on.

    Also where buckets wait for gradients of unused parameters, which do not come.
    """
    pair = build(engine, ADAMW) if build else Pair(engine, parts.OddModel, ADAMW, **options)
    for step, where in enumerate((None, "forward", "loss", "backward", "no_sync", "forward")):
        if where:
            refused(lambda where=where: trip(pair, where), f"tripped in {where}", error=ZeroDivisionError, step=2)
        if where == "forward":
            pair.nothing_gathered("a fault in forward", 1)
        if where == "backward":  # before that nothing was accumulated: the next step works as it is
            # In ZeRO-1, and where each parameter has a bucket, gradients add up whatever came before, as in torch.
            if engine.like in ("zero2", "zero3") and "bucket_mb" not in options:
                words = "backward", "engine.zero_grad()"
                refused(lambda: pair.alone(0).backward(), *words, error=RuntimeError, step=2)
            with TrafficLedger() as traffic:
                pair.trained.zero_grad()
            same("collectives for gradients that are dropped", len(traffic.collectives), 0, step=3)
        pair.backward(10 * step)
        pair.step()
    pair.same_weights()


@holds("misuse", engines=("zero3",), further_sizes=(1,))
def looking_at_freed_weights_is_an_error_and_no_crash(engine):
    """Every way to look at or use a freed weight says so and names the way out; what needs no values still answers."""
    trained = engine(parts.seeded(parts.OddModel), ADAMW)
    model, x = trained.model, torch.ones(2, 5, dtype=torch.float64)
    weight, whole = model.blocks[0].up.weight, parts.seeded(parts.OddModel).blocks[0].up.weight
    for moment in range(2):  # right after construction, and after a step
        for action in (
            lambda: model.state_dict(),
            lambda: copy.deepcopy(model),
            lambda: repr(weight),
            lambda: model.blocks[1].up(x),
            lambda: weight.sum(),
            lambda: weight.detach(),
            lambda: weight.data.sum(),
            lambda: weight.numpy(),
            lambda: weight.tolist(),
            lambda: weight.cpu(),
            lambda: weight[0],
            lambda: weight.copy_(torch.ones_like(weight)),
            lambda: torch.stack([torch.ones(7, 5, dtype=torch.float64), weight]),
            lambda: torch.save(model, io.BytesIO()),
            lambda: model.to(torch.float32),
        ):
            refused(action, "sharded", "full_state_dict", error=RuntimeError, step=1)
        for ask in (
            len,
            lambda p: p.type(),
            lambda p: (
                p.data.shape,
                p.data.dtype,
                torch.empty_like(p).shape,
                torch.empty_like(p, dtype=torch.int8).dtype,
            ),
            lambda p: (p.size(), p.size(0), p.stride(), p.dim(), p.numel(), p.element_size(), p.is_contiguous()),
            lambda p: (p.shape, p.dtype, p.device, p.layout, p.ndim, p.requires_grad, p.is_leaf, p.grad, p.grad_fn),
            lambda p: (isinstance(p, nn.Parameter), p.is_shared(), p.is_inference()),
        ):
            same("what a freed weight answers", ask(weight), ask(whole), step=1)
        assert isinstance(weight._version, int) and isinstance(weight.data_ptr(), int)
        same("the bytes under a freed weight", weight.untyped_storage().nbytes(), 0, step=1)
        assert len(list(model.parameters())) == len(list(model.named_parameters())) and "OddBlock" in repr(model)
        trained.training_step(*parts.token_batch(moment, dist.get_rank()), F.cross_entropy)
    parts.OddModel().double().load_state_dict(trained.full_state_dict())
