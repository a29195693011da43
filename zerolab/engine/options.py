"""`engine.options`: the options of all three stages, as the buckets and methods of an engine read them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

from zerolab.engine.whole import WholeParameters


@dataclass(kw_only=True)
class Options:
    """The user's choices (`Engine` describes each option), and the three groups that `group` stands for.

    group      the ranks to shard over
    replicas   the ranks that hold the same shard (hybrid sharding), or None
    all_ranks  the ranks of all rows and columns, which are the ranks that build the engine
    """

    group: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    all_ranks: dist.ProcessGroup | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    find_unused: bool
    offload_policy: CPUOffloadPolicy | None
    whole: WholeParameters

    def equal_on_all_ranks(self):
        """{name: value} of the options that must be equal on all ranks. Groups may differ: each row has its own."""
        names = ("param_dtype", "reduce_dtype", "find_unused", "offload_policy")
        return {name: getattr(self, name) for name in names}
