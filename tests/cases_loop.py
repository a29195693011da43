"""Run on every rank: what a training loop does around a step, against one process on the whole batch."""

import parts
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.measure.memory import storage_bytes
from harness.measure.traffic import TrafficLedger

ADAMW = parts.OPTIMIZERS["adamw"]


def clipping(stage: str, norm_type: float, model: str = "OddModel") -> None:
    """The norm that torch gives for the whole model, and the step after it; padding and tied weights counted right."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    build = getattr(parts, model)
    plain = parts.seeded(build)
    optimizer = ADAMW([param for param in plain.parameters() if param.requires_grad])
    engine = parts.STAGES[stage](parts.seeded(build), ADAMW)
    clipped = 0
    for step in range(10):
        max_norm = (0.05, 1e6)[step % 3 == 2]
        tokens, targets = parts.whole(parts.token_batch, step, world_size)
        F.cross_entropy(plain(tokens), targets).backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
        clipped += expected > max_norm
        optimizer.step()
        optimizer.zero_grad()
        tokens, targets = parts.token_batch(step, rank)
        F.cross_entropy(engine(tokens), targets).backward()
        norm = engine.clip_grad_norm_(max_norm, norm_type)
        assert norm.shape == () and not norm.requires_grad
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        everyone = [torch.empty_like(norm) for _ in range(world_size)]
        dist.all_gather(everyone, norm)
        assert all(torch.equal(other, norm) for other in everyone)
        engine.step()
        engine.zero_grad()
    assert 0 < clipped < 10
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


def clipping_between_backwards(stage: str) -> None:
    """Backward, clip, backward, step: the second backward adds to clipped gradients, on every rank the same."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sgd = parts.OPTIMIZERS["momentum"]
    plain = parts.seeded(parts.OddModel)
    optimizer = sgd([param for param in plain.parameters() if param.requires_grad])
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), sgd)
    for step in range(10):
        for micro in (2 * step, 2 * step + 1):
            tokens, targets = parts.whole(parts.token_batch, micro, world_size)
            F.cross_entropy(plain(tokens), targets).backward()
            tokens, targets = parts.token_batch(micro, rank)
            F.cross_entropy(engine(tokens), targets).backward()
            if micro % 2 == 0:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
                engine.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
        engine.zero_grad()
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


def clipping_sees_a_nan(stage: str, value: float, norm_type: float) -> list[float]:
    """One element of one parameter gets a NaN or inf on rank 0 only: every rank sees it in the norm."""
    engine = parts.STAGES[stage](parts.seeded(parts.OddModel), ADAMW)
    tokens, targets = parts.token_batch(0, dist.get_rank())
    outputs = engine(tokens)
    loss = F.cross_entropy(outputs, targets)
    if dist.get_rank() == 0:
        loss = loss + outputs[0, 0] * value
    loss.backward()
    return engine.clip_grad_norm_(1.0, norm_type).item()


class Gained(nn.Module):
    """A single element of another dtype, which only rank 0 has a piece of; or nothing else than one element."""

    def __init__(self, low, high):
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=low) if low else None
        self.gain = nn.Parameter(torch.ones(1, dtype=high))

    def forward(self, x):
        return self.gain * (x if self.linear is None else self.linear(x.to(self.linear.weight.dtype)))


def clipping_of_a_few_elements(stage: str, low, high, norm_type: float) -> None:
    """Ranks that own only padding, of all buckets or of those of one dtype, still agree on norm and dtype."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def build():
        return parts.seeded(lambda: Gained(low, high), dtype=None)

    plain, engine = build(), parts.STAGES[stage](build(), ADAMW)
    for other in range(world_size):
        (plain(parts.vector_batch(0, other, 8)[0]).square().mean() / world_size).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    engine(parts.vector_batch(0, rank, 8)[0]).square().mean().backward()
    norm = engine.clip_grad_norm_(0.1, norm_type)
    assert norm.dtype == expected.dtype
    torch.testing.assert_close(norm, expected, rtol=1e-2 if low == torch.bfloat16 else 1e-5, atol=0)
    engine.step()


def groups_of(model: nn.Module) -> list[dict]:
    """Weight decay for matrices only, another rate for the head: groups that cut across buckets and units."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    head = [param for name, param in named if name.startswith("head")]
    return [
        {"params": [p for n, p in named if p.ndim >= 2 and not n.startswith("head")], "weight_decay": 0.3},
        {"params": (p for n, p in named if p.ndim < 2 and not n.startswith("head")), "weight_decay": 0.0},
        {"params": head, "lr": 0.05},
    ]


