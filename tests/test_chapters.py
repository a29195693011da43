"""What only the chapters promise. tests/conformance has what any engine must do, and asks the chapters as well.

In every test each rank has its own data.
The body of a test runs on `ranks` processes at the same time (`on_every_rank`). Numbers of ranks other than two or
three, and most of the optimizers, run with `-m thorough`.
"""

import copy
import gc
import os
import re
import shutil
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import (
    MOMENTUM,
    Blocks,
    Dtypes,
    Frozen,
    Nested,
    Normed,
    Pair,
    PartlyRecomputed,
    Recomputed,
    Recorder,
    SideLoss,
    Tied,
    Tiny,
    Twice,
    batch,
    mse,
    on_every_rank,
    own_batch,
    raised_on_every_rank,
    same,
    seeded,
    storage_bytes,
    whole_weights,
    with_side_loss,
)
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from zero1 import ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3

ROOT = Path(__file__).resolve().parent.parent
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.3)  # a step too many or too few shows in the decay


def thorough(*values):
    return [pytest.param(value, marks=pytest.mark.thorough) for value in values]


stages = pytest.mark.parametrize("stage", [ZeRO1, ZeRO2, ZeRO3])
moving = pytest.mark.parametrize("stage", [ZeRO2, ZeRO3])  # whose gradients leave `param.grad` during backward
two_ranks = pytest.mark.parametrize("ranks", [2])
all_ranks = pytest.mark.parametrize("ranks", [2, *thorough(1, 3, 4)])

# Losses and weights.


@all_ranks
@stages
@pytest.mark.parametrize("make", [Blocks, Tied, Frozen, Recomputed, Twice, Tiny, Dtypes, Nested])
@on_every_rank
def test_trains_as_one_process_on_the_concatenated_batch(ranks, stage, make):
    """Losses and weights match one process: uneven sizes, tied, frozen, recomputed, padding-only ranks, dtypes.

    In float64 the order of a sum causes differences of 1e-15, and any mistake causes more than 1e-12.
    """
    Pair(stage, seeded(make)).train()


OPTIONS = {
    "a bucket per parameter": (ZeRO1, {"bucket_mb": 0}),
    "several small buckets": (ZeRO2, {"bucket_mb": 0.0005}),
    "a bucket per parameter, reduced in backward": (ZeRO2, {"bucket_mb": 0}),
    "no prefetch": (ZeRO3, {"prefetch": 0}),
    "two units ahead": (ZeRO3, {"prefetch": 2}),
    "only the root": (ZeRO3, {"units": []}),
}


@all_ranks
@pytest.mark.parametrize("option", OPTIONS)
@on_every_rank
def test_options_change_no_value(ranks, option):
    """Buckets of any size, prefetch and the choice of units change neither losses nor weights."""
    stage, options = OPTIONS[option]
    Pair(stage, seeded(Tied), **options).train()


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


class Ddp:
    def __init__(self, model, optimizer):
        self.model = DistributedDataParallel(model)
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad

    def __call__(self, inputs):
        return self.model(inputs)


def fsdp2(model, make_optimizer):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, make_optimizer(model.parameters())


@two_ranks
@stages
@on_every_rank
def test_equals_ddp_and_fsdp2_to_the_bit_on_two_ranks(ranks, stage):
    """In float32 the losses are equal to the bit.

    All three add the gradients of two ranks, and a + b = b + a. With more ranks the order of the sum differs.
    """
    model = seeded(Gpt, dtype=torch.float32)
    ours, of_ddp = copy.deepcopy(model), copy.deepcopy(model)
    of_fsdp2, optimizer = fsdp2(model, ADAMW)
    engine = stage(ours, ADAMW(ours.parameters()))
    ddp = Ddp(of_ddp, ADAMW(of_ddp.parameters()))
    for step in range(5):
        data = own_batch(step, dtype=torch.float32)
        losses = [mse(each, *data) for each in (engine, ddp, of_fsdp2)]
        for loss in losses:
            loss.backward()
        same(losses[0], losses[1], 0, f"the loss of step {step}, and DDP's")
        same(losses[0], losses[2], 0, f"the loss of step {step}, and FSDP2's")
        for each in (engine, ddp, optimizer):
            each.step()
            each.zero_grad()
    expected = dict(of_ddp.named_parameters())
    for name, weight in whole_weights(engine).items():
        same(weight, expected[name].detach(), 0, f"{name}, and DDP's")


