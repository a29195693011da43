"""Loss scaling for float16: the ranks decide together whether a step is skipped.

Small gradients are zero in float16, so the loss is multiplied by a large scale before backward, and the gradients are
divided by it afterwards. If a gradient overflows, the step is skipped and the scale is halved. After step 3 only one
rank has the overflow in its shard. torch's own scaler would skip the step on this rank and take it on the others, so
the weights would diverge. Here all ranks make the same decision, which costs an all-reduce of 4 bytes.

FSDP1 has `ShardedGradScaler` for this. FSDP2 uses DTensors, for which torch's own scaler works.
"""

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from zerolab.engine import accelerator, tensor_parallel


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for an engine. Pass the engine where torch's scaler expects the optimizer:

    scaler = GradScaler()
    scaler.scale(loss).backward()
    scaler.unscale_(engine)         # only if gradients are clipped
    engine.clip_grad_norm_(1.0)
    scaler.step(engine)             # on all ranks, or on none
    scaler.update()
    engine.zero_grad()
    """

    # The methods below read and write private state of torch's scaler (`_found_inf_per_device`, the stage of an
    # optimizer), because it has no public way to set the decision that its `update` uses.

    def __init__(self, device=None, **options):
        super().__init__(device or accelerator.kind(), **options)

    def unscale_(self, engine):
        """Divide the gradients by the scale, and check whether any rank has an infinite one. A collective."""
        if not self.is_enabled():
            return
        engine.reduce_gradients()
        device = engine.buckets[0].flat.device
        overflow = torch.zeros((), dtype=torch.float32, device=device)
        for optimizer in engine.optimizers:
            super().unscale_(optimizer)
            for flag in self._found_inf_per_device(optimizer).values():  # none on a rank that owns only padding
                overflow = torch.maximum(overflow, flag.to(device))
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=engine.options.all_ranks)
        mesh = tensor_parallel.mesh_of(engine.model.parameters())
        overflow = tensor_parallel.gather_over(mesh, overflow).amax()
        self._found_inf_per_device(engine.optimizers[0])[device] = overflow  # `update` takes the largest of all flags

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        """torch's method, with the scale on the device of the gradients, which is the host with offload.

        torch itself copies the scale from the GPU to pinned memory without waiting, so the host may read it too early.
        """
        pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
        device = pieces[0].device if pieces else inv_scale.device
        return super()._unscale_grads_(optimizer, inv_scale.to(device), found_inf.to(device), allow_fp16)

    def step(self, engine):
        """`engine.step()`, unless a rank has an infinite gradient. Calls `unscale_` first if you did not."""
        if not self.is_enabled():
            return engine.step()
        first = engine.optimizers[0]  # `unscale_` stores the decision of all ranks at this optimizer
        if self._per_optimizer_states[id(first)]["stage"] is OptState.STEPPED:
            raise RuntimeError("step() was called already since the last update(): call scaler.update() in between")
        if not self._found_inf_per_device(first):
            self.unscale_(engine)
        if not any(flag.item() for flag in self._found_inf_per_device(first).values()):
            engine.step()
        self._per_optimizer_states[id(first)]["stage"] = OptState.STEPPED
