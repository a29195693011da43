"""Gradients after step 3: unused, clipped, scaled. Plain functions over an engine or its buckets."""

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from zerolab.engine import accelerator
from zerolab.engine.options import tensor_parallel
from zerolab.engine.options.precision import common_dtype
from zerolab.engine.safety.waiting import waiting_for


def drop_unused(buckets, group) -> None:
    """Take the gradient, which is zero, from the pieces of parameters that no rank has used.

    Then the optimizer leaves them alone, as in plain PyTorch: no weight decay, no momentum, no state. One
    all-reduce of a byte per parameter; the host waits for its result.
    """
    used = []
    for bucket in buckets:
        used += [index in bucket.used for index in range(len(bucket.params))]
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
    engine.reduce_gradients()
    buckets = engine.buckets
    dtype, cut = common_dtype(buckets), tensor_parallel.dimension(buckets)
    norms = [buckets[0].shard.new_zeros((), dtype=dtype)]  # for a rank that owns only padding
    for bucket in buckets:
        for index, piece in bucket.numbered(bucket.pieces):
            if piece.grad is not None and tensor_parallel.counts(bucket.params[index], cut):
                norms.append(torch.linalg.vector_norm(piece.grad, norm_type).to(dtype))
    if len(norms) > 1:
        norms.pop(0)
    local = torch.linalg.vector_norm(torch.stack(norms), norm_type).to(buckets[0].flat.device)
    # All values and not their all-reduced maximum: a maximum may lose a NaN.
    everyone = local.new_empty(engine.world_size)  # replicas have the same shards
    with waiting_for("the all-gather of the gradients' norms"):
        dist.all_gather_single(everyone, local.reshape(1), group=engine.group)
    total = torch.linalg.vector_norm(everyone, norm_type)
    total = torch.linalg.vector_norm(tensor_parallel.over_dimension(total, cut), norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as torch does; NaN stays NaN
    scale(buckets, factor)
    return total


def _gradients(buckets) -> list[torch.Tensor]:
    """All gradients that were reduced, each once: ZeRO-1's pieces have views of a whole buffer.

    A later backward adds to all of that buffer.
    """
    found = [bucket.gradient for bucket in buckets if bucket.gradient is not None]
    storages = {buffer.untyped_storage()._cdata for buffer in found}
    for bucket in buckets:
        for piece in bucket.pieces:
            if piece.grad is not None and piece.grad.untyped_storage()._cdata not in storages:
                found.append(piece.grad)
    return found


def scale(buckets, factor: torch.Tensor) -> None:
    """Multiply all gradients, which were reduced, by `factor` (0-d)."""
    for gradient in _gradients(buckets):
        gradient.mul_(factor.to(gradient.device))


def clip_grad_value_(engine, clip_value: float) -> None:
    """Between backward and `step()`: every element of the gradients that is not within +-clip_value moves to its edge.

    As `torch.nn.utils.clip_grad_value_` for the whole model. All ranks call it, for the gradients are reduced first.
    """
    engine.reduce_gradients()
    for gradient in _gradients(engine.buckets):
        gradient.clamp_(-clip_value, clip_value)


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