@two_ranks
@stages
@on_every_rank
def test_other_layers_train_as_under_ddp(ranks, stage):
    """Convolutions in channels_last, LSTMs, attention, batch and weight norm, dropout: losses match DDP's to 1e-6."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(1, 6, 3, padding=1)
            self.blocks = nn.ModuleList(
                [
                    nn.LSTM(6, 6, num_layers=2, batch_first=True),
                    nn.MultiheadAttention(6, 2, batch_first=True),
                    nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 6)),
                ]
            )
            self.head = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))

        def forward(self, tokens):
            x = self.convolution(tokens.float()[:, None, None]).mean(2).transpose(1, 2).contiguous()
            lstm, attention, last = self.blocks
            x, _ = lstm(x)
            x, _ = attention(x, x, x)
            return self.head(last(x.mean(1)))

    model = seeded(Layers, dtype=torch.float32).to(memory_format=torch.channels_last)
    ours, of_ddp = copy.deepcopy(model), copy.deepcopy(model)
    engine = stage(ours, ADAMW(ours.parameters()))
    ddp = Ddp(of_ddp, ADAMW(of_ddp.parameters()))
    for step in range(3):
        losses = []
        for each in (engine, ddp):
            torch.manual_seed(100 * step + dist.get_rank())  # of dropout
            losses.append(mse(each, *own_batch(step, dtype=torch.float32)))
            losses[-1].backward()
            each.step()
            each.zero_grad()
        same(losses[0], losses[1], 1e-6, f"the loss of step {step}")


# The optimizer.

OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "SGD, Nesterov": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    "AdamW, amsgrad": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "AdamW, tensor rate": partial(torch.optim.AdamW, lr=torch.tensor(0.01, dtype=torch.float64)),
    "Adam, maximize": partial(torch.optim.Adam, lr=0.001, maximize=True),
    "SGD": partial(torch.optim.SGD, lr=0.02),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.001, momentum=0.5, centered=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "ASGD": partial(torch.optim.ASGD, lr=0.02, t0=1),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
}


@two_ranks
@stages
@pytest.mark.parametrize("name", [*list(OPTIMIZERS)[:3], *thorough(*list(OPTIMIZERS)[3:])])
@on_every_rank
def test_optimizers_that_treat_each_element_by_itself(ranks, stage, name):
    """The optimizer that the user built updates the shards, with all of its options."""
    Pair(stage, seeded(Tied), OPTIMIZERS[name], tolerance=1e-10).train(5)  # division by small roots amplifies


@two_ranks
@stages
@on_every_rank
def test_an_optimizer_over_named_parameters(ranks, stage):
    """`AdamW(model.named_parameters())` also works."""
    model = seeded(Blocks)
    pair = Pair(stage, model)
    plain, mine = copy.deepcopy(model), copy.deepcopy(model)
    pair.plain, pair.optimizers = plain, [ADAMW(plain.parameters()), ADAMW(mine.named_parameters())]
    pair.engine = stage(mine, pair.optimizers[1])
    pair.train()
    pair.optimizers[1].state_dict()


@two_ranks
@stages
@pytest.mark.parametrize("when", ["before", "after"])
@on_every_rank
def test_schedulers_built_before_or_after_the_stage(ranks, stage, when):
    """The stage keeps the optimizer and its group, so a scheduler keeps changing its learning rate."""
    make = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10)
    Pair(stage, seeded(Blocks), schedule=(make, None) if when == "before" else (None, make)).train(4)


@two_ranks
@stages
@on_every_rank
def test_options_of_the_group_follow_the_optimizer(ranks, stage):
    """You can change the learning rate by hand between steps."""
    pair = Pair(stage, seeded(Blocks))
    for step in range(3):
        for optimizer in pair.optimizers:
            optimizer.param_groups[0]["lr"] = 0.01 * step
        pair.backward(step)
        pair.step()
    pair.check_weights()


@two_ranks
@stages
@on_every_rank
def test_gradients_can_be_read_and_clipped_by_hand(ranks, stage):
    """After `reduce_gradients()` they are the mean over all ranks, and `step()` uses what you make of them."""
    pair = Pair(stage, seeded(Blocks), ADAMW)
    shards = pair.engine.optimizer.param_groups[0]["params"]
    for step in range(3):
        pair.backward(step)
        expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01)
        pair.engine.reduce_gradients()
        pair.engine.reduce_gradients()  # nothing is left to do
        if stage is ZeRO1:  # every rank has the whole mean in `param.grad`
            found = nn.utils.clip_grad_norm_(pair.engine.model.parameters(), 0.01)
        else:
            squares = sum(shard.grad.square().sum() for shard in shards)
            dist.all_reduce(squares)
            found = squares.sqrt()
            for shard in shards:
                shard.grad *= 0.01 / (found + 1e-6)
        same(found, expected, 1e-12, "the norm of all gradients")
        pair.step()
    pair.check_weights()


@two_ranks
@stages
@on_every_rank
def test_gradients_add_up_until_zero_grad(ranks, stage):
    """Without `zero_grad()` a step uses the gradients of the steps before it as well, as in plain torch."""
    pair = Pair(stage, seeded(Blocks))
    for step in range(3):
        pair.backward(step)
        pair.optimizers[0].step()
        pair.engine.step()
    pair.check_weights()


@two_ranks
@stages
@on_every_rank
def test_a_graph_of_before_the_step_is_an_error(ranks, stage):
    """Its backward would multiply by the new weights. Plain torch raises too, and training continues afterwards."""
    pair = Pair(stage, seeded(Blocks))
    inputs, targets = own_batch(0)
    old = pair.engine(inputs)
    nn.functional.mse_loss(old, targets).backward(retain_graph=True)
    pair.engine.step()
    pair.engine.zero_grad()
    text = "changed in place" if stage is ZeRO3 else "modified by an inplace operation"
    raised_on_every_rank(RuntimeError, text, (pair.engine(inputs) * old).mean().backward)
    pair = Pair(stage, seeded(Blocks))
    pair.train()


# Two events of ZeRO-3's backward. Each of these models needs one of them: tests/test_deleted_lines.py.


@two_ranks
@stages
@pytest.mark.parametrize("make", [SideLoss, PartlyRecomputed, Normed])
@on_every_rank
def test_models_that_need_one_of_the_events_of_backward(ranks, stage, make):
    """A loss that does not leave by the output, a checkpoint inside a unit, and a norm behind the embedding."""
    Pair(stage, seeded(make)).train(loss=with_side_loss)


@two_ranks
@on_every_rank
def test_zero3_gathers_each_unit_twice(ranks):
    """With a norm behind the embedding, backward asks for a weight of the root last. No unit is gathered for that."""
    model = seeded(Normed)
    engine = ZeRO3(model, ADAMW(model.parameters()))
    last = []
    model.embedding.weight.register_hook(lambda gradient: last.append([unit.allocated for unit in engine.units]))
    with Recorder() as recorder:
        mse(engine, *own_batch(0)).backward()
    kinds = [kind for kind, _ in recorder.collectives]
    same(kinds.count("all-gather"), 2 * 3 + 1, what="gathers of three units and the root")
    same(last, [[False, False, False, True]], what="gathered units when the embedding's gradient is there")


@two_ranks
@on_every_rank
def test_zero3_refuses_a_forward_that_writes_to_its_weights(ranks):
    """The write is lost when the unit is freed. After the error training continues without it."""

    class Clamped(nn.Linear):
        clamps = False

        def forward(self, x):
            if self.clamps:
                with torch.no_grad():
                    self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    class ClampedAtLast(Blocks):
        def __init__(self):
            super().__init__()
            self.blocks.append(Clamped(5, 5))

    pair = Pair(ZeRO3, seeded(ClampedAtLast))
    pair.train(1)
    pair.engine.model.blocks[-1].clamps = True
    raised_on_every_rank(RuntimeError, "'blocks.3' was changed in place", pair.engine, own_batch(5)[0])
    pair.engine.zero_grad()
    pair.engine.model.blocks[-1].clamps = False
    pair.train()


@two_ranks
@on_every_rank
def test_zero3_names_a_weight_that_is_read_outside_of_backward(ranks):
    """Tools that draw the graph read saved tensors: the error names the unit, and other tensors can be read."""
    model = seeded(Blocks)
    engine = ZeRO3(model, ADAMW(model.parameters()))
    loss = mse(engine, *own_batch(0))
    nodes, errors = [loss.grad_fn], []
    while nodes:
        node = nodes.pop()
        for name in dir(node):
            if name.startswith("_saved_"):
                try:
                    getattr(node, name)
                except RuntimeError as error:
                    errors.append(str(error))
        nodes += [each for each, _ in node.next_functions if each is not None]
    assert errors and all("was read outside of backward" in error for error in errors), errors
    assert not any("'root'" in error for error in errors), errors  # it is gathered, so it can be read
    loss.backward()
    engine.step()


# Memory.


class Wide(nn.Module):
    """Large layers and hardly any activations, so that the live bytes are parameters and gradients.

    Sizes are powers of two. So there is no padding, and the bytes equal the accounting exactly.
    """

    def __init__(self, width=64, blocks=6):
        super().__init__()
        self.first = nn.Linear(1, width, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))
        self.head = nn.Linear(width, 32, bias=False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wide_batch(step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(1, 1, generator=generator), torch.randn(1, 32, generator=generator)


FUSED = partial(torch.optim.AdamW, lr=1e-3, fused=True)  # makes no temporary tensors


def wide_engine(stage, recorder=None, **options):
    model = seeded(Wide, dtype=torch.float32)
    return stage(model, FUSED(model.parameters()), **options)


def accounting(stage, psi, n, bucket, root, unit, head):
    """The peak in bytes, as at the end of each chapter. `psi` counts parameters, the others are bytes.

    head    the root's first gradients, which stay whole until the last one has come
    """
    if stage is ZeRO1:
        return 8 * psi + 8 * psi / n + unit
    if stage is ZeRO2:
        return 4 * psi + 12 * psi / n + (2 - 1 / n) * bucket
    return 16 * psi / n + root + head + 4 * unit - (root + 2 * unit) / n


@pytest.mark.parametrize("ranks", [2, *thorough(4)])
@stages
@on_every_rank
def test_peak_is_the_accounting(ranks, stage):
    """At no operation of a step are more bytes alive than in the accounting, apart from activations."""
    engine, peak = peak_of(stage)
    psi = sum(param.numel() for param in engine.model.parameters())
    unit, root, head = 4 * 256 * 256, 4 * (256 + 32 * 256), 4 * 32 * 256
    expected = accounting(stage, psi, ranks, unit, root, unit, head)
    activations = 40_000  # seven activations of 256 floats and their gradients, the batch, AdamW's counters
    assert expected - unit / 4 <= peak <= expected + activations, (expected, peak, (peak - expected) / unit)


def peak_of(stage):
    model = seeded(partial(Wide, 256), dtype=torch.float32)
    with Recorder(model.parameters()) as recorder:
        options = {} if stage is ZeRO3 else {"bucket_mb": 0}  # a layer is a bucket
        engine = stage(model, FUSED(model.parameters()), **options)
        for step in range(2):
            recorder.peak = 0  # the first step makes the optimizer's state
            mse(engine, *wide_batch(step)).backward()
            engine.step()
            engine.zero_grad()
    return engine, recorder.peak


DEMO_PEAK = """
import sys
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from helpers import Recorder
import zero1, zero2, zero3

