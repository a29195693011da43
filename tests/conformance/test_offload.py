"""Offload: shards, their gradients and the optimizer state in the host's memory."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import Tied, seeded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from conformance.pair import Pair
from conformance.test_precision import mse_in_float64

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
OPTIONS = {"alone": {}, "mixed precision": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float64}}


@pytest.mark.ranks(2, 4)
@pytest.mark.stages("zero1", "zero2", "zero3")
@pytest.mark.parametrize("options", OPTIONS)
def test_offload_changes_no_value(engine, options):
    """Losses, norms and weights are correct with offload, through micro-batches and clipping.

    On four ranks there are also replicas. Here both copies are in the host's memory. On a GPU the same lines copy
    between two memories.
    """
    options = {**OPTIONS[options], "offload_policy": CPUOffloadPolicy(pin_memory=True)}
    if dist.get_world_size() == 4:
        options["group"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    pair = Pair(engine, seeded(Tied), ADAMW, loss=mse_in_float64, tolerance=1e-10, **options)
    for step in range(4):
        pair.backward(2 * step, quiet=step > 1)
        pair.backward(2 * step + 1)
        pair.clip(0.5)
        pair.step()
    pair.check_weights()
    for bucket in pair.trained.all_buckets:
        addresses = {each.untyped_storage()._cdata for each in (bucket.shard, bucket.flat)}
        assert len(addresses) == 2, "the shard's memory is a part of the gathered buffer"
