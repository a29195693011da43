"""Mixed precision and loss scaling: the dtypes of computation, storage and rounding."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import EXACT, MOMENTUM, Blocks, Dtypes, Recomputed, Tied, Tiny, batch, mse, own_batch, seeded
from torch import nn

from conformance.pair import Pair
from zerolab.engine import GradScaler
from zerolab.engine.optimizers import as_list

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.3)
MODELS = {make.__name__: make for make in (Recomputed, Tied)}


def mse_in_float64(model, inputs, targets):
    return nn.functional.mse_loss(model(inputs).double(), targets.double())


@pytest.mark.ranks(2, thorough=(1, 4))
@pytest.mark.parametrize("model", MODELS)
def test_a_rounded_copy_computes(engine, model):
    """Norms and weights match plain torch with a bfloat16 copy that computes and passes on its gradients.

    Sums over ranks, and of several backwards, also under `no_sync`, are in `reduce_dtype`, here float64. So they are
    exact, where adding up in bfloat16 would lose digits.
    """
    options = {"param_dtype": BF16, "reduce_dtype": FP64}
    pair = Pair(engine, seeded(MODELS[model]), ADAMW, loss=mse_in_float64, tolerance=1e-10, **options)
    for step in range(3):
        pair.backward(3 * step, quiet=step > 0)
        pair.backward(3 * step + 1, quiet=step > 0)
        pair.backward(3 * step + 2)
        pair.clip(0.05)
        pair.step()
    pair.check_weights()


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_complex_parameters_keep_their_dtype(engine):
    """`reduce_dtype` is for real parameters. A complex gradient that was cast would lose its imaginary part."""
    pair = Pair(engine, seeded(Dtypes), reduce_dtype=FP64)
    for step in range(3):
        pair.backward(2 * step, quiet=step == 1)
        pair.backward(2 * step + 1)
        pair.step()
    pair.check_weights()


class Mixed(nn.Module):
    """A float32 buffer between bfloat16 modules, a frozen scale, nested inputs of several dtypes, a dictionary out."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.scale = nn.Parameter(torch.full((6,), 1.0 + 2**-12), requires_grad=False)  # not a bfloat16
        self.register_buffer("shift", torch.linspace(-1, 1, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, inputs, *, extra):
        tokens, (inner,) = inputs["tokens"], inputs["more"]
        self.seen = [each.dtype for each in (self.embedding.weight, self.scale, self.shift, tokens, inner, extra)]
        x = self.embedding(tokens).mean(1) * self.scale + extra + inner
        for block in self.blocks:
            x = block(x + self.shift)  # float32 goes in; the unit casts it
        return {"logits": self.head(x)}


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_what_is_cast_and_what_stays_float32(engine):
    """Weights and floating point inputs are cast. Buffers and the caller's tensors are not. Shards lose no update."""
    model = seeded(Mixed, dtype=FP32)
    before = copy.deepcopy(model.state_dict())
    trained = engine(model, ADAMW(model.parameters()), param_dtype=BF16, reduce_dtype=FP32)
    state = trained.full_state_dict()
    assert all(torch.equal(state[name], value) for name, value in before.items()), "rounded by the build"
    tokens, targets = own_batch(0, dtype=FP32)
    extra = torch.full((6,), 1.0 + 2**-12)
    inputs = {"tokens": tokens, "more": [extra]}
    for _ in range(3):
        output = trained(inputs, extra=extra)["logits"]
        assert output.dtype == BF16
        assert model.seen == [BF16, BF16, FP32, torch.int64, BF16, BF16]
        assert inputs["more"][0] is extra and extra.dtype == FP32, "the caller's tensors are replaced or cast"
        nn.functional.mse_loss(output.float(), targets).backward()
        trained.step()
        trained.zero_grad()
    after = trained.full_state_dict()
    assert torch.equal(after["scale"], before["scale"])
    weight = after["blocks.0.weight"]
    assert (weight != weight.to(BF16).float()).float().mean() > 0.9, "small updates were rounded away"


@dataclasses.dataclass(frozen=True)
class Scaled:
    """`__post_init__` changes a value, so it must not run a second time."""

    x: torch.Tensor
    seen: list
    half: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "half", self.x / 2)
        self.seen.append("made")


class Leaf(nn.Linear):
    """It leaves its output in the list that it is given."""

    def forward(self, x, kept):
        kept.append(super().forward(x))
        return kept[-1]