ranks = int(sys.argv[1])
dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
for stage, options in ((zero1.ZeRO1, {"bucket_mb": 0.25}), (zero2.ZeRO2, {"bucket_mb": 0.25}), (zero3.ZeRO3, {})):
    torch.manual_seed(0)
    model = zero1.Model()
    with Recorder(*model.parameters()) as recorder:
        engine = stage(model, torch.optim.AdamW(model.parameters(), fused=True), **options)
        for step in range(2):
            recorder.peak = 0
            tokens = torch.randint(256, (1, 17))
            engine.training_step(tokens[:, :16], tokens[:, 16], torch.nn.functional.cross_entropy)
    print(recorder.peak)
"""


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_formulas_of_the_peak_hold_for_the_demo(ranks):
    """Rank 0 of a group without other ranks runs the model of `main` on one row, so that activations are small."""
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    run = subprocess.run(
        [sys.executable, "-c", DEMO_PEAK, str(ranks)],
        env=os.environ | paths,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    head, root, psi = 256 * 256, 256 * 256 + 256 * 16 + 2 * 256, 7 * 256 * 256 + 256 * 16 + 2 * 256
    for stage, found in zip((ZeRO1, ZeRO2, ZeRO3), map(int, run.stdout.split())):
        expected = accounting(stage, psi, ranks, bucket=4 * head, root=4 * root, unit=4 * head, head=4 * head)
        assert abs(found - expected) <= 0.01 * expected, (stage, found, expected)


@two_ranks
@on_every_rank
def test_peak_of_zero3_is_not_above_fsdp2s(ranks):
    """With the same units and prefetch ZeRO-3 needs no more memory than `fully_shard`."""
    _, ours = peak_of(ZeRO3)
    model = seeded(partial(Wide, 256), dtype=torch.float32)
    with Recorder(model.parameters()) as recorder:
        model, optimizer = fsdp2(model, FUSED)
        for step in range(2):
            recorder.peak = 0
            mse(model, *wide_batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert 0 < ours <= recorder.peak, (ours, recorder.peak)


@all_ranks
@pytest.mark.parametrize("make", [Wide, Recomputed, Twice, Tied])
@pytest.mark.parametrize("prefetch", [1, *thorough(0, 2)])
@on_every_rank
def test_zero3_frees_what_it_gathers(ranks, make, prefetch):
    """At most two units and the root have memory at any time, and none between the steps."""
    model = seeded(make, dtype=torch.float32)
    engine = ZeRO3(model, ADAMW(model.parameters()), prefetch=prefetch)
    sizes = sorted((unit.flat.numel() * 4 for unit in engine.units if unit.module is not model), reverse=True)
    root = sum(unit.flat.numel() * 4 for unit in engine.units if unit.module is model)
    # In backward a unit that ran twice stays gathered between its two runs. In forward its second run gathers the unit
    # that followed its first run, and this unit stays gathered until backward.
    more = sizes[0] if make is Twice else 0

    def gathered():
        return storage_bytes(model.parameters())

    same(gathered(), 0, what="bytes gathered after the build")
    data = wide_batch if make is Wide else partial(own_batch, dtype=torch.float32)
    with Recorder(probe=gathered) as recorder:
        for step in range(2):
            loss = mse(engine, *data(step))
            assert root <= gathered() <= root + more, gathered()
            loss.backward()
            same(gathered(), 0, what="bytes gathered after backward")
            mse(engine, *data(step + 5))
            engine.step()
            same(gathered(), 0, what="bytes gathered after a forward without a backward, and a step")
            engine.zero_grad()
            with torch.no_grad():
                engine(data(step)[0])
            same(gathered(), 0, what="bytes gathered after an evaluation")
    most = root + more + sum(sizes[: 1 + (prefetch if ranks > 1 else 0)])
    assert max(recorder.probed) <= most, (max(recorder.probed), root, sizes)


# Traffic.


@pytest.mark.parametrize("ranks", [2, *thorough(3, 4)])
@pytest.mark.parametrize("make", [Wide, Recomputed])
@on_every_rank
def test_zero3_gathers_the_next_unit_before_the_present_one_computes(ranks, make):
    """In forward and in backward the gather is issued first, so that it is in flight while the unit computes."""
    model = seeded(make, dtype=torch.float32)
    engine = ZeRO3(model, ADAMW(model.parameters()))
    data = wide_batch if make is Wide else partial(own_batch, dtype=torch.float32)
    places = {unit.flat.untyped_storage()._cdata: index for index, unit in enumerate(engine.units)}
    inner = len(engine.units) - 1

    def events(function):
        with Recorder() as recorder:
            result = function()
        found = []
        for name, used in recorder.operations:
            for index in dict.fromkeys(places[each] for each in used if each in places):
                if index < inner:
                    found.append(("gather" if name == "all-gather" else "compute", index))
        return result, list(dict.fromkeys(found))  # the first of each

    loss, forward = events(lambda: mse(engine, *data(0)))
    _, backward = events(loss.backward)
    for index in range(inner - 1):
        assert forward.index(("gather", index + 1)) < forward.index(("compute", index)), forward
        assert backward.index(("gather", index)) < backward.index(("compute", index + 1)), backward


# Errors. Every message says what to do.


def two_groups(model):
    return torch.optim.SGD([{"params": [param]} for param in model.parameters()], lr=0.1)


def stepped(model):
    optimizer = ADAMW(model.parameters())
    mse(model, *batch(0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def adagrad(model):
    return torch.optim.Adagrad(model.parameters())


def no_instance(model):
    return torch.optim.AdamW


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters())


def adafactor(model):
    return torch.optim.Adafactor(model.parameters())


def left_out(model):
    return ADAMW([*model.parameters()][:-2])


def foreign(model):
    return ADAMW([*model.parameters(), nn.Parameter(torch.ones(1))])


def all_frozen(model):
    return ADAMW(model.requires_grad_(False).parameters())


def on_meta(model):
    return ADAMW(model.to("meta").parameters())


def half_on_meta(model):
    model.head.to("meta")
    return ADAMW(model.parameters())


REFUSED = {
    "not an optimizer": (no_instance, TypeError, "expected an optimizer"),
    "LBFGS": (lbfgs, ValueError, "looks at whole tensors"),
    "Adafactor": (adafactor, ValueError, "looks at whole tensors"),
    "two groups": (two_groups, ValueError, "parameter groups"),
    "left out": (left_out, ValueError, "not in the optimizer: ['head.weight'"),
    "foreign": (foreign, ValueError, "not the model's"),
    "stepped": (stepped, ValueError, "has state for whole parameters already"),
    "Adagrad": (adagrad, ValueError, "has state for whole parameters already"),
    "all frozen": (all_frozen, ValueError, "nothing to train"),
    "meta": (on_meta, ValueError, "move the model to one device"),
    "two devices": (half_on_meta, ValueError, "move the model to one device"),
}


@two_ranks
@stages
@pytest.mark.parametrize("case", REFUSED)
@on_every_rank
def test_refuses_before_anything_is_sent(ranks, stage, case):
    """A build that cannot train raises an error on every rank, sends nothing, and does not change the model."""
    make_optimizer, error, text = REFUSED[case]
    model = seeded(Blocks)
    optimizer = make_optimizer(model)
    with Recorder() as recorder:
        raised_on_every_rank(error, text, stage, model, optimizer)
    same(recorder.collectives, [])
    if case not in ("all frozen", "meta", "two devices"):
        Pair(stage, model).train(1)


@two_ranks
@stages
@pytest.mark.parametrize("wrap", ["DDP", "FSDP", "fully_shard"])
@on_every_rank
def test_refuses_a_model_whose_gradients_are_reduced_already(ranks, stage, wrap):
    """The whole model, or one block of it, is in DDP, FSDP1 or FSDP2."""
    wrappers = {
        "DDP": DistributedDataParallel,
        "FSDP": partial(FullyShardedDataParallel, device_id=torch.device("cpu")),
        "fully_shard": fully_shard,
    }
    for part in ("model", "layer"):
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))  # none of the three supports all models of these tests
        if part == "model":
            model = wrappers[wrap](model)
        else:
            model[1] = wrappers[wrap](model[1])
        optimizer = MOMENTUM(model.parameters())
        raised_on_every_rank(TypeError, "pass the plain model", stage, model, optimizer)


@two_ranks
@stages
@on_every_rank
def test_refuses_inference_mode(ranks, stage):
    """Tensors made in inference mode cannot be trained."""
    model = seeded(Blocks)
    with torch.inference_mode():
        raised_on_every_rank(RuntimeError, "inference_mode", stage, model, MOMENTUM(model.parameters()))


@two_ranks
@stages
@on_every_rank
def test_refuses_the_optimizers_own_step(ranks, stage):
    """`optimizer.step()` without the reduction would update nothing, or use local gradients."""
    pair = Pair(stage, seeded(Blocks))
    raised_on_every_rank(RuntimeError, "call engine.step()", pair.engine.optimizer.step)
    if stage is not ZeRO1:
        pair.engine.zero_grad()
    mse(pair.engine, *own_batch(5))
    pair.engine.zero_grad()
    pair.train()


@two_ranks
@stages
@on_every_rank
def test_refuses_a_scaler(ranks, stage):
    """A GradScaler steps the optimizer itself."""
    pair = Pair(stage, seeded(Blocks))
    mse(pair.engine, *own_batch(0)).backward()
    if stage is ZeRO1:
        raised_on_every_rank(RuntimeError, "call engine.step()", pair.engine.optimizer.step)
    pair.engine.zero_grad()
    pair.train()


def clear_by_model(engine, loss):
    engine.model.zero_grad()
    loss.backward()


def clear_after(engine, loss):
    loss.backward()
    engine.model.zero_grad()


def drop_one(engine, loss):
    loss.backward()
    engine.model.head.weight.grad = None


def replace_one(engine, loss):
    loss.backward()
    engine.model.head.weight.grad = torch.ones_like(engine.model.head.weight)


def create_graph(engine, loss):
    loss.backward(create_graph=True)


@two_ranks
@pytest.mark.parametrize("do", [clear_by_model, clear_after, drop_one, replace_one, create_graph])
@on_every_rank
def test_zero1_refuses_gradients_that_left_the_bucket(ranks, do):
    """They would not be sent. `step()` raises before anything is sent, and training continues after `zero_grad()`."""
    pair = Pair(ZeRO1, seeded(Blocks))
    pair.train(1)
    do(pair.engine, mse(pair.engine, *own_batch(7)))
    with Recorder() as recorder:
        raised_on_every_rank(RuntimeError, "was replaced", pair.engine.step)
    same(recorder.collectives, [])
    pair.engine.zero_grad()
    pair.train()


@two_ranks
@on_every_rank
def test_zero1_edits_of_gradients_count(ranks):
    """`param.grad.mul_()` between backward and step has the same effect as in plain torch."""
    pair = Pair(ZeRO1, seeded(Blocks))
    for step in range(3):
        pair.backward(step)
        for model in (pair.plain, pair.engine.model):
            model.head.weight.grad.mul_(0.5)
        pair.step()
    pair.check_weights()


@two_ranks
@on_every_rank
def test_zero1_refuses_the_optimizers_zero_grad(ranks):
    """`optimizer.zero_grad()` would clear only the shards, so the gradients of all steps would add up."""
    pair = Pair(ZeRO1, seeded(Blocks))
    raised_on_every_rank(RuntimeError, "zero_grad() of this stage", pair.engine.optimizer.zero_grad)
    raised_on_every_rank(RuntimeError, "zero_grad() of this stage", pair.engine.optimizer.zero_grad, set_to_none=False)
    pair.train()


@two_ranks
@moving
@on_every_rank
def test_the_optimizers_zero_grad_serves_where_gradients_are_shards(ranks, stage):
    """In ZeRO-2 and ZeRO-3 `optimizer.zero_grad()` after a step clears all gradients."""
    pair = Pair(stage, seeded(Blocks))
    for step in range(3):
        pair.backward(step)
        pair.optimizers[0].step()
        pair.optimizers[0].zero_grad()
        pair.engine.step()
        pair.engine.optimizer.zero_grad()
    pair.check_weights()


@two_ranks
@moving
@on_every_rank
def test_refuses_gradients_that_are_set_after_they_were_sent(ranks, stage):
    """`param.grad = ...` after backward would change nothing."""
    pair = Pair(stage, seeded(Blocks))
    mse(pair.engine, *own_batch(7)).backward()
    for param in pair.engine.model.parameters():
        same(param.grad, None)
    pair.engine.model.head.bias.grad = torch.ones_like(pair.engine.model.head.bias)
    raised_on_every_rank(RuntimeError, "param.grad of ['head.bias'] was set", pair.engine.step)
    pair.engine.zero_grad()
    pair.train()


class Unused(Blocks):
    """A layer that no forward uses."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)


