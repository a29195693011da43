"""Mixed precision and loss scaling: what is computed, sent, kept and rounded in which dtype."""

import dataclasses
from functools import partial

import torch
from torch import nn

from zerolab.engine.gradients import GradScaler
from zerolab.properties.fixtures import (
    ADAMW,
    DECAY,
    EXACT_LOW,
    LOW,
    Branches,
    Checkpointed,
    OddModel,
    Pair,
    TiedAcross,
    Twice,
    byte_batch,
    gpt,
    grid,
    in_float64,
    of_bytes,
    of_vectors,
    own_tokens,
    seeded,
    token_batch,
    vectors,
)
from zerolab.properties.property import ask, ask_thorough, expect, holds, only, refused, same

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@holds(
    "values",
    ask("zero1", model=Twice),
    ask("zero2", model=TiedAcross),
    ask("zero3", model=Checkpointed),
    ask_thorough(("zero1", "zero2"), model=Twice, bucket_mb=0),
    ask_thorough("zero3", model=TiedAcross, prefetch=0, find_unused=True),
    ask_thorough("zero3", model=Checkpointed, reshard_after_forward=False),
)
def mixed_precision_is_a_rounded_copy_that_computes(engine, model, **options):
    """Norms and weights are those of plain PyTorch with a bfloat16 copy that computes, whose gradients are handed over.

    Sums over ranks, and of two backwards, are in float64, and exact.
    """
    pair = Pair(engine, model, DECAY, **EXACT_LOW, **options)
    for step in range(4):
        pair.backward(2 * step)
        pair.backward(2 * step + 1)
        assert pair.clip(0.05) > 0.05, "nothing is clipped"
        pair.step()
    pair.same_weights()


# What is cast, and what is not.


@dataclasses.dataclass
class Batch:
    mask: torch.Tensor
    more: dict


@dataclasses.dataclass(frozen=True)
class Frozen:
    tokens: torch.Tensor
    batch: Batch


class Mixed(nn.Module):
    """A float32 buffer between bfloat16 modules, a frozen scale, nested inputs of several dtypes, a dictionary out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.scale = nn.Parameter(torch.full((6,), 1.0 + 2**-12), requires_grad=False)  # not a bfloat16
        self.register_buffer("shift", torch.linspace(-1, 1, 6))
        self.head = nn.Linear(6, 3)
        self.seen = []

    def forward(self, frozen, *, extra):
        inner = frozen.batch.more["extra"][0]
        inputs = frozen.tokens, frozen.batch.mask, inner, extra
        self.seen = [each.dtype for each in (self.embedding.weight, self.scale, self.shift, *inputs)]
        x = self.embedding(frozen.tokens).mean(1) * self.scale + extra + inner
        for block in self.blocks:
            x = block(x + self.shift)  # float32 goes in; the unit casts it
        return {"logits": self.head(x)}


@holds("values", ask(), only("zero3", own_units=True))
def states_stay_float32_in_mixed_precision(engine, own_units=False):
    """Parameters and floating point inputs are cast, buffers are not; states are float32 and lose no small update.

    Inputs in dataclasses, frozen or not, are cast as others are; the caller's stay as they are.
    """
    model = seeded(Mixed, dtype=FP32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    units = {"units": iter(model.blocks)} if own_units else {}  # an iterator: it can be gone through once
    trained = engine(model, ADAMW, **LOW, **units)
    same("the state at the start", trained.full_state_dict(), before)  # copies, the frozen scale's too
    tokens, targets = own_tokens(0)
    extra = torch.full((6,), 1.0 + 2**-12)
    batch = Batch(torch.ones(2, dtype=torch.bool), {"extra": [extra]})
    for _ in range(3):
        output = trained(Frozen(tokens, batch), extra=extra)["logits"]
        same("the dtype of the output", output.dtype, BF16)
        seen = [BF16, BF16, FP32, torch.int64, torch.bool, BF16, BF16]
        same("the dtypes that forward sees", model.seen, seen)
        assert batch.more["extra"][0] is extra and extra.dtype == FP32, "the caller's tensors are replaced or cast"
        in_float64(output, targets).backward()
        trained.step()
        trained.zero_grad()
    after = trained.full_state_dict()
    same("the dtypes of the state", {value.dtype for value in after.values()}, {FP32})
    same("the frozen scale", after["scale"], before["scale"])
    # An update that is small beside its weight would round away in bfloat16.
    weight = after["blocks.0.weight"]
    kept = (weight != weight.to(BF16).float()).float().mean().item()
    expect(kept > 0.9, "the share of weights that are no bfloat16 numbers", "above 0.9", kept)


# Means over ranks: rounded once, and in the range of their dtype.


class Given(nn.Module):
    """Units whose gradients are their inputs, and whose weights begin at 0."""

    def __init__(self, count: int):
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(count, 1, bias=False) for _ in range(2))
        for row in self.rows:
            nn.init.zeros_(row.weight)

    def forward(self, x):
        return sum(row(x).sum() for row in self.rows)


@holds(
    "values",
    ask(ranks=3, more_ranks=(1, 2, 4)),
    ask("zero1", 3, more_ranks=(1, 2, 4), reduce_dtype=BF16),
    ask("zero2", 3, more_ranks=(1, 2, 4), reduce_dtype=FP16),
)
def a_step_on_integers_is_exact(engine, reduce_dtype=None):
    """A step on integers is exact: their sum is so in any order, and their mean is rounded once, after the sum.

    In float16 there may be no place for the sum where there is one for the mean. An inf on one rank is seen by all.
    """
    rank, size, dtype = engine.rank, engine.size, reduce_dtype or FP32
    most = {BF16: 256, FP16: 2048}.get(reduce_dtype, 2**24) // size  # integers that the dtype holds, and their sum
    values = torch.randint(-most, most, (size, 999), generator=torch.Generator().manual_seed(3)).to(FP64)
    divided_first = sum(each.to(dtype) / size for each in values).double()
    assert size != 3 or not torch.equal(divided_first, values.sum(0) / size), "divided before the sum it is the same"
    # Multiples of 16 and 32, whose means are rounded once if at all.
    large = {1: (61440,), 2: (61440, 40960), 3: (20000, 30000, 40000), 4: (30000, 40000, 60000, 30000)}[size]
    assert abs(sum(large)) > torch.finfo(FP16).max or size == 1
    further = []
    if reduce_dtype == FP16:
        further += [large, [-value for value in large], [30000] * size]
    if reduce_dtype is not None:  # with plain float32 DeepSpeed has a right to skip such a step
        further.append([torch.inf, *[1.0] * (size - 1)])
    values = torch.cat([values, torch.tensor(further, dtype=FP64).reshape(-1, size).T], dim=1)
    expected = (values.sum(0) / size).to(dtype).float()
    model = seeded(lambda: Given(values.shape[1]), dtype=FP32)
    trained = engine(model, partial(torch.optim.SGD, lr=1.0), reduce_dtype=reduce_dtype)
    trained.training_step(values[rank][None].float(), None, lambda total, _: total)
    for weight in trained.full_state_dict().values():
        # From 0 a step of SGD with the rate 1 leads to just the negative of the gradient.
        same("the mean of gradients", -weight[0], expected)


# Loss scaling.


def of_head(model, x, y, head) -> torch.Tensor:
    return in_float64(model(x, head), y)


def branch_batch(step, who):
    return *token_batch(step, who), who // 2


def scaler_of(engine, device: str = "cpu", **options):
    """Ours, or an exhibit's own."""
    return engine.more.get("scaler", GradScaler)(device, **options)


