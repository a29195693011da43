"""A process group with one real rank. Engines run on it, and their collectives move nothing."""

import contextlib
import importlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zerolab.run import engines


@contextlib.contextmanager
def fake_ranks(world_size: int, rank: int = 0):
    """A process group of which only `rank` exists: its collectives return at once and move nothing."""
    fake_pg = importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_alone(name: str, model: nn.Module, optimizer, device: torch.device, **options):
    """The registry's engine, on a group that moves nothing; DDP with a reduction that such a group can do."""
    engine = engines.build(name, model, optimizer, device, **options)
    if isinstance(engine.model, DistributedDataParallel):
        engine.model.register_comm_hook(None, all_reduce_bucket)
    return engine


def all_reduce_bucket(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's own way to reduce a bucket, written again here, because the fake group's futures bring no result."""
    tensor = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(tensor)
    future = torch.futures.Future(devices=[tensor.device] if tensor.device.type != "cpu" else None)
    future.set_result(tensor)
    return future