@two_ranks
@on_every_rank
def test_an_unused_parameter_has_a_zero_gradient_in_zero1(ranks):
    """So AdamW decays it, like a parameter with a zero gradient in plain torch."""
    pair = Pair(ZeRO1, seeded(Unused), ADAMW)
    before = pair.engine.model.unused.weight.detach().clone()
    for param in pair.plain.parameters():
        param.grad = torch.zeros_like(param)
    pair.train()
    assert not torch.equal(before, pair.engine.model.unused.weight)


@two_ranks
@moving
@on_every_rank
def test_an_unused_parameter_is_an_error_where_gradients_are_waited_for(ranks, stage):
    """The message has its name, nothing is updated, and the parameter can be frozen before the build."""
    model = seeded(Unused)
    engine = stage(model, ADAMW(model.parameters()))
    before = whole_weights(engine)
    mse(engine, *own_batch(0)).backward()
    raised_on_every_rank(RuntimeError, "['unused.", engine.step)
    for name, weight in whole_weights(engine).items():
        same(weight, before[name], 0, name)
    frozen = seeded(Unused)
    frozen.unused.requires_grad_(False)
    Pair(stage, frozen).train()


@two_ranks
@moving
@on_every_rank
def test_a_parameter_left_out_of_one_backward_is_an_error(ranks, stage):
    """This is an error even if another backward before the same step brings its gradient."""
    pair = Pair(stage, seeded(Blocks))
    mse(pair.engine, *own_batch(6)).backward()

    def without_head(model, inputs, targets):
        head, model.model.head = model.model.head, nn.Identity()
        loss = model(inputs).mean()
        model.model.head = head
        return loss

    without_head(pair.engine, *own_batch(7)).backward()
    raised_on_every_rank(RuntimeError, "head.", pair.engine.step)
    pair.engine.zero_grad()
    pair.train()