@holds(
    "values",
    ask(("zero1", "zero3"), of="one element"),
    ask(("zero2", "zero3"), overflow_on=1, default=FP64),
    ask("zero2", 4, of="branches", overflow_on=3),
    ask_thorough(overflow_on=0),
    ask_thorough(ranks=3, overflow_on=2),
)
def an_overflow_on_one_rank_skips_the_step_on_all(engine, of="gpt", overflow_on=0, default=FP32, device="cpu"):
    """All ranks skip the step in which one overflows, and no other, whatever torch's default dtype is.

    A GPT computes in float16. Of one element the ranks own only padding, all but the first, and are told all the same.
    On a grid of 2 x 2 each replica uses a head of its own, and nobody the third.
    """

    if of == "gpt":
        build, loss_of, batch_of = gpt, of_bytes, byte_batch
        # As exact as float16 is; a step too many, or too few, is 0.5 of a gradient.
        options = {"dtype": FP32, "atol": 1e-2, "param_dtype": FP16, "reduce_dtype": FP32, "device": device}
        optimizer = partial(torch.optim.SGD, lr=0.5, fused=device != "cpu")
    elif of == "one element":
        build, loss_of, batch_of = partial(nn.Linear, 1, 1, bias=False), of_vectors, vectors(1)
        options, optimizer = {}, DECAY
    else:
        build, loss_of, batch_of = Branches, of_head, branch_batch
        options, optimizer = {"group": grid(), "find_unused": True}, DECAY
        if engine.like == "zero3":
            options["units"] = "the whole model"  # all ranks must run the same units

    def batch(step, who):
        return *batch_of(step, who), torch.inf if step == 2 and who == overflow_on else 1.0

    def loss(model, *batch):
        return loss_of(model, *batch[:-1]) * batch[-1]

    torch.set_default_dtype(default)
    try:
        pair, scales = Pair(engine, build, optimizer, loss=loss, batch=batch, **options), []
        scaler = scaler_of(engine, device, init_scale=2.0**10, growth_interval=2)
        for step in range(5):
            pair.scaled_step(step, scaler, 0.1 if step % 2 else None, skipped=step == 2)
            scales.append(scaler.get_scale())
    finally:
        torch.set_default_dtype(FP32)
    pair.same_weights()
    # Halved by the overflow, doubled after two good steps.
    same("the scale after each step", scales, [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11])


@holds("misuse", ask(enabled=True), ask(enabled=False))
def a_loss_scaler_is_called_in_order(engine, enabled):
    """A loss scaler refuses an optimizer, and what comes twice without `update()`; switched off it changes nothing."""
    pair = Pair(engine, OddModel, ADAMW)
    scaler = scaler_of(engine, init_scale=2.0**8, enabled=enabled)
    for step in range(2):
        # An optimizer's step would be skipped on one rank alone.
        with refused("ptimizer", error=(AttributeError, RuntimeError)):
            scaler.step(pair.trained.optimizer)
        pair.scaled_step(step, scaler, 0.1)
    pair.same_weights()
    if enabled:
        pair.backward(2, scale=scaler.get_scale())
        scaler.unscale_(pair.trained)
        with refused("update()"):
            scaler.unscale_(pair.trained)
        scaler.step(pair.trained)
        with refused("update()"):
            scaler.step(pair.trained)
        with refused():
            scaler.unscale_(pair.trained)
