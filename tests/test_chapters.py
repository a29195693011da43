"""What only the chapters promise. tests/conformance has what any engine must do, and asks the chapters as well.

In every test each rank has its own data.
The body of a test runs on `ranks` processes at the same time (`on_every_rank`).
"""

import gc
import os
import re
import shutil
import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conformance.pair import Pair
from conformance.test_memory import peak_by_formula
from helpers import (
    MOMENTUM,
    Blocks,
    Normed,
    PartlyRecomputed,
    Recomputed,
    Recorder,
    SideLoss,
    batch,
    mse,
    on_every_rank,
    own_batch,
    raised_on_every_rank,
    same,
    seeded,
    whole_weights,
    with_side_loss,
)
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from zero1 import Bucket, Meter, Model, ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3, parameters_by_unit
from zerolab.measure.fake_ranks import fake_ranks
from zerolab.run.ranks import ROOT

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.3)  # a step too many or too few shows in the decay


stages = pytest.mark.parametrize("stage", [ZeRO1, ZeRO2, ZeRO3])
moving = pytest.mark.parametrize("stage", [ZeRO2, ZeRO3])  # whose gradients leave `param.grad` during backward
two_ranks = pytest.mark.parametrize("ranks", [2])


# The optimizer.


@two_ranks
@stages
@on_every_rank
def test_an_optimizer_over_named_parameters(ranks, stage):
    """`AdamW(model.named_parameters())` also works."""
    pair = Pair(stage, seeded(Blocks), ADAMW, groups=nn.Module.named_parameters)
    pair.train()
    pair.trained.optimizer.state_dict()


@two_ranks
@stages
@on_every_rank
def test_gradients_can_be_read_and_clipped_by_hand(ranks, stage):
    """After `reduce_gradients()` they are the mean over all ranks, and `step()` uses what you make of them."""
    pair = Pair(stage, seeded(Blocks), ADAMW)
    shards = pair.trained.optimizer.param_groups[0]["params"]
    for step in range(3):
        pair.backward(step)
        expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01)
        pair.trained.reduce_gradients()
        with Recorder() as recorder:
            pair.trained.reduce_gradients()
        same(recorder.collectives, [], what="collectives when nothing is left to reduce")
        if stage is ZeRO1:  # every rank has the whole mean in `param.grad`
            found = nn.utils.clip_grad_norm_(pair.trained.model.parameters(), 0.01)
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
        pair.trained.step()
    pair.check_weights()


@two_ranks
@stages
@on_every_rank
def test_a_graph_of_before_the_step_is_an_error(ranks, stage):
    """Its backward would multiply by the new weights. Plain torch raises too, and training continues afterwards."""
    pair = Pair(stage, seeded(Blocks))
    inputs, targets = own_batch(0)
    old = pair.trained(inputs)
    nn.functional.mse_loss(old, targets).backward(retain_graph=True)
    pair.trained.step()
    pair.trained.zero_grad()
    text = "changed in place" if stage is ZeRO3 else "modified by an inplace operation"
    raised_on_every_rank(RuntimeError, text, (pair.trained(inputs) * old).mean().backward)
    pair = Pair(stage, seeded(Blocks))
    pair.train()


# Two events of ZeRO-3's backward. Each of these models needs one of them: tests/test_deleted_lines.py.


@two_ranks
@stages
@pytest.mark.parametrize("make", [SideLoss, PartlyRecomputed, Normed])
@on_every_rank
def test_models_that_need_one_of_the_events_of_backward(ranks, stage, make):
    """A loss that does not leave by the output, a checkpoint inside a unit, and a norm behind the embedding."""
    Pair(stage, seeded(make), loss=with_side_loss).train()


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
    same(engine.in_flight, None, what="the reduction in flight after backward")
    same(last, [[False, False, False, True]], what="gathered units when the embedding's gradient is there")


