"""A stage in one dimension of a mesh of 2 x 2 ranks, and torch's tensor parallelism in the other."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.nn import functional as F

from harness.engine import checkpoint
from harness.engine.gradients import GradScaler
from harness.measure.traffic import TrafficLedger
from harness.properties import models, parts
from harness.properties.property import expect, holds, refused, same
from harness.properties.training import Pair
from harness.run.model import next_token_loss

WIDTH = 16


class Block(nn.Module):
    """The MLP of a transformer: a matrix to be cut by columns, and one by rows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def small() -> nn.Module:
    head = nn.Linear(WIDTH, 256, bias=False)
    return nn.Sequential(nn.Embedding(256, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), head)


def cut_by(mesh, sequence: bool) -> nn.Module:
    """Megatron's cut of each block; with `sequence` the norms are DTensors too, and work on a part of the sequence."""
    model = parts.seeded(small)
    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    if sequence:
        norm, part = parallel.SequenceParallel(use_local_output=True), Shard(1)
        plan = {
            "norm": norm,
            "up": parallel.ColwiseParallel(input_layouts=part),
            "down": parallel.RowwiseParallel(output_layouts=part),
        }
        outside = {  # the embedding's output is cut, and the logits are whole again
            "0": parallel.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=part),
            "3": norm,
            "4": parallel.ColwiseParallel(input_layouts=part, output_layouts=Replicate()),
        }
        parallel.parallelize_module(model, mesh, outside)
    for block in (model[1], model[2]):
        parallel.parallelize_module(block, mesh, plan)
    return model


@holds("values", sizes=(4,), cases=({"sequence": True},), further_cases=({"sequence": False},))
def tensor_parallelism_beside_it_changes_nothing(engine, sequence):
    """Losses, norms and weights are those of one process; an overflow in one part is heard; each shards its own part.

    Products are cut, and their sums have another order: in float64, to 1e-11.
    """
    mesh = parts.mesh(2, 2, names=("data", "tensor"))
    given = iter((parts.seeded(small), model := cut_by(mesh["tensor"], sequence)))
    pair = Pair(engine, lambda: next(given), parts.ADAMW, loss=models.of_bytes, batch=models.byte_batch, atol=1e-11,
                group=mesh["data"])  # fmt: skip
    trained = pair.trained
    assert isinstance(model[1].up.weight, DTensor), "nothing is parallel"

    def spoil(trained):
        if dist.get_rank() == 3:  # in one part of one rank
            trained._reduce_gradients()
            trained.trained_buckets[0].pieces[0][1].grad[0] = torch.inf

    scaler = engine.more.get("scaler", GradScaler)("cpu", init_scale=4.0)
    pair.scaled_step(0, scaler, 0.5)
    pair.scaled_step(1, scaler, 0.5, skipped=True, spoil=spoil)
    pair.scaled_step(2, scaler, 0.5)
    same("the scale", scaler.get_scale(), 2.0, step=4)
    pair.same_weights()
    other = {name: value + 1 for name, value in trained.full_state_dict().items()}
    trained.load_full_state_dict(other)
    same("the state that was loaded", trained.full_state_dict(), other, step=5)  # copies

    # Each rank has a quarter of what both dimensions cut, and half of the rest.
    cut = sum(p.numel() for p in model.parameters() if isinstance(p, DTensor) and p.placements[0].is_shard())
    least = cut / 4 + (sum(p.numel() for p in model.parameters()) - cut) / 2
    most = least + 2 * 8 * len(list(model.parameters()))  # with padding
    held = sum(bucket.shard_numel for bucket in trained.trained_buckets)
    expect(least <= held <= most, "elements of this rank's shards", f"{least:.0f} to {most:.0f}", held, step=0)
    row, column = (tuple(dist.get_process_group_ranks(mesh.get_group(name))) for name in ("data", "tensor"))
    with TrafficLedger() as traffic:
        trained.training_step(*models.byte_batch(9, pair.rank), next_token_loss)
    own = [one for one in traffic.collectives if one.step.startswith(("step 3", "step 5"))]
    same("who sends gradients and parameters", {one.ranks for one in own} | {column}, {row, column}, step=3)
    kinds = {one.kind for one in own if one.ranks == row and one.whole_bytes > 8 * WIDTH}
    reduced = "all-reduce" if engine.like == "zero1" else "reduce-scatter"
    same("collectives of the data dimension", kinds, {"all-gather", reduced}, step=3)
    # Sequence parallelism leaves the norms' gradients as parts of a sum: that is all that crosses the tensor dimension.
    across = {one.whole_bytes for one in own if one.ranks == column} - ({8 * WIDTH} if sequence else set())
    same("bytes of what else crosses the tensor dimension", across, set(), step=3)
    for act in (checkpoint.save, checkpoint.load):
        refused(lambda act=act: act(trained, "/nowhere"), "full_state_dict", error=ValueError)
    trained.close()
    expect(isinstance(model[1].up.weight, DTensor), "the closed model's weights", "DTensors", "other tensors")
    dist.barrier()


@holds("misuse", engines=("zero3",), sizes=(4,))
def sharding_over_the_tensor_dimension_is_refused(engine):
    """DTensors need a group, which is that of another dimension; and mixed precision beside them is refused."""
    mesh = parts.mesh(2, 2, names=("data", "tensor"))
    for options, word in (
        ({}, "another* dimension"),
        ({"group": mesh["tensor"]}, "another* dimension"),
        ({"group": mesh["data"], "param_dtype": torch.bfloat16}, "param_dtype"),
    ):
        model = cut_by(mesh["tensor"], sequence=False)
        refused(lambda m=model, o=options: engine(m, parts.ADAMW, **o), word, error=ValueError)
    dist.barrier()
