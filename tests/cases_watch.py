"""Recording steps, on the ranks of a pool."""

from argparse import Namespace

import torch
import torch.distributed as dist

from harness.run.process_group import Rank
from harness.teach.watch.engines import of_engine
from harness.teach.watch.record import record


def recorded(names: list[str]) -> list[dict]:
    """What this rank saw of one step of each engine."""
    options = Namespace(preset="toy", seq=32, batch=2, bucket_mb=None)
    me = Rank(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", "")
    return [record(of_engine(name, options), me, tries=1) for name in names]
