"""Gradients around step 3: kept by `no_sync`, missing, unused, clipped, scaled.

Plain functions over an engine or its buckets (see `zero1.Bucket`). Each bucket of trained parameters has

    used      the parameters (by their number in the bucket) that got a gradient since `zero_grad()`
    missing   those whose gradient the backward under way has still to finish (where buckets are sent during backward)
    kept      {parameter's number: its whole gradient} of earlier backwards, under `no_sync`
"""

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from harness.engine import accelerator
from harness.engine.options import tensor_parallel
from harness.engine.options.precision import common_dtype
from harness.engine.safety import guard
from harness.engine.safety.waiting import name_some, waiting_for


def take(bucket) -> list[torch.Tensor]:
    """The whole gradient of each parameter of `bucket`; `param.grad` is None from now on.

    What `no_sync` has kept of earlier backwards is added. A parameter without a gradient (`find_unused`) sends a zero.
    """
    with torch._C.DisableTorchFunctionSubclass():  # quick, also for freed parameters
        gradients = [guard.take_gradient(param) for param in bucket.params]
    for index, kept in bucket.kept.items():
        gradients[index] = kept if gradients[index] is None else kept.add_(gradients[index])
    bucket.kept = {}
    return [
        bucket.flat.new_zeros(()).expand(shape) if gradient is None else gradient
        for gradient, shape in zip(gradients, bucket.shapes)
    ]


def keep(bucket, index: int) -> None:
    """Under `no_sync`: move `param.grad` to `bucket.kept`, where several backwards add up in the reduce dtype."""
    gradient = guard.take_gradient(bucket.params[index]).to(bucket.reduce_dtype)
    if index in bucket.kept:
        bucket.kept[index].add_(gradient)
    else:
        bucket.kept[index] = gradient


def refuse_wrong(bucket, index: int) -> None:
    """Raise RuntimeError for a gradient that would be reduced wrongly: it came a second time, or it is sparse."""
    if index not in bucket.missing:
        raise RuntimeError(
            f"a second gradient of {bucket.names[index]!r} came before its bucket was reduced: the backward before "
            "this one was interrupted, or left a parameter without a gradient. Several losses of one forward: call "
            "backward on their sum, or all but the last under engine.no_sync(). A step that leaves parameters unused: "
            "build the engine with find_unused=True. After an error: call engine.zero_grad() before the next forward"
        )
    if guard.gradient_of(bucket.params[index]).layout is not torch.strided:
        refuse_sparse(bucket, index)


def refuse_sparse(bucket, index: int) -> None:
    raise RuntimeError(f"the gradient of {bucket.names[index]!r} is sparse; build its embedding with sparse=False")


def require_all(engine) -> None:
    """The end of step 3: every trained parameter has its gradient, or is left alone by the update.

    Raises RuntimeError for parameters that the step left without a gradient, unless `find_unused`, and for gradients
    that were not reduced, which would otherwise be lost. With `find_unused` a parameter that no rank has used loses
    the zeros that were reduced for it.
    """
    engine.placement.finish_all()
    names, left = [], []  # of parameters that no backward since `zero_grad()` has reached, or not the last one
    for bucket in engine.buckets:
        names += [name for i, name in enumerate(bucket.names) if i not in bucket.used or i in bucket.missing]
        left += [bucket.names[i] for i in (*bucket.kept, *guard.with_gradient(bucket.params))]
    if names and not engine.find_unused:
        raise RuntimeError(
            f"no gradient for {name_some(names)}: the loss does not depend on {'it' if len(names) == 1 else 'them'}, "
            "or no backward() was called since zero_grad() (outside no_sync()). Use every parameter in forward, freeze "
            "those that are not trained with requires_grad_(False) before building the engine, or build it with "
            "find_unused=True"
            + ". (A zero-bubble pipeline computes gradients past autograd's hooks: take 1F1B or GPipe)"
            * bool(left)
        )
    if left:
        raise RuntimeError(
            f"gradients of {name_some(left)} were not reduced: the last backward before step() must run outside "
            "no_sync() and reach the same buckets as those before it, or the engine be built with find_unused=True"
        )
    lost = guard.written([p for b in engine.buckets for p in b.params if b.flat.untyped_storage().nbytes()])
    if lost:
        raise RuntimeError(
            f"{name_some(lost)} was written to before step(), by a forward that writes into its weights or "
            "an optimizer that steps inside backward. The ranks' weights would part: only engine.step() may write"
        )
    if engine.find_unused and not engine.gradients_are_reduced:
        drop_unused(engine.buckets, engine.placement.everyone)
    engine.gradients_are_reduced = True
    if engine.divisor is not None:
        scale(engine.buckets, torch.tensor(1 / engine.divisor, dtype=torch.float64))
        engine.divisor = None


def drop_unused(buckets, group) -> None:
    """Take the gradient, which is zero, from the pieces of parameters that no rank has used.

    Then the optimizer leaves them alone, as in plain PyTorch: no weight decay, no momentum, no state. One
    all-reduce of a byte per parameter; the host waits for its result.
    """
    used = [index in bucket.used for bucket in buckets for index in range(len(bucket.params))]
    used = torch.tensor(used, dtype=torch.uint8, device=buckets[0].flat.device)
    with waiting_for("the all-reduce of which parameters were used (find_unused)"):
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    flags = iter(used.tolist())
    for bucket in buckets:
        # Also by another rank alone: a later backward adds to the mean that ZeRO-1's buffer holds by now.
        bucket.used = {index for index in range(len(bucket.params)) if next(flags)}
        for index, piece in bucket.numbered(bucket.pieces):
            if index not in bucket.used:
                piece.grad = None