class Leaves(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Leaf(5, 5), Leaf(5, 5)])

    def forward(self, x):
        kept = []
        for block in self.blocks:
            x = block(x, kept)
        return x, kept


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])
        self.seen = []

    def forward(self, scaled):
        self.seen = [scaled.half.dtype, scaled.half[0, 0].item()]
        return self.blocks[0](scaled.half)


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_a_unit_may_fill_what_it_is_given(engine):
    """A list without tensors to cast reaches the unit as the same object."""
    model = seeded(Leaves, dtype=FP32)
    trained = engine(model, ADAMW(model.parameters()), param_dtype=BF16)
    output, kept = trained(torch.ones(2, 5))
    assert len(kept) == 2, "what the units left is lost"
    output.float().sum().backward()
    trained.step()


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_a_dataclass_is_cast_without_being_made_again(engine):
    """Frozen, and with a field that only `__post_init__` sets."""
    model = seeded(Halves, dtype=FP32)
    trained = engine(model, ADAMW(model.parameters()), param_dtype=BF16)
    given = Scaled(torch.ones(2, 5), [])
    output = trained(given)
    assert given.seen == ["made"] and given.half.dtype == FP32
    assert model.seen == [BF16, 0.5], "the value of `half` is not the caller's"
    output.float().sum().backward()
    trained.step()


# Loss scaling.


def batch_with_overflow(step, rank):
    """In step 2 an output of rank 1 has an infinite gradient. In `Tiny` this is in the shard of one rank only."""
    tokens, targets = batch(step, rank)
    if step == 2 and rank == 1:
        targets[0, 0] = torch.inf
    return tokens, targets


def scaled_step(pair, scaler, step, max_norm=None, skipped=False):
    """Backward and step of both, with a scaled loss of the engine. A step that overflows is `skipped`."""
    pair.backward_of_plain(step)
    scaler.scale(pair.loss_of_engine(step)).backward()
    if max_norm is not None:
        scaler.unscale_(pair.trained)
        if skipped:
            pair.trained.clip_grad_norm_(max_norm)
        else:
            pair.clip(max_norm)
    for optimizer in as_list(pair.optimizer):
        if not skipped:
            optimizer.step()
        optimizer.zero_grad()
    scaler.step(pair.trained)
    scaler.update()
    pair.trained.zero_grad()


SCALED = {"Blocks": Blocks, "Tiny": Tiny}


@pytest.mark.ranks(2, thorough=(4,))
@pytest.mark.stages("zero1", "zero2", "zero3")
@pytest.mark.parametrize("model", SCALED)
def test_an_overflow_on_one_rank_skips_the_step_on_all(engine, model):
    """All ranks skip the step in which one rank overflows, and no other step."""
    pair = Pair(engine, seeded(SCALED[model]), data=batch_with_overflow)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for step in range(5):
        scaled_step(pair, scaler, step, max_norm=0.1 if step % 2 else None, skipped=step == 2)
        scales.append(scaler.get_scale())
    pair.check_weights()
    # Halved by the overflow, doubled after two good steps.
    assert scales == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_a_disabled_scaler_changes_nothing(engine):
    """With `enabled=False` the loop gives the same results as without a scaler."""
    pair = Pair(engine, seeded(Blocks), tolerance=EXACT)
    scaler = GradScaler("cpu", enabled=False)
    for step in range(2):
        scaled_step(pair, scaler, step, max_norm=0.1)
    pair.check_weights()


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_a_scaler_is_called_in_order(engine):
    """Unscaling or stepping twice without `update()` is an error, as in torch."""
    model = seeded(Blocks)
    trained = engine(model, MOMENTUM(model.parameters()))
    scaler = GradScaler("cpu")
    scaler.scale(mse(trained, *own_batch(0))).backward()
    scaler.unscale_(trained)
    with pytest.raises(RuntimeError, match=r"update\(\)"):
        scaler.unscale_(trained)
    scaler.step(trained)
    with pytest.raises(RuntimeError, match=r"update\(\)"):
        scaler.step(trained)


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_torchs_own_scaler_is_refused(engine):
    """It would skip a step on one rank only."""
    pair = Pair(engine, seeded(Blocks))
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(pair.loss_of_engine()).backward()
    with pytest.raises((RuntimeError, AssertionError)):
        scaler.step(pair.trained.optimizer)
    dist.barrier()
    pair.trained.zero_grad()
    pair.train()
