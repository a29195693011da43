"""The ranks that train together: a group of some ranks, a mesh, replicas."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import (
    MOMENTUM,
    Blocks,
    Tied,
    seeded,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from conformance.pair import Pair
from conformance.subjects import Subject
from conformance.test_precision import batch_with_overflow, scaled_step
from zerolab.engine import GradScaler, checkpoint
from zerolab.run.engines import ENGINES

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.3)


@pytest.mark.ranks(3)
@pytest.mark.chapters
def test_a_group_trains_without_the_other_ranks(engine):
    """Only the ranks of the group train together. A rank outside of the group gets an error."""
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        Pair(engine, seeded(Tied), ranks=[0, 2], group=group).train()
    elif engine.ours:
        model = seeded(Tied)
        with pytest.raises(ValueError, match="not in `group`"):
            engine(model, MOMENTUM(model.parameters()), group=group)


@pytest.mark.ranks(4)
@pytest.mark.stages("zero1", "zero2", "zero3")
def test_two_groups_side_by_side_see_nothing_of_each_other(engine):
    """Norms, unused parameters and overflows of one group do not affect the other."""
    groups = [dist.new_group([side, side + 2]) for side in (0, 1)]
    side = dist.get_rank() % 2
    pair = Pair(
        engine,
        seeded(Blocks, seed=side),
        ranks=[side, side + 2],
        data=batch_with_overflow,  # in step 2 on rank 1
        group=groups[side],
        find_unused=True,
    )
    scaler = GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        scaled_step(pair, scaler, step, max_norm=0.1, skipped=step == 2 and side == 1)
    assert scaler.get_scale() == (2.0 if side == 1 else 4.0)
    pair.check_weights()


@pytest.mark.ranks(4)
def test_one_dimension_of_a_mesh_is_a_group(engine):
    """On a 2 x 2 mesh of four ranks, each pair along one dimension trains independently."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "data"))
    first = 2 * mesh.get_local_rank("tensor")
    Pair(engine, seeded(Tied, seed=first), ranks=[first, first + 1], group=mesh["data"]).train()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("rows", [1, 2])
def test_replicas_train_as_one_process(engine, rows):
    """On a mesh of replicas and shards all ranks train together, from rank 0's weights.

    This also holds if gradients are clipped twice in a step: a later backward adds to averaged gradients.
    """
    mesh = init_device_mesh("cpu", (rows, dist.get_world_size() // rows), mesh_dim_names=("replicas", "shards"))
    pair = Pair(engine, seeded(Tied), group=mesh)
    pair.train(2)
    for step in range(2, 4):
        for part in range(2):
            pair.backward(2 * step + part)
            pair.clip(0.1)
        pair.step()
    pair.check_weights()


@pytest.mark.ranks(3)
@pytest.mark.stages("zero1", "zero2", "zero3")
@pytest.mark.parametrize("besides", [[0, 1, 2], [0, 2], [1, 2]], ids=str)
def test_replicas_of_some_ranks_need_no_other(engine, besides, tmp_path):
    """Ranks 0 and 1 of three are two replicas. Rank 2 takes part in nothing, whatever other groups the ranks are in.

    This also holds for a checkpoint that is saved in the background, and afterwards all ranks can still make a group.
    """
    dist.new_group(besides)  # if it has one of the two replicas, that one is in more groups than the other
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicas", "shards"))
    if dist.get_rank() < 2:
        pair = Pair(engine, seeded(Blocks), ranks=[0, 1], group=mesh, find_unused=True)
        pair.train(2)
        checkpoint.async_save(pair.trained, tmp_path).result()
        checkpoint.load(pair.trained, tmp_path)
        pair.train(1)
    dist.barrier(dist.new_group())


@pytest.mark.ranks(4)
@pytest.mark.stages("zero1", "zero2", "zero3")
def test_meshes_that_do_not_fit_are_refused(engine):
    """Three dimensions, and an option that differs between replicas, on every rank before anything could hang."""
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicas", "shards", "third"))
    model = seeded(Blocks)
    with pytest.raises(ValueError, match="3 dimensions"):
        engine(model, ADAMW(model.parameters()), group=cube)
    with pytest.raises(ValueError, match=r"rank\(s\) \[2, 3\]"):
        engine(model, ADAMW(model.parameters()), group=cube["replicas", "shards"], find_unused=dist.get_rank() > 1)
    Pair(engine, model, group=cube["replicas", "shards"]).train(1)  # two of three dimensions


def build_2psi(model, optimizer, **options):
    return ENGINES["zero1_2psi"].build(model, optimizer, torch.device("cpu"), engine=True, **options)


@pytest.mark.ranks(2, 4)
@pytest.mark.stages("zero1")
@pytest.mark.parametrize("offload", [False, True])
def test_the_variant_that_reduce_scatters_has_the_options_that_it_names(engine, offload):
    """`zero1_2psi` of the registry, with replicas and with offload: it trains as one process."""
    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicas", "shards"))}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    assert {*options} <= {*ENGINES["zero1_2psi"].takes}
    pair = Pair(Subject("zero1_2psi", build_2psi, "zero1"), seeded(Tied), **options)
    for step in range(3):
        pair.backward(2 * step)
        pair.backward(2 * step + 1)
        pair.step()
    pair.check_weights()
