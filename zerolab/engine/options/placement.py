"""Where a shard is besides in this rank's own memory: on other ranks (hybrid sharding), and in the host's (offload).

**Hybrid sharding.** The ranks stand in a grid, a DeviceMesh of two dimensions. Along the second one they shard. Along
the first one they are **replicas**: ranks with the same shard. A gather stays in one row of the grid, for example in
one machine. Gradients must cross: once a shard is averaged over its row, an all-reduce averages it over the replicas.

                     shard 0   shard 1   shard 2   shard 3
    replica 0        rank 0    rank 1    rank 2    rank 3     gathers and reduce-scatters along the rows
    replica 1        rank 4    rank 5    rank 6    rank 7     all-reduces along the columns: 1/4 of the elements

**Offload.** Shards, their gradients and the optimizer state are in the host's memory, and the update runs there. A
shard is copied to the device when it is to be gathered, and its gradient comes down while backward goes on.

Sources: FSDP2's `fully_shard(mesh=..., offload_policy=...)`; ZeRO-Offload (Ren et al., 2021).
"""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from zerolab.engine import groups
from zerolab.engine.options import precision
from zerolab.engine.safety.waiting import NamedWork


class Placement:
    """Where the shards of one engine are.

    `group` are the ranks to shard over, `replicas` those with the same shard (None: nobody else), `everyone` the ranks
    of both. Raises RuntimeError without a process group, ValueError or TypeError for what is neither a process group
    nor a DeviceMesh of one or two dimensions, and for another offload policy than torch's.
    """

    def __init__(self, group=None, offload_policy: OffloadPolicy | None = None):
        self.group, self.replicas, self.everyone = _groups(group)
        self.copies = 1 if self.replicas is None else dist.get_world_size(self.replicas)
        self.rank, self.world_size = dist.get_rank(self.everyone), dist.get_world_size(self.everyone)
        # torch's `OffloadPolicy()` is its way to say: no offload.
        self.offload = None if type(offload_policy) is OffloadPolicy else offload_policy
        self._pinned = self.offload is not None and self.offload.pin_memory
        self.elsewhere = self.replicas is not None or self.offload is not None  # else there is nothing to do here
        self._in_flight = None  # (bucket, shard, work) of the all-reduce that was not waited for
        self._device = None  # torch's module of the device, `torch.cuda` say, if shards are offloaded from one
        self._up, self._down = None, None  # its streams for copies

    def adopt(self, bucket) -> None:
        """Step 0: the bucket's shard gets memory of its own where mixed precision or offload want it."""
        precision.round_weights(bucket)
        if self.offload is not None:
            if bucket.flat.device.type != "cpu" and self._device is None:
                self._device = torch.get_device_module(bucket.flat.device)
                self._up, self._down = self._device.Stream(), self._device.Stream()
            bucket.shard = self._host_memory(bucket.shard).copy_(bucket.shard)

    # Gradients: from a shard of one row's mean to the optimizer.

    def deliver(self, bucket, shard: torch.Tensor) -> None:
        """A row's mean is there: average it over the replicas, bring it to the host, and give it to the pieces.

        With replicas its all-reduce is only started here. It travels while the next bucket's gradients come, and
        the pieces have them after the next call, or after `finish_all`.
        """
        self.finish()
        if self.replicas is None:
            return self._give(bucket, shard)
        self._in_flight = bucket, shard, self._sum_of_replicas(bucket, shard)

    def finish(self) -> None:
        """Wait for the all-reduce in flight, if there is one, and give its shard to the pieces."""
        if self._in_flight is not None:
            (bucket, shard, work), self._in_flight = self._in_flight, None
            work.wait()
            self._give(bucket, self._mean(shard))

    def _sum_of_replicas(self, bucket, shard: torch.Tensor) -> NamedWork:
        """Start to add up `shard`, in place."""
        shard.div_(precision.divisors(shard.dtype, self.copies)[0])
        work = dist.all_reduce(shard, group=self.replicas, async_op=True)
        return NamedWork(work, "all-reduce over the replicas", bucket, self.replicas)

    def _mean(self, total: torch.Tensor) -> torch.Tensor:
        return total.div_(precision.divisors(total.dtype, self.copies)[1])

    def _give(self, bucket, shard: torch.Tensor) -> None:
        shard = self._to_host(bucket, shard)
        if self._device is not None and any(piece.grad is not None for piece in bucket.pieces):
            self._down.synchronize()  # the host adds, so it must wait for the copy
        bucket.add_to_pieces(shard)

    def final_shard(self, bucket, shard: torch.Tensor) -> torch.Tensor:
        """ZeRO-1: `shard`, a view of the whole gradients, averaged over the replicas and brought to the host.

        Without replicas and offload `shard` itself. Else a copy: a later backward adds to the whole gradients, which
        must stay what the row has.
        """
        if self.replicas is not None:
            shard = shard.clone()
            self._sum_of_replicas(bucket, shard).wait()
            shard = self._mean(shard)
        return self._to_host(bucket, shard)

    def finish_all(self) -> None:
        """From here on the host may read the pieces' gradients and write into the shards."""
        self.finish()
        if self._device is not None:
            self._device.synchronize()  # copies down must be over, and copies up of what is now written over

    # Copies between device and host. On a GPU each direction has a stream, a queue of its own: copies then run beside
    # computation. That takes pinned memory, which the system never moves.

    def copies_beside(self):
        """A context: what is started in it runs beside computation, if shards come from the host."""
        if self._device is None:
            return contextlib.nullcontext()
        self._up.wait_stream(self._device.current_stream())  # the memory to write into may be in use until here
        return self._device.stream(self._up)

    def _to_host(self, bucket, shard: torch.Tensor) -> torch.Tensor:
        if self.offload is None:
            return shard
        shard = shard.to(bucket.shard.dtype)
        host = self._host_memory(shard)
        if self._device is None:
            return host.copy_(shard)
        self._down.wait_stream(self._device.current_stream())
        with self._device.stream(self._down):
            host.copy_(shard, non_blocking=self._pinned)
        shard.record_stream(self._down)  # its memory must not be used anew before it is copied
        return host

    def _host_memory(self, like: torch.Tensor) -> torch.Tensor:
        pinned = self._pinned and like.device.type != "cpu"  # without a device nothing can pin
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)


def _groups(group) -> tuple:
    """(the ranks to shard over, the replicas or None, the ranks of both) of a process group or DeviceMesh."""
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            raise ValueError(
                f"group is a DeviceMesh of {group.ndim} dimensions; a stage shards over one, or replicates over one "
                "and shards over another: pass mesh['name of it'], or mesh['replicas', 'shards']"
            )
        if group.get_coordinate() is None:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the DeviceMesh; only its own ranks may build the engine"
            )
        if group.ndim == 1:
            return group.get_group(), None, group.get_group()
        return group.get_group(1), group.get_group(0), _everyone(group)
    return group, None, group


def _everyone(mesh: DeviceMesh):
    """A group of all ranks of `mesh`. None, the default group, if these are all there are."""
    if mesh.size() == dist.get_world_size():
        return None
    row, world = mesh.get_group(1), dist.group.WORLD
    # After `init_process_group(device_id=...)` torch would split a new NCCL group's connections off those of `world`.
    # That takes all ranks of `world`, and those outside the mesh build no engine: the others would wait for them for
    # ever. Without a bound device the group has connections of its own, and waits for none but its own ranks.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return groups.beside(row, dist.get_backend(row), sorted(mesh.mesh.flatten().tolist()))
    finally:
        world.bound_device_id = bound
