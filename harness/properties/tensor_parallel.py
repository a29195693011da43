"""A stage in one dimension of a mesh of 2 x 2 ranks, and torch's tensor parallelism in the other."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from harness.engine import checkpoint
from harness.engine.gradients import GradScaler
from harness.measure.traffic import TrafficLedger
from harness.properties import parts
from harness.properties.property import expect, holds, refused, same
from harness.properties.training import Pair

WIDTH, HEADS, VOCAB, SEQ = 16, 4, 32, 8


class Block(nn.Module):
    """A transformer block whose matrices are apart, as tensor parallelism wants them."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (m(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


COLUMNS_AND_ROWS = {
    "q": ColwiseParallel, "k": ColwiseParallel, "v": ColwiseParallel, "out": RowwiseParallel,
    "up": ColwiseParallel, "down": RowwiseParallel,
}  # fmt: skip


def parallel(mesh, sequence: bool) -> Small:
    """Megatron's cut of each block; with `sequence` the norms are DTensors too, and work on a part of the sequence."""
    model = parts.seeded(Small)
    for block in model.blocks:
        plan = {name: style() for name, style in COLUMNS_AND_ROWS.items()}
        if sequence:
            plan |= {"norm": SequenceParallel(use_local_output=True), "norm2": SequenceParallel(use_local_output=True)}
            plan |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
            plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("out", "down")}
        parallelize_module(block, mesh, plan)
    if sequence:
        plan = {
            "embed": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
            "norm": SequenceParallel(use_local_output=True),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, plan)
    return model


def batch(step: int, who: int):
    generator = torch.Generator().manual_seed(1_000 * step + who)
    rows = torch.randint(VOCAB, (3, SEQ + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def of_logits(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@holds("values", sizes=(4,), cases=({"sequence": True},), further_cases=({"sequence": False},))
def tensor_parallelism_beside_it_changes_nothing(engine, sequence):
    """Losses, norms and weights are those of one process; an overflow in one part is heard; each shards its own part.

    Products are cut, and their sums have another order: in float64, to 1e-11.
    """
    mesh = parts.mesh(2, 2, names=("data", "tensor"))
    given = iter((parts.seeded(Small), model := parallel(mesh["tensor"], sequence)))
    pair = Pair(engine, lambda: next(given), parts.ADAMW, batch=batch, group=mesh["data"], atol=1e-11,
                loss=lambda model, tokens, targets: of_logits(model(tokens), targets))  # fmt: skip
    trained, weight = pair.trained, model.blocks[0].up.weight
    assert isinstance(weight, DTensor), "nothing is parallel"

    def spoil(trained):
        if dist.get_rank() == 3:  # in one part of one rank
            trained._reduce_gradients()
            trained.trained[0].pieces[0][1].grad[0] = torch.inf

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
    held = sum(bucket.shard_numel for bucket in trained.trained)
    expect(least <= held <= most, "elements of this rank's shards", f"{least:.0f} to {most:.0f}", held, step=0)
    row, column = (tuple(dist.get_process_group_ranks(mesh.get_group(name))) for name in ("data", "tensor"))
    with TrafficLedger() as traffic:
        trained.training_step(*batch(9, pair.rank), of_logits)
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
    expect(isinstance(model.blocks[0].up.weight, DTensor), "the closed model's weights", "DTensors", "other tensors")
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
        model = parallel(mesh["tensor"], sequence=False)
        refused(lambda m=model, o=options: engine(m, parts.ADAMW, **o), word, error=ValueError)
    dist.barrier()