@two_ranks
@pytest.mark.parametrize("sizes", [(3, 5, 1), (9,), (0,)])
@on_every_rank
def test_parameters_and_shards_begin_at_aligned_places(ranks, sizes):
    """Kernels are fast there. No shard is empty, also if a bucket has no elements, and padding is zero."""
    params = [nn.Parameter(torch.ones(size)) for size in sizes]
    torch.use_deterministic_algorithms(True)  # memory that nobody has written to is NaN
    try:
        with torch.no_grad():
            bucket = Bucket("bucket", [(f"weight {index}", param) for index, param in enumerate(params)], None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert bucket.shard_numel > 0 and bucket.alignment() > 1
    for place in (*bucket.offsets, bucket.shard_numel):
        assert place % bucket.alignment() == 0, (bucket.offsets, bucket.shard_numel)
    same(bucket.flat.sum().item(), float(sum(sizes)), what="the sum of ones and padding")


@two_ranks
@on_every_rank
def test_a_weight_of_several_units_is_the_roots(ranks):
    """Else one of the units would free it while another one computes."""
    model = seeded(Blocks)
    model.blocks[2].scale = model.blocks[0].scale
    found = parameters_by_unit(model, list(model.blocks))
    assert "blocks.0.scale" in [name for name, _ in found[model]]


@pytest.mark.parametrize("ranks", [1])
@on_every_rank
def test_a_single_rank_gathers_nothing_ahead(ranks):
    """It has nothing to wait for, so it saves the memory."""
    model = seeded(Blocks)
    engine = ZeRO3(model, ADAMW(model.parameters()), prefetch=2)
    assert not any(unit.following or unit.preceding for unit in engine.units)


# MB on two ranks: of parameters, gradients, optimizer state at the update; the most whole parameters, gradients.
DEMO = {
    ZeRO1: [1.85, 1.85, 1.85, 1.85, 1.85],
    ZeRO2: [1.85, 0.93, 1.85, 1.85, 0.52],  # gradients of two buckets, with a block each
    ZeRO3: [0.93, 0.93, 1.85, 0.80, 0.79],  # root and two units; head and two units
}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@stages
def test_the_memory_of_the_demo(ranks, stage):
    """The peak has its formula, and the meter measures what the demo prints. One row, so that activations are small.

    Bytes do not depend on values, so this process is rank 0 of a group whose other ranks do not exist.
    """
    model = seeded(Model, dtype=torch.float32)
    row = torch.randint(256, (1, 17))
    step = row[:, :16], row[:, 16], nn.functional.cross_entropy
    with fake_ranks(ranks), Recorder(*model.parameters()) as recorder:
        options = {} if stage is ZeRO3 else {"bucket_mb": 0.25}
        engine = stage(model, torch.optim.AdamW(model.parameters(), fused=True), **options)
        engine.training_step(*step)
        recorder.peak = 0
        engine.training_step(*step)
        peak = recorder.peak
        with Meter(engine, trace=False) as meter:
            engine.training_step(*step)
    head, root, psi = 256 * 256, 256 * 256 + 256 * 16 + 2 * 256, 7 * 256 * 256 + 256 * 16 + 2 * 256
    expected = peak_by_formula(stage.__name__.lower(), psi, ranks, 4 * head, 4 * root, 4 * head)
    assert abs(peak - expected) <= 0.01 * expected, (peak, expected)
    found = [*meter.at_update.values(), meter.most_parameters, meter.most_gradients]
    if ranks == 2:
        same([round(nbytes / 1e6, 2) for nbytes in found], DEMO[stage])


# Errors. Every message says what to do.


def two_groups(model):
    return torch.optim.SGD([{"params": [param]} for param in model.parameters()], lr=0.1)


def over_all(optimizer, model):
    return optimizer(model.parameters())


def no_instance(model):
    return torch.optim.AdamW


def left_out(model):
    return MOMENTUM([*model.parameters()][:-1])


def foreign(model):
    return MOMENTUM([*model.parameters(), nn.Parameter(torch.ones(1))])


def stepped(model):
    optimizer = ADAMW(model.parameters())
    mse(model, *batch(0, rank=0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def all_frozen(model):
    return MOMENTUM(model.requires_grad_(False).parameters())


def half_on_meta(model):
    model.head.to("meta")
    return MOMENTUM(model.parameters())


REFUSED = {  # (a function that changes the model and returns an optimizer, the error, its text)
    "not an optimizer": (no_instance, TypeError, "expected an optimizer"),
    "LBFGS": (partial(over_all, torch.optim.LBFGS), ValueError, "looks at whole tensors"),
    "Adafactor": (partial(over_all, torch.optim.Adafactor), ValueError, "looks at whole tensors"),
    "two groups": (two_groups, ValueError, "parameter groups"),
    "left out": (left_out, ValueError, "not in the optimizer: ['head.bias'"),
    "foreign": (foreign, ValueError, "not the model's"),
    "stepped": (stepped, ValueError, "has state for whole parameters already"),
    "Adagrad": (partial(over_all, torch.optim.Adagrad), ValueError, "has state for whole parameters already"),
    "all frozen": (all_frozen, ValueError, "nothing to train"),
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
    if case not in ("all frozen", "two devices"):
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
    """Without the reduction it would update nothing, or in ZeRO-1 use local gradients, as with a GradScaler."""
    pair = Pair(stage, seeded(Blocks))
    raised_on_every_rank(RuntimeError, "call engine.step()", pair.trained.optimizer.step)
    pair.trained.zero_grad()
    mse(pair.trained, *own_batch(0)).backward()
    if stage is ZeRO1:
        raised_on_every_rank(RuntimeError, "call engine.step()", pair.trained.optimizer.step)
    pair.trained.zero_grad()
    pair.train()


def clear_by_model(engine, loss):
    engine.model.zero_grad()
    loss.backward()


def replace_one(engine, loss):
    loss.backward()
    engine.model.head.weight.grad = torch.ones_like(engine.model.head.weight)


@two_ranks
@pytest.mark.parametrize("do", [clear_by_model, replace_one])
@on_every_rank
def test_zero1_refuses_gradients_that_left_the_bucket(ranks, do):
    """They would not be sent. `step()` raises before anything is sent, and training continues after `zero_grad()`."""
    pair = Pair(ZeRO1, seeded(Blocks))
    pair.train(1)
    do(pair.trained, mse(pair.trained, *own_batch(7)))
    with Recorder() as recorder:
        raised_on_every_rank(RuntimeError, "was replaced", pair.trained.step)
    same(recorder.collectives, [])
    pair.trained.zero_grad()
    pair.train()


@two_ranks
@on_every_rank
def test_zero1_refuses_the_optimizers_zero_grad(ranks):
    """`optimizer.zero_grad()` would clear only the shards, so the gradients of all steps would add up."""
    pair = Pair(ZeRO1, seeded(Blocks))
    raised_on_every_rank(RuntimeError, "zero_grad() of this stage", pair.trained.optimizer.zero_grad)
    raised_on_every_rank(RuntimeError, "zero_grad() of this stage", pair.trained.optimizer.zero_grad, set_to_none=False)
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
        pair.trained.step()
        pair.trained.optimizer.zero_grad()
    pair.check_weights()


@two_ranks
@moving
@on_every_rank
def test_refuses_gradients_that_are_set_after_they_were_sent(ranks, stage):
    """`param.grad = ...` after backward would change nothing."""
    pair = Pair(stage, seeded(Blocks))
    mse(pair.trained, *own_batch(7)).backward()
    for param in pair.trained.model.parameters():
        same(param.grad, None)
    pair.trained.model.head.bias.grad = torch.ones_like(pair.trained.model.head.bias)
    raised_on_every_rank(RuntimeError, "param.grad of ['head.bias'] was set", pair.trained.step)
    pair.trained.zero_grad()
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
    before = pair.trained.model.unused.weight.detach().clone()
    for step in range(3):
        for param in pair.plain.unused.parameters():
            param.grad = torch.zeros_like(param)
        pair.backward(step)
        pair.step()
    pair.check_weights()
    assert not torch.equal(before, pair.trained.model.unused.weight)


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
    mse(pair.trained, *own_batch(6)).backward()

    def without_head(model, inputs, targets):
        head, model.model.head = model.model.head, nn.Identity()
        loss = model(inputs).mean()
        model.model.head = head
        return loss

    without_head(pair.trained, *own_batch(7)).backward()
    raised_on_every_rank(RuntimeError, "head.", pair.trained.step)
    pair.trained.zero_grad()
    pair.train()


@two_ranks
@on_every_rank
def test_zero2_refuses_a_second_gradient_of_a_bucket_that_was_not_complete(ranks):
    """If two backwards leave out the same parameter, the second one raises an error instead of sending the sum late."""
    pair = Pair(ZeRO2, seeded(Unused))
    mse(pair.trained, *own_batch(0)).backward()
    raised_on_every_rank(RuntimeError, "came before its bucket was complete", mse(pair.trained, *own_batch(1)).backward)
    pair.trained.zero_grad()
    raised_on_every_rank(RuntimeError, "no gradient for", pair.trained.step)


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
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def empty_folder(tmp_path):
    for name in ("zero1.py", "zero2.py", "zero3.py"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_zero3_runs_by_torchrun_in_an_empty_folder(empty_folder):
    """It needs only torch and the other two chapters, learns, and prints what each rank holds. All share one `main`."""
    line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = torchrun([*line, "zero3.py", "--prefetch", "2", "--trace"], empty_folder)
    assert run.returncode == 0, run.stderr
    noise = [line for line in run.stderr.splitlines() if "OMP_NUM_THREADS" not in line and line.strip("* ")]
    assert not [line for line in noise if not line.startswith("W") or "run.py" not in line], run.stderr
    held = re.findall(r"held at the update: ([\d.]+) MB", run.stdout)
    most = re.findall(r"whole at any moment: ([\d.]+) MB of parameters, ([\d.]+) MB of gradients", run.stdout)
    same(held, ["0.93", "0.93", "1.85"] * 2, what="MB of parameters, gradients, optimizer state on both ranks")
    same(most, [("1.07", "0.79")] * 2, what="MB of root and three units; of head and two units")
    losses = re.findall(r"step +\d+: loss ([\d.]+)", run.stdout)
    assert len(losses) == 6 and float(losses[-1]) < 0.6 * float(losses[0]), losses
    check_trace(run.stdout)


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


def test_a_chapter_without_torchrun_names_the_command(empty_folder):
    """One line, and the exit status 1."""
    run = torchrun(["zero2.py", "--bucket-mb", "1"], empty_folder)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (1, "", 1), run
    assert "torchrun --nproc-per-node 2 zero2.py" in run.stderr
