"""The options that all three stages have."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import OffloadPolicy


@dataclass
class Options:
    """The options that the buckets of an engine need.

    group           the ranks to shard over
    replicas        the ranks that hold the same shard (hybrid sharding), or None
    everyone        the ranks of both
    param_dtype     the dtype to compute and to gather in; None: the parameters' own
    reduce_dtype    the dtype to reduce gradients in; None: `param_dtype`
    offload_policy  torch's `CPUOffloadPolicy`, or None: shards stay on the device
    find_unused     whether a step may leave parameters without a gradient
    """

    group: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    everyone: dist.ProcessGroup | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    offload_policy: OffloadPolicy | None
    find_unused: bool
