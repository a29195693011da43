"""Faults in a step, and freed weights: clear errors, and training goes on."""

import contextlib
import copy
import io

import torch
from torch import nn
from torch.nn import functional as F

from harness.measure.traffic import TrafficLedger
from harness.properties.fixtures import ADAMW, OddModel, odd, own_tokens, seeded
from harness.properties.property import ask, ask_thorough, holds, refused, same
from harness.properties.training import Pair
from harness.properties.unused import forked


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


@holds(
    "life",
    ask(more_ranks=(1, 3)),
    ask("zero2", more_ranks=(1, 3), bucket_mb=0),
    ask(more_ranks=(1, 3), build=forked),
    ask_thorough(ranks=(1, 2, 3), find_unused=True),
    of_stages=True,
)
def faults_reach_the_caller_and_training_goes_on(engine, build=None, **options):
    """An exception anywhere in a step reaches the caller as it is; after `zero_grad` training goes on.

    Also where buckets wait for gradients of unused parameters, which do not come.
    """
    pair = build(engine, ADAMW) if build else Pair(engine, OddModel, ADAMW, **options)
    for step, where in enumerate((None, "forward", "loss", "backward", "no_sync", "forward")):
        if where:
            refused(lambda where=where: trip(pair, where), f"tripped in {where}", error=ZeroDivisionError)
        if where == "forward":
            pair.nothing_gathered("a fault in forward")
        if where == "backward":  # before that nothing was accumulated: the next step works as it is
            # In ZeRO-1, and where each parameter has a bucket, gradients add up whatever came before, as in torch.
            if engine.like in ("zero2", "zero3") and "bucket_mb" not in options:
                words = "backward", "engine.zero_grad()"
                refused(lambda: pair.alone(0).backward(), *words, error=RuntimeError)
            with TrafficLedger() as traffic:
                pair.trained.zero_grad()
            same("collectives for gradients that are dropped", len(traffic.collectives), 0)
        pair.backward(10 * step)
        pair.step()
    pair.same_weights()


@holds("misuse", ask("zero3", more_ranks=1), of_stages=True)
def looking_at_freed_weights_is_an_error_and_no_crash(engine):
    """Every way to look at or use a freed weight says so and names the way out; what needs no values still answers."""
    trained = odd(engine)
    model, x = trained.model, torch.ones(2, 5, dtype=torch.float64)
    weight, whole = model.blocks[0].up.weight, seeded(OddModel).blocks[0].up.weight
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
            lambda: weight.cpu().sum(),
            lambda: weight[0],
            lambda: weight.copy_(torch.ones_like(weight)),
            lambda: torch.stack([torch.ones(7, 5, dtype=torch.float64), weight]),
            lambda: torch.save(model, io.BytesIO()),
            lambda: model.to(torch.float32),
        ):
            refused(action, "sharded", "full_state_dict", error=RuntimeError)
        for name in ["shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn"]:
            same(f"what a freed weight answers: {name}", getattr(weight, name), getattr(whole, name))
        methods = "__len__ type size stride dim numel element_size is_contiguous is_shared is_inference"
        for name in methods.split():
            same(f"what a freed weight answers: {name}()", getattr(weight, name)(), getattr(whole, name)())
        for of in (weight, torch.empty_like(weight), torch.empty_like(weight, dtype=torch.float64), weight.data):
            same("shape and dtype of what is like a freed weight", (of.shape, of.dtype), (whole.shape, whole.dtype))
        assert isinstance(weight, nn.Parameter) and weight.size(0) == len(whole)
        assert isinstance(weight._version, int) and isinstance(weight.data_ptr(), int)
        same("the bytes under a freed weight", weight.untyped_storage().nbytes(), 0)
        assert len(list(model.parameters())) == len(list(model.named_parameters())) and "OddBlock" in repr(model)
        trained.training_step(*own_tokens(moment), F.cross_entropy)
    OddModel().double().load_state_dict(trained.full_state_dict())
