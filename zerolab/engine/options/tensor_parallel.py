"""Parameters that torch's tensor parallelism has cut already, in another dimension of the mesh.

`parallelize_module` makes a parameter a DTensor: each rank of the tensor dimension has a part of the matrix and
computes with it. A stage shards this **local** part over the data dimension, as it shards a whole parameter elsewhere.
For a plain parameter everything here gives back what it gets.

Source: torch's `torch.distributed.tensor.parallel`; FSDP2 composes with it in the same way.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def local(param: torch.Tensor) -> torch.Tensor:
    """The part of `param` that this rank computes with: a plain tensor."""
    return param._local_tensor if isinstance(param, DTensor) else param


def local_gradient(gradient: DTensor) -> torch.Tensor:
    """As `local`, of a gradient. torch may leave it as parts of a sum: then the ranks add them up first."""
    whole = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    return gradient.redistribute(placements=whole)._local_tensor


def whole(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The whole values of `param`, of which this rank has `part`. A collective of the tensor dimension."""
    if not isinstance(param, DTensor):
        return part
    cut = DTensor.from_local(part, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())
    return cut.full_tensor()


def part(param: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """This rank's part of the whole `values` of `param`."""
    if not isinstance(param, DTensor):
        return values
    # Without a source rank nothing is sent: every rank has the values.
    return distribute_tensor(
        values.to(param.device), param.device_mesh, param.placements, src_data_rank=None
    ).to_local()


def dimension(buckets):
    """The mesh of the tensor dimension, or None where no parameter of `buckets` was cut."""
    for bucket in buckets:
        for param in bucket.params:
            if isinstance(param, DTensor):
                return param.device_mesh
    return None


def counts(param: torch.Tensor, mesh) -> bool:
    """Whether this rank's part of `param` belongs in a sum over the tensor dimension. What all have counts once."""
    cut = isinstance(param, DTensor) and any(isinstance(placement, Shard) for placement in param.placements)
    return mesh is None or cut or mesh.get_local_rank() == 0


def over_dimension(value: torch.Tensor, mesh) -> torch.Tensor:
    """The values (0-d) of all ranks of the tensor dimension: (their number,). A collective."""
    if mesh is None:
        return value.reshape(1)
    everyone = value.new_empty(mesh.size())
    dist.all_gather_single(everyone, value.reshape(1), group=mesh.get_group())
    return everyone


def check(model, group, dtypes) -> None:
    """Raises ValueError for DTensors among the parameters that cannot be sharded once more."""
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            continue
        ranks = set(dist.get_process_group_ranks(group))
        if param.device_mesh.ndim > 1 or len(ranks.intersection(param.device_mesh.mesh.flatten().tolist())) > 1:
            raise ValueError(
                f"parameter {name!r} is a DTensor, sharded by something else over the same ranks. A stage may shard "
                "over *another* dimension of the mesh what tensor parallelism has cut: pass group=mesh['its name']. "
                "Else build a new model"
            )
        if any(placement.is_partial() for placement in param.placements):
            raise ValueError(f"parameter {name!r} is a part of a sum ({param.placements}): redistribute it first")
        if dtypes[0] not in (None, param.dtype):
            raise ValueError(
                f"parameter {name!r} is a DTensor, and param_dtype={dtypes[0]} would need another one: leave "
                "param_dtype out with tensor parallelism, or cast the whole model before parallelize_module"
            )
