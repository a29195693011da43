"""Run on four ranks, 2 x 2: torch's tensor parallelism in one dimension of the mesh, a stage in the other."""

from functools import partial

import parts
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


def parallel(model, mesh, sequence: bool):
    """Megatron's cut of each block; with `sequence` the norms are DTensors too, and work on a part of the sequence."""
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
    generator = torch.Generator().manual_seed(77 * step + who)
    rows = torch.randint(VOCAB, (3, SEQ + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def like_one_process(stage: str, sequence: bool) -> None:
    """Losses, norms and weights of one process on both halves of the data, in float64."""
    mesh = parts.mesh(2, 2, names=("data", "tensor"))
    who = mesh.get_local_rank("data")
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    plain = parts.seeded(Small)
    optimizer = adamw(plain.parameters())
    model = parallel(parts.seeded(Small), mesh["tensor"], sequence)
    engine = parts.STAGES[stage](model, adamw, group=mesh["data"])
    assert isinstance(model.blocks[0].up.weight, DTensor)
    scaler = GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        for other in range(2):
            loss = loss_of(plain, *batch(step, other))
            (loss / 2).backward()
            if other == who:
                expected = loss.detach()
        overflow = step == 1
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        if not overflow:
            optimizer.step()
        optimizer.zero_grad()
        loss = loss_of(engine, *batch(step, who))
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        scaler.scale(loss).backward()
        if overflow and dist.get_rank() == 3:  # in one part of one rank
            engine._reduce_gradients()
            engine.trained[0].pieces[0][1].grad[0] = torch.inf
        scaler.unscale_(engine)
        found = engine.clip_grad_norm_(0.5)
        assert overflow or torch.allclose(found, norm, rtol=1e-10, atol=0), (found, norm)
        scaler.step(engine)
        scaler.update()
        engine.zero_grad()
    assert scaler.get_scale() == 2.0
    state = engine.full_state_dict()
    parts.assert_same_state(state, plain.state_dict(), atol=1e-11)
    engine.load_full_state_dict({name: value + 1 for name, value in state.items()})
    parts.assert_same_state(engine.full_state_dict(), {name: value + 1 for name, value in state.items()}, atol=0)
    # Each rank has a quarter of what both dimensions cut, and half of the rest.
    cut = sum(p.numel() for p in model.parameters() if isinstance(p, DTensor) and p.placements[0].is_shard())
    rest = sum(p.numel() for p in model.parameters()) - cut
    padding = 2 * 8 * len(list(model.parameters()))
    assert cut / 4 + rest / 2 <= sum(bucket.shard_numel for bucket in engine.trained) <= cut / 4 + rest / 2 + padding
    row = tuple(dist.get_process_group_ranks(mesh.get_group("data")))
    with TrafficLedger() as traffic:
        engine.training_step(*batch(9, who), lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()))
    column = tuple(dist.get_process_group_ranks(mesh.get_group("tensor")))
    own = [one for one in traffic.collectives if one.step.startswith(("step 3", "step 5"))]
    whole = {one.kind for one in own if one.ranks == row and one.whole_bytes > 8 * WIDTH}
    assert whole == {"all-gather", "all-reduce" if stage == "zero1" else "reduce-scatter"}
    # Sequence parallelism leaves the norms' gradients as parts of a sum: that is all that crosses the tensor dimension.
    across = {one.whole_bytes for one in own if one.ranks != row}
    assert across <= ({8 * WIDTH} if sequence else set()), own
    assert {one.ranks for one in own} <= {row, column}
    for act in (checkpoint.save, checkpoint.load):
        try:
            act(engine, "/nowhere")
        except ValueError as error:
            assert "full_state_dict" in str(error)
        else:
            raise AssertionError("a checkpoint of parts was written")
    engine.close()
    assert isinstance(model.blocks[0].up.weight, DTensor)
    dist.barrier()


def refusals(stage: str) -> None:
    mesh = parts.mesh(2, 2, names=("data", "tensor"))
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    for options, word in (
        ({}, "another* dimension"),
        ({"group": mesh["tensor"]}, "another* dimension"),
        ({"group": mesh["data"], "param_dtype": torch.bfloat16}, "param_dtype"),
    ):
        try:
            parts.STAGES[stage](parallel(parts.seeded(Small), mesh["tensor"], False), adamw, **options)
        except ValueError as error:
            assert word in str(error), error
        else:
            raise AssertionError(f"{options} were accepted")
    dist.barrier()