@two_ranks
@on_every_rank
def test_zero2_refuses_a_second_gradient_of_a_bucket_that_was_not_complete(ranks):
    """If two backwards leave out the same parameter, the second one raises an error instead of sending the sum late."""
    pair = Pair(ZeRO2, seeded(Unused))
    mse(pair.engine, *own_batch(0)).backward()
    raised_on_every_rank(RuntimeError, "came before its bucket was complete", mse(pair.engine, *own_batch(1)).backward)
    pair.engine.zero_grad()
    raised_on_every_rank(RuntimeError, "no gradient for", pair.engine.step)


@two_ranks
@moving
@on_every_rank
def test_refuses_sparse_gradients(ranks, stage):
    """A flat buffer cannot hold them."""
    model = seeded(Blocks)
    model.embedding.sparse = True
    engine = stage(model, MOMENTUM(model.parameters()))
    loss = mse(engine, *own_batch(0))
    raised_on_every_rank(RuntimeError, "'embedding.weight' is sparse", loss.backward)
    engine.zero_grad()
    model.embedding.sparse = False
    mse(engine, *own_batch(0)).backward()
    engine.step()


@two_ranks
@stages
@on_every_rank
def test_goes_on_after_an_exception(ranks, stage):
    """After an error in a forward or in the middle of a backward, `zero_grad()` restores the stage."""

    class Stumbles(Blocks):
        stumble = None

        def call(self, block, x):
            if block is self.blocks[1] and self.stumble == "forward":
                raise KeyError("stumble")
            x = block(x)
            if block is self.blocks[1] and self.stumble == "backward":
                x.register_hook(stumble)
            return x

    def stumble(gradient):
        raise KeyError("stumble")

    pair = Pair(stage, seeded(Stumbles))
    pair.train(1)
    pair.engine.model.stumble = "forward"
    raised_on_every_rank(KeyError, "stumble", mse, pair.engine, *own_batch(5))
    pair.engine.zero_grad()
    pair.engine.model.stumble = "backward"
    loss = mse(pair.engine, *own_batch(5))
    raised_on_every_rank(KeyError, "stumble", loss.backward)
    pair.engine.zero_grad()
    pair.engine.model.stumble = None
    pair.train()