def parameter_groups(stage: str, options: dict) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def schedules(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 1 / (s + 1), lambda s: 0.9**s, lambda s: 1.0])

    plain = parts.seeded(parts.OddModel)
    optimizer = ADAMW(groups_of(plain))
    schedule = schedules(optimizer)
    model = parts.seeded(parts.OddModel)
    engine = parts.STAGES[stage](model, ADAMW, param_groups=groups_of(model), **options)
    assert len(engine.optimizer.param_groups) == 3
    engine_schedule = schedules(engine.optimizer)
    for step in range(10):
        tokens, targets = parts.whole(parts.token_batch, step, world_size)
        F.cross_entropy(plain(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        engine.training_step(*parts.token_batch(step, rank), F.cross_entropy)
        engine_schedule.step()
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


def wrong_groups(stage: str) -> list[str]:
    found = []
    for change in (
        lambda model, groups: groups[:2],  # the head in no group
        lambda model, groups: [*groups, {"params": [model.head.weight]}],  # twice
        lambda model, groups: [*groups, {"params": [model.frozen]}],  # not trained
        lambda model, groups: list(model.parameters()),  # no groups at all
    ):
        model = parts.seeded(parts.OddModel)
        try:
            parts.STAGES[stage](model, ADAMW, param_groups=change(model, groups_of(model)))
        except (ValueError, TypeError) as error:
            found.append(str(error))
    return found


def accumulation_traffic(stage: str, micro_batches: int, no_sync: bool) -> None:
    """Bytes sent for k backwards and one step; the result is that of one big batch either way."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layers, width = 4, 8
    plain = parts.seeded(lambda: parts.Stack(layers, width))
    optimizer = ADAMW(plain.parameters())
    options = {} if stage == "zero3" else {"bucket_mb": 0.0005}
    engine = parts.STAGES[stage](parts.seeded(lambda: parts.Stack(layers, width)), ADAMW, **options)

    def batch_of(step, who):
        return parts.vector_batch(step, who, width, torch.float64)

    for step in range(10):
        with TrafficLedger() as traffic:
            for micro in range(micro_batches):
                number = step * micro_batches + micro
                x, y = parts.whole(batch_of, number, world_size)
                (F.mse_loss(plain(x), y) / micro_batches).backward()
                x, y = batch_of(number, rank)
                if no_sync and micro < micro_batches - 1:
                    with engine.no_sync():
                        (F.mse_loss(engine(x), y) / micro_batches).backward()
                    if stage != "zero1":
                        pieces = [p for group in engine.optimizer.param_groups for p in group["params"]]
                        assert all(piece.grad is None for piece in pieces)
                else:
                    (F.mse_loss(engine(x), y) / micro_batches).backward()
                    if stage != "zero1":  # nothing whole is kept
                        assert storage_bytes([p.grad for p in engine.model.parameters() if p.grad is not None]) == 0
            engine.step()
            engine.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    psi = sum(8 * bucket.numel for bucket in engine.buckets) * (world_size - 1) / world_size
    k = micro_batches
    times = {"zero1": 3, "zero2": 2 if no_sync else k + 1, "zero3": 2 * k + 1 if no_sync else 3 * k}[stage]
    assert traffic.sent_bytes == round(times * psi), (traffic.sent_bytes / psi, times)
    parts.assert_same_state(engine.full_state_dict(), plain.state_dict(), atol=1e-12)


class Checkpointed(nn.Module):
    """Activation checkpointing (non-reentrant) around each unit, inside the units, or around several."""

    class Inside(parts.OddBlock):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    def __init__(self, where: str):
        super().__init__()
        self.where = where
        self.embedding = nn.Embedding(11, 5)
        kind = self.Inside if where == "inside" else parts.OddBlock
        self.blocks = nn.ModuleList(kind(5, 7 + 2 * i) for i in range(4))
        self.head = nn.Linear(5, 3)

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        if self.where == "around several":
            for pair in ((0, 1), (2, 3)):

                def run(x, pair=pair):
                    for index in pair:
                        x = self.blocks[index](x)
                    return x

                x = checkpoint(run, x, use_reentrant=False)
        else:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.where == "around" else block(x)
        return self.head(x)


def activation_checkpointing(stage: str, where: str, options: dict) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    _, expected = parts.oracle(
        parts.seeded(lambda: Checkpointed("nowhere")), ADAMW, F.cross_entropy, parts.token_batch, 10, world_size
    )
    engine = parts.STAGES[stage](parts.seeded(lambda: Checkpointed(where)), ADAMW, **options)
    for step in range(10):
        tokens, targets = parts.token_batch(step, rank)
        F.cross_entropy(engine(tokens), targets).backward()
        if stage == "zero3":
            assert storage_bytes(engine.model.parameters()) == 0, "gathered parameters outlive backward"
        engine.step()
        engine.zero_grad()
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)


class TiedAcross(nn.Module):
    """An embedding outside the units whose weight is the head's, which lies inside one; 11 rows, uneven."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([parts.OddBlock(5, 7), nn.Sequential(nn.Tanh(), nn.Linear(5, 11, bias=False))])
        self.blocks[1][1].weight = self.embedding.weight

    def forward(self, tokens):
        return self.blocks[1](self.blocks[0](self.embedding(tokens).mean(1)))[:, :3]


class SharedInside(nn.Module):
    """Two units that hold the same layer, beside others of their own."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(5, 5)
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh(), shared) for _ in range(2)])

    def forward(self, tokens):
        return self.blocks[1](self.blocks[0](self.embedding(tokens).mean(1)))[:, :3]


def tied_across_units(stage: str, model: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    build = {"TiedAcross": TiedAcross, "SharedInside": SharedInside}[model]
    _, expected = parts.oracle(parts.seeded(build), ADAMW, F.cross_entropy, parts.token_batch, 10, world_size)
    engine = parts.STAGES[stage](parts.seeded(build), ADAMW)
    for step in range(10):
        engine.training_step(*parts.token_batch(step, rank), F.cross_entropy)
    parts.assert_same_state(engine.full_state_dict(), expected, atol=1e-12)
