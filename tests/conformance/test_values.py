"""Losses and weights match one process on the batches of all ranks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import (
    MOMENTUM,
    Blocks,
    Dtypes,
    Frozen,
    Nested,
    Recomputed,
    Recorder,
    Tied,
    Tiny,
    Twice,
    mse,
    mse_loss,
    own_batch,
    same,
    seeded,
)
from torch import nn

from conformance.pair import Pair
from conformance.subjects import subject

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.3)
MODELS = {make.__name__: make for make in (Blocks, Tied, Frozen, Recomputed, Twice, Tiny, Nested)}


@pytest.mark.ranks(3, thorough=(1, 2, 4))
@pytest.mark.chapters
@pytest.mark.parametrize("model", MODELS)
def test_trains_as_one_process(engine, model):
    """Losses and weights match one process on all batches that starts with rank 0's weights.

    In float64 the order of a sum causes differences of 1e-15, and any mistake causes more than 1e-12. SGD with momentum
    and decay keeps a trace of every gradient. A sum instead of a mean, a missing decay or a wrong rate is noticed.
    """
    Pair(engine, seeded(MODELS[model])).train()


@pytest.mark.ranks(2, thorough=(3,))
@pytest.mark.chapters
def test_trains_as_one_process_with_adamw(engine):
    """The same with the usual optimizer, whose state the ranks shard."""
    Pair(engine, seeded(Tied), ADAMW, tolerance=1e-10).train(5)  # division by small roots amplifies


@pytest.mark.ranks(3, thorough=(1, 2, 4))
@pytest.mark.stages("zero1", "zero2")
@pytest.mark.chapters
@pytest.mark.parametrize("bucket_mb", [0, 0.0005])
def test_the_size_of_buckets_changes_no_value(engine, bucket_mb):
    """One bucket per parameter, or small ones."""
    Pair(engine, seeded(Twice), bucket_mb=bucket_mb).train()


UNITS = {
    "no prefetch": {"prefetch": 0},
    "five units ahead": {"prefetch": 5},
    "only the root": {"units": []},
    "gathered until backward": {"reshard_after_forward": False},
    "gathered until step()": {"reshard_after_backward": False},
}


@pytest.mark.ranks(3, thorough=(1, 2, 4))
@pytest.mark.stages("zero3")
@pytest.mark.parametrize("options", UNITS)
def test_the_choice_and_life_of_units_change_no_value(engine, options):
    """Prefetch, units, and when they are freed."""
    Pair(engine, seeded(Twice), **UNITS[options]).train()


@pytest.mark.ranks(3)
@pytest.mark.chapters
def test_several_dtypes(engine):
    """Parameters of several dtypes, real and complex, side by side in one block."""
    Pair(engine, seeded(Dtypes)).train()


class Gpt(nn.Module):
    """Attention, norms and a tied head in float32, with sizes that are not multiples of a vector register."""

    def __init__(self, width=20):
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        layer = partial(nn.TransformerEncoderLayer, width, 4, 33, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(layer() for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))[:, 0, :3]


def train_gpt(engine, **options):
    """The losses of three steps in float32, and the weights afterwards."""
    model = seeded(Gpt, dtype=torch.float32)
    trained = engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
    losses = []
    for step in range(3):
        loss = mse(trained, *own_batch(step, dtype=torch.float32))
        loss.backward()
        trained.step()
        trained.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), engine.weights(trained)


MIXED = {"param_dtype": torch.bfloat16}
MIXED_SUMS = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.chapters
@pytest.mark.parametrize("other", ["ddp", "fsdp2"])
def test_equals_ddp_and_fsdp2_to_the_bit_on_two_ranks(engine, other):
    """A GPT's losses and weights in float32.

    Both sides add the gradients of two ranks, and a + b = b + a. With more ranks the order of the sum differs.
    """
    equals(engine, other)


@pytest.mark.parametrize("options", [MIXED, MIXED_SUMS], ids=["bfloat16", "float32 sums"])
def test_equals_fsdp2_to_the_bit_in_mixed_precision(engine, options):
    equals(engine, "fsdp2", **options)


def equals(engine, other, **options):
    if not engine.ours and not engine.documented.exact:
        pytest.skip(f"{engine.name} adds in an order of its own")
    losses, weights = train_gpt(engine, **options)
    expected_losses, expected = train_gpt(subject(other), **options)
    same(losses, expected_losses, 0, "the losses")
    for name, weight in weights.items():
        same(weight, expected[name], 0, name)


class Given(nn.Module):
    """Units whose gradients are their inputs, and whose weights begin at 0."""

    def __init__(self, count):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(count, 1, bias=False) for _ in range(2))
        for block in self.blocks:
            nn.init.zeros_(block.weight)

    def forward(self, x):
        return sum(block(x).sum() for block in self.blocks)


LARGEST = {  # the dtype, and the largest integer up to which it has all of them
    "": (torch.float32, 2**24),
    "bfloat16": (torch.bfloat16, 2**8),
    "float16": (torch.float16, 2**11),
}


@pytest.mark.ranks(3, thorough=(1, 2, 4))
@pytest.mark.parametrize("reduce_dtype", LARGEST)
def test_a_step_on_integers_is_exact(engine, reduce_dtype):
    """The sum of integers is exact in any order, and the mean is rounded once, after the sum.

    In float16 the sum may overflow although the mean does not. An inf on one rank reaches all ranks.
    """
    size, (dtype, largest) = dist.get_world_size(), LARGEST[reduce_dtype]
    largest //= size  # so that the sum is exact
    values = torch.randint(-largest, largest, (size, 999), generator=torch.Generator().manual_seed(3)).double()
    if reduce_dtype == "float16":
        values[:, 0] = 40000  # the sum does not fit, the mean does
        values[0, 1] = torch.inf
    expected = (values.sum(0) / size).to(dtype).float()
    model = seeded(Given, 999, dtype=torch.float32)
    options = {"reduce_dtype": dtype} if reduce_dtype else {}
    trained = engine(model, torch.optim.SGD(model.parameters(), lr=1.0), **options)
    trained(values[dist.get_rank()][None].float()).backward()
    trained.step()
    for name, weight in engine.weights(trained).items():
        # From 0, a step of SGD with rate 1 gives the negative gradient.
        assert torch.equal(-weight[0], expected), name


@pytest.mark.chapters
def test_all_ranks_start_with_rank_0s_weights(engine):
    """If the model differs between ranks, all start with rank 0's values, including frozen parameters."""
    if not engine.broadcasts:
        pytest.skip(f"{engine.name} wants equal weights on all ranks")
    model = seeded(Frozen, seed=10 * dist.get_rank())
    expected = seeded(Frozen, seed=0)
    trained = engine(model, MOMENTUM(model.parameters()))
    for name, weight in engine.weights(trained).items():
        same(weight, expected.get_parameter(name).detach(), 0, name)