# Lifetime, and starting a chapter.


@two_ranks
@stages
@on_every_rank
def test_a_dropped_stage_is_freed(ranks, stage):
    """Neither hooks nor autograd keep a stage or its model alive."""
    model = seeded(Recomputed)
    engine = stage(model, ADAMW(model.parameters()))
    for step in range(2):
        engine.training_step(*own_batch(step), nn.functional.mse_loss)
    dropped = [weakref.ref(each) for each in (engine, model, engine.optimizer, next(model.parameters()))]
    del engine, model
    gc.collect()
    same([each() for each in dropped], [None] * 4)


def torchrun(arguments, folder):
    ours = ("PYTHONPATH", "PYTHONSAFEPATH", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def empty_folder(tmp_path):
    for name in ("zero1.py", "zero2.py", "zero3.py"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
DEMOS = {  # command: MB at the update of parameters, gradients, optimizer state; the most whole parameters, gradients
    "zero1.py": (1.85, 1.85, 1.85, 1.85, 1.85),
    "zero2.py --bucket-mb 0.25": (1.85, 0.93, 1.85, 1.85, 0.52),  # gradients of two buckets, with a block each
    "zero3.py --prefetch 2 --trace": (0.93, 0.93, 1.85, 1.07, 0.79),  # root and three units; head and two units
}


def test_the_chapters_run_by_torchrun_in_an_empty_folder(empty_folder):
    """They need only torch and earlier chapters, learn, have the same losses, and print what each rank holds."""
    losses, printed = {}, {}
    for command, expected in DEMOS.items():
        run = torchrun([*TORCHRUN, *command.split()], empty_folder)
        assert run.returncode == 0, run.stderr
        noise = [line for line in run.stderr.splitlines() if "OMP_NUM_THREADS" not in line and line.strip("* ")]
        assert not [line for line in noise if not line.startswith("W") or "run.py" not in line], run.stderr
        held = re.findall(r"held at the update: ([\d.]+) MB", run.stdout)
        most = re.findall(r"of the step: ([\d.]+) MB of whole parameters, ([\d.]+) MB of whole gradients", run.stdout)
        for rank in range(2):
            assert tuple(map(float, [*held[3 * rank :][:3], *most[rank]])) == expected, run.stdout
        losses[command] = re.findall(r"step +\d+: loss ([\d.]+)", run.stdout)
        printed[command] = run.stdout
    first = losses["zero1.py"]
    assert len(first) == 6 and float(first[-1]) < 0.6 * float(first[0]), first
    assert all(each == first for each in losses.values()), losses
    check_trace(printed["zero3.py --prefetch 2 --trace"])


def check_trace(printed):
    """Gather, free, send and receive of each unit in their order, with the bytes that are whole before and after."""
    events = [line.split(" whole ")[0].strip() for line in printed.splitlines() if line.startswith("    ")]
    forward = ["gather root", "gather blocks.0", "gather blocks.1", "gather blocks.2", "free blocks.0"]
    assert events[:5] == forward, printed
    end = events.index("send root")
    assert events[end - 2 : end + 2] == ["free root", "receive blocks.0", "send root", "receive root"], printed
    found = re.findall(r"whole parameters +([\d,]+) -> +([\d,]+) B", printed)
    found = [tuple(int(each.replace(",", "")) for each in pair) for pair in found]
    block, root = 4 * 256 * 256, 4 * (256 * 256 + 256 * 16 + 2 * 256)
    expected = [(0, root), (root, root + block), (root + block, root + 2 * block)]
    assert found[:3] == expected and found[-1] == (0, 0), found


def test_a_chapter_without_torchrun_says_how_to_start_it(empty_folder):
    """One line, and the exit status 1."""
    run = torchrun(["zero3.py"], empty_folder)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (1, "", 1), run
    assert "torchrun --nproc-per-node 2 zero3.py" in run.stderr
