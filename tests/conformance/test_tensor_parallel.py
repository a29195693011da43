"""Engines with tensor parallelism, and in torch's pipelines."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import seeded
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel

from conformance.pair import Pair
from conformance.test_precision import scaled_step
from zerolab.engine import GradScaler
from zerolab.engine.tensor_parallel import AsModule

WIDTH = 16
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
ours = pytest.mark.stages("zero1", "zero2", "zero3")


class Layer(nn.Module):
    """The MLP of a transformer: one matrix is split by columns, the other by rows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def small():
    head = nn.Linear(WIDTH, 32, bias=False)
    return nn.Sequential(nn.Embedding(32, WIDTH), Layer(), Layer(), nn.LayerNorm(WIDTH), head)


def split(mesh):
    """Split each block as in Megatron. Norms are DTensors too, and work on a part of the sequence."""
    model = seeded(small)
    norm, part = parallel.SequenceParallel(use_local_output=True), Shard(1)
    around = {
        "0": parallel.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=part),
        "3": norm,
        "4": parallel.ColwiseParallel(input_layouts=part, output_layouts=Replicate()),
    }
    block = {
        "norm": norm,
        "up": parallel.ColwiseParallel(input_layouts=part),
        "down": parallel.RowwiseParallel(output_layouts=part),
    }
    parallel.parallelize_module(model, mesh, around)
    for each in (model[1], model[2]):
        parallel.parallelize_module(each, mesh, block)
    return model


def tokens_and_next(step, rank, rows=4):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drawn = torch.randint(32, (rows, 9), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def next_token_loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss_of(model, tokens, targets):
    return next_token_loss(model(tokens), targets)


@pytest.mark.ranks(4)
@ours
def test_tensor_parallelism_beside_an_engine(engine):
    """Losses, norms, overflows and weights match one process. Sums of split products have a different order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    row = mesh.get_local_rank("data")
    ranks_of_group = dist.get_process_group_ranks(mesh.get_group("data"))
    data = {rank: index for index, rank in enumerate(ranks_of_group)}  # both ranks of a row have the same batch
    pair = Pair(
        engine,
        seeded(small),
        ADAMW,
        start=split(mesh["tensor"]),
        data=lambda step, rank: tokens_and_next(step, data[rank]),
        loss=loss_of,
        tolerance=1e-10,
        ranks=ranks_of_group,
        group=mesh["data"],
    )
    assert pair.rank == row and isinstance(pair.model[1].up.weight, DTensor)
    scaler = GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        scaled_step(pair, scaler, step, max_norm=0.5)
    state = pair.trained.full_state_dict()
    for name, expected in pair.plain.state_dict().items():
        assert torch.allclose(state[name], expected, rtol=0, atol=1e-10), name
    other = {name: value + 1 for name, value in state.items()}
    pair.trained.load_full_state_dict(other)
    assert all(value.equal(other[name]) for name, value in pair.trained.full_state_dict().items())


@pytest.mark.ranks(4)
@ours
def test_tensors_that_are_split_over_the_same_ranks_are_refused(engine):
    """A DTensor can be sharded over another dimension, but not over its own again, and it keeps its dtype."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for options, text in (
        ({}, "another dimension"),
        ({"group": mesh["tensor"]}, "another dimension"),
        ({"group": mesh["data"], "param_dtype": torch.bfloat16}, "param_dtype"),
    ):
        model = split(mesh["tensor"])
        with pytest.raises(ValueError, match=text):
            engine(model, ADAMW(model.parameters()), **options)


@pytest.mark.ranks(4)
@ours
def test_a_part_of_a_pipeline(engine):
    """The parts of a pipeline match the whole model in one process, with losses divided by hand."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "data"))
    index, count = mesh.get_local_rank("stages"), 4
    ranks = dist.get_process_group_ranks(mesh.get_group("data"))
    plain, model = seeded(small), seeded(small)
    part = (model[:2], model[2:])[index]
    trained = engine(part, ADAMW(part.parameters()), group=mesh["data"])
    optimizer = ADAMW(plain.parameters())
    stage = pipelining.PipelineStage(AsModule(trained), index, 2, torch.device("cpu"), group=mesh.get_group("stages"))
    schedule = pipelining.Schedule1F1B(
        stage, count, loss_fn=lambda logits, targets: next_token_loss(logits, targets) / count, scale_grads=False
    )
    for step in range(2):
        for number in range(2):
            (loss_of(plain, *tokens_and_next(step, number, 2 * count)) / 2).backward()
        tokens, targets = tokens_and_next(step, ranks.index(dist.get_rank()), 2 * count)
        schedule.step(*([tokens] if index == 0 else []), target=targets if index else None)
        optimizer.step()
        optimizer.zero_grad()
        trained.step()
        trained.zero_grad()
    expected = (plain[:2], plain[2:])[index].state_dict().values()
    for found, value in zip(trained.full_state_dict().values(), expected, strict=True):
        assert torch.allclose(found, value, rtol=0, atol=1e-10)