@pytest.mark.chapters
def test_training_step_is_the_loop(engine):
    """`training_step` makes a step and returns this rank's loss, detached. An engine may split the batch in it."""
    pair = Pair(engine, seeded(Blocks))
    for step in range(3):
        expected = pair.backward_of_plain(step)[pair.rank]
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        found = pair.trained.training_step(*pair.batch(step), mse_loss)
        assert not found.requires_grad
        same(found, expected.detach(), pair.tolerance, "the loss")
    pair.check_weights()


class Loose(Blocks):
    """Every second time the blocks run in a different order than declared."""

    turn = False

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        for block in list(self.blocks)[:: -1 if self.turn else 1]:
            x = block(x)
        return self.head(x)


@pytest.mark.ranks(3)
def test_units_may_run_in_any_order(engine):
    """An order that differs from the declaration, and from step to step, changes no value."""
    pair = Pair(engine, seeded(Loose))
    for step in range(4):
        pair.plain.turn = pair.model.turn = step % 2 == 1
        pair.backward(step)
        pair.step()
    pair.check_weights()


def record_step(build, make, options):
    """The collectives with their sizes, the loss and the weights of the third step of the engine from `build`."""
    model = seeded(make, dtype=torch.float32)
    trained = build(model, ADAMW(model.parameters()), **options)
    data = [own_batch(step, dtype=torch.float32) for step in range(3)]
    for inputs, targets in data[:2]:
        trained.training_step(inputs, targets, mse_loss)
    with Recorder() as recorder:
        loss = trained.training_step(*data[2], mse_loss)
    return recorder, loss, build.weights(trained)


def compare_with_chapter(engine, make, **options):
    found, loss, weights = record_step(engine, make, options)
    chapter, expected_loss, expected = record_step(subject(f"{engine.like}.py"), make, options)
    assert found.collectives == chapter.collectives
    same(loss, expected_loss, 0, "the loss")
    for name, weight in weights.items():
        same(weight, expected[name], 0, name)


@pytest.mark.ranks(2, thorough=(1, 3, 4))
@pytest.mark.stages("zero1", "zero2")
@pytest.mark.parametrize("bucket_mb", [None, 0.0005])
def test_an_engine_with_buckets_does_what_its_chapter_does(engine, bucket_mb):
    """Without options it issues the same collectives, and computes the same loss and weights to the bit.

    Both pass the same numbers to the same operations.
    """
    compare_with_chapter(engine, Tied, bucket_mb=bucket_mb)


@pytest.mark.ranks(2, thorough=(1, 3, 4))
@pytest.mark.stages("zero3")
@pytest.mark.parametrize("model, prefetch", [("Blocks", 1), ("Recomputed", 1), ("Twice", 2), ("Tied", 0)])
def test_an_engine_with_units_does_what_its_chapter_does(engine, model, prefetch):
    """Without options it issues the same collectives, and computes the same loss and weights to the bit."""
    compare_with_chapter(engine, MODELS[model], prefetch=prefetch)
