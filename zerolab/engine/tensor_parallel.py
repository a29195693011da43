"""Tensor parallelism, whose parameters are split already, and torch's pipelines, which call an engine.

**Tensor parallelism.** `parallelize_module` makes a parameter a DTensor over one dimension of a mesh: each rank of that
dimension has a part of the matrix and computes with it. An engine shards this local part over another dimension:
`ZeRO3Engine(model, optimizer, group=mesh["data"])`. FSDP2 can be combined with it in the same way. For a plain
parameter, the functions here return their argument unchanged.

**Pipelines.** A stage of `torch.distributed.pipelining` calls a module, so wrap the engine:
`PipelineStage(AsModule(engine), ...)`. By default a schedule divides each `param.grad` by the number of micro-batches
after all backwards. By then ZeRO-2 and -3 have moved the gradients into the shards, so this raises an error. Pass
`scale_grads=False` to the schedule, and divide the loss by the number of micro-batches.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


class AsModule(nn.Module):
    """An engine as a module: its forward is `engine(...)`."""

    def __init__(self, engine):
        super().__init__()
        self.model = engine.model
        self.engine = engine

    def forward(self, *args, **kwargs):
        return self.engine(*args, **kwargs)


def local(param):
    """The part of `param` that this rank computes with: a plain tensor."""
    return param._local_tensor if isinstance(param, DTensor) else param


def local_gradient(gradient):
    """Like `local`, for a gradient. If it is a partial sum, the ranks of its mesh add it up first."""
    if not isinstance(gradient, DTensor):
        return gradient
    summed = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    return gradient.redistribute(placements=summed)._local_tensor


def gather_whole(param, part):
    """The whole values of `param`, of which this rank has `part`. A collective over the tensor dimension."""
    if not isinstance(param, DTensor):
        return part
    split = DTensor.from_local(part, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())
    return split.full_tensor()


def take_part(param, values):
    """This rank's part of the whole `values` of `param`."""
    if not isinstance(param, DTensor):
        return values
    mesh, placements = param.device_mesh, param.placements
    split = distribute_tensor(values.to(param.device), mesh, placements, src_data_rank=None)  # nothing is sent
    return split.to_local()


def mesh_of(params):
    """The mesh of the tensor dimension; None if no parameter is split."""
    return next((param.device_mesh for param in params if isinstance(param, DTensor)), None)


def is_counted(param, mesh):
    """Whether a sum over the tensor dimension includes this rank's part of `param`. Replicated parts count once."""
    is_split = isinstance(param, DTensor) and any(isinstance(placement, Shard) for placement in param.placements)
    return mesh is None or is_split or mesh.get_local_rank() == 0


def gather_over(mesh, value):
    """One 0-d value from every rank of the tensor dimension, stacked. A collective."""
    if mesh is None:
        return value.reshape(1)
    values = [torch.empty_like(value) for _ in range(mesh.size())]
    dist.all_gather(values, value, group=mesh.get_group())
    return torch.stack(values)


def check_split(model, group, param_dtype):
    """Raise ValueError for DTensors that an engine cannot shard."""
    ranks = set(dist.get_process_group_ranks(group or dist.group.WORLD))
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            continue
        if param.device_mesh.ndim > 1 or len(ranks.intersection(param.device_mesh.mesh.flatten().tolist())) > 1:
            raise ValueError(
                f"parameter {name!r} is a DTensor that is sharded over the same ranks already. An engine can shard "
                "over another dimension of the mesh: pass group=mesh['its name'], or build a new model"
            )
        if any(placement.is_partial() for placement in param.placements):
            raise ValueError(f"parameter {name!r} is a partial sum ({param.placements}): redistribute it first")
        if param_dtype not in (None, param.dtype):
            raise ValueError(
                f"parameter {name!r} is a DTensor of {param.dtype}, and param_dtype={param_dtype} would change it: "
                "leave param_dtype out, or cast the model before parallelize_module"
            )
