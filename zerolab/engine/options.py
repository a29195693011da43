"""The options that all three stages have, as buckets and methods of an engine read them: `engine.options`."""

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
    all_ranks  the ranks of both
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
        """{name: value} of what must be equal on all ranks. With replicas each row of ranks has its own group."""
        names = ("param_dtype", "reduce_dtype", "find_unused", "offload_policy")
        return {name: getattr(self, name) for name in names}