def clip_grad_norm_(engine, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Between backward and `step()`: scale the gradients so that their norm is at most `max_norm`. A collective.

    Returns the norm before, a 0-d tensor that is the same on every rank: what `torch.nn.utils.clip_grad_norm_` gives
    for the whole model. Padding does not count, a tied parameter counts once, a NaN or inf on one rank is seen by all.
    """
    if not isinstance(max_norm, (int, float, torch.Tensor)):
        raise TypeError(
            f"an engine's clip_grad_norm_ takes the norm alone, as engine.clip_grad_norm_(1.0), got {type(max_norm)}"
        )
    if not isinstance(max_norm, torch.Tensor) and not max_norm >= 0:  # not a number is refused, too
        raise ValueError(f"max_norm must be 0 or more, got {max_norm}")
    engine.reduce_gradients()
    buckets = engine.buckets
    found = [(piece.grad, b.params[i]) for b in buckets for i, piece in b.numbered(b.pieces) if piece.grad is not None]
    dtype, cut = common_dtype(buckets), tensor_parallel.dimension(buckets)
    counted = [gradient for gradient, param in found if tensor_parallel.counts(param, cut)]
    norms = [torch.linalg.vector_norm(gradient, norm_type).to(dtype) for gradient in counted]
    none, device = buckets[0].shard.new_zeros((), dtype=dtype), buckets[0].flat.device
    local = (torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else none).to(device)
    # All values and not their all-reduced maximum: a maximum may lose a NaN.
    everyone = local.new_empty(engine.world_size)  # replicas have the same shards
    with waiting_for("the all-gather of the gradients' norms"):
        dist.all_gather_single(everyone, local.reshape(1), group=engine.group)
    total = torch.linalg.vector_norm(everyone, norm_type)
    total = torch.linalg.vector_norm(tensor_parallel.over_dimension(total, cut), norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as torch does; NaN stays NaN
    scale(buckets, factor)
    return total


def scale(buckets, factor: torch.Tensor) -> None:
    """Multiply all gradients, which were reduced, by `factor` (0-d)."""
    # ZeRO-1's gradients are views of a whole buffer, to which a later backward adds: all of it is scaled.
    buffers = [bucket.gradient for bucket in buckets if bucket.gradient is not None]
    storages = {buffer.untyped_storage()._cdata for buffer in buffers}
    for piece in (piece for bucket in buckets for piece in bucket.pieces if piece.grad is not None):
        if piece.grad.untyped_storage()._cdata not in storages:
            piece.grad.mul_(factor.to(piece.grad.device))
    for buffer in buffers:
        buffer.mul_(factor)


def clip_grad_value_(engine, clip_value: float) -> None:
    """Between backward and `step()`: every element of the gradients that is not within +-clip_value moves to its edge.

    As `torch.nn.utils.clip_grad_value_` for the whole model. All ranks call it, for the gradients are reduced first.
    """
    if not isinstance(clip_value, (int, float)):
        raise TypeError(
            "an engine's clip_grad_value_ takes the value alone, as in engine.clip_grad_value_(1.0), got "
            f"{type(clip_value)}"
        )
    if not clip_value >= 0:
        raise ValueError(f"clip_value must be 0 or more, got {clip_value}")
    engine.reduce_gradients()
    for bucket in engine.buckets:
        if bucket.gradient is not None:  # ZeRO-1's, whole: a later backward adds to it
            bucket.gradient.clamp_(-clip_value, clip_value)
        for piece in bucket.pieces:
            if piece.grad is not None:
                piece.grad.clamp_(-clip_value, clip_value)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for float16 (its documentation has the why), over an engine in place of an optimizer:

        scaler = GradScaler()          # or with the options of torch's
        scaler.scale(loss).backward()
        scaler.unscale_(engine)        # if the gradients are to be clipped
        engine.clip_grad_norm_(1.0)
        scaler.step(engine)            # all ranks, or none
        scaler.update()
        engine.zero_grad()

    After step 3 an inf lies in one rank's shard alone. torch's own scaler would skip the step there and nowhere else,
    and the ranks would part; here the verdict is that of all ranks, for one all-reduce of 4 bytes.
    """

    def __init__(self, device: str | None = None, **options):
        super().__init__(device or accelerator.kind(), **options)

    def unscale_(self, engine) -> None:
        """Divide the gradients by the scale, and find out whether some rank has an inf or NaN. A collective."""
        _require_engine(engine)
        if not self.is_enabled():
            return
        engine.reduce_gradients()
        super().unscale_(engine.optimizer)
        found = self._found_inf_per_device(engine.optimizer)  # nothing on a rank that owns only padding
        device = engine.buckets[0].flat.device
        nothing = torch.zeros((), dtype=torch.float32, device=device)
        anywhere = torch.stack([nothing, *(flag.to(device) for flag in found.values())]).amax()
        with waiting_for("the all-reduce of whether gradients are finite"):
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=engine.group)
        cut = tensor_parallel.dimension(engine.buckets)
        found[device] = tensor_parallel.over_dimension(anywhere, cut).amax()

    def step(self, engine) -> None:
        """`engine.step()`, unless a gradient on some rank is inf or NaN. Unscales first if that was not done."""
        _require_engine(engine)
        if not self.is_enabled():
            return engine.step()
        state = self._per_optimizer_states[id(engine.optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() was called already since the last update(): call scaler.update() in between")
        if not self._found_inf_per_device(engine.optimizer):
            self.unscale_(engine)
        if not any(flag.item() for flag in self._found_inf_per_device(engine.optimizer).values()):
            engine.step()
        state["stage"] = OptState.STEPPED


def _require_engine(engine) -> None:
    if not hasattr(engine, "all_buckets"):
        raise TypeError(f"expected the engine, got {type(engine).__name__}: the ranks must decide together")
