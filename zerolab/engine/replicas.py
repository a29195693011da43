"""Hybrid sharding: shard inside a node, replicate across nodes.

The ranks form a grid, a `DeviceMesh` of two dimensions. The ranks of a row shard the model. The ranks of a column are
**replicas**, which have the same shard. Gathers stay in one row of the grid, for example inside one node, where the
network is fast. Gradients must cross rows: once each row has reduced its gradients, an all-reduce averages each shard
over its replicas.

                     shard 0   shard 1   shard 2   shard 3
    replica 0        rank 0    rank 1    rank 2    rank 3     gather and reduce-scatter along the rows
    replica 1        rank 4    rank 5    rank 6    rank 7     all-reduce along the columns: 1/4 of the elements

The cost: each row holds the whole model once, so memory is divided by the length S of a row, and not by the number of
ranks. Across the nodes a rank sends 2Ψ/S elements per step instead of 3Ψ.

`fully_shard(mesh=...)` with a mesh of two dimensions does the same, and so does FSDP1's HYBRID_SHARD. The paper is MiCS
(Zhang et al., 2022). FSDP2 runs the all-reduce on a separate stream. Here backward waits for the all-reduce.
"""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero1 import broadcast_whole
from zerolab.engine.precision import divisors
from zerolab.engine.together import make_group


def groups_of(group):
    """(ranks to shard over, replicas or None, ranks of both) of a process group or a DeviceMesh.

    Raises ValueError for a mesh of more than two dimensions, and on a rank that is not in the mesh.
    """
    if not isinstance(group, DeviceMesh):
        return group, None, group
    if group.ndim > 2:
        raise ValueError(
            f"group is a DeviceMesh of {group.ndim} dimensions. An engine shards over one dimension, or shards over "
            "one and replicates over another: pass mesh['its name'] or mesh['replicas', 'shards']"
        )
    if group.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not in the DeviceMesh: only its own ranks build the engine")
    if group.ndim == 1:
        return group.get_group(), None, group.get_group()
    shards, copies = group.get_group(1), group.get_group(0)
    all_ranks = None  # the default group, if the mesh has all ranks
    if group.size() < dist.get_world_size():
        all_ranks = make_group(group.mesh.flatten().tolist(), [shards, copies])
    return shards, copies, all_ranks


def broadcast_over(replicas, tensors):
    """Step 0: all replicas start with the values of the first one."""
    if replicas is not None:
        broadcast_whole(tensors, replicas)


def average_over(replicas, shard):
    """Step 3: the mean of `shard` over the replicas, in place."""
    if replicas is not None:
        before, after = divisors(shard.dtype, dist.get_world_size(replicas))
        shard /= before
        dist.all_reduce(shard, group=replicas)
        shard /= after
    return shard
