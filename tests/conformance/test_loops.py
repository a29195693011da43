"""Training loops: accumulation, `no_sync`, evaluations, unusual backwards, clipping."""

import contextlib
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import MOMENTUM, Blocks, Recomputed, Tied, Tiny, batch, mse, own_batch, seeded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from conformance.pair import Pair
from conformance.test_precision import mse_in_float64
from conformance.test_unused import Spare

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.3)

# Several backwards before a step.


@pytest.mark.ranks(2, thorough=(3,))
@pytest.mark.chapters
@pytest.mark.parametrize("model", [Tied, Tiny])
def test_several_backwards_before_a_step_add_up(engine, model):
    """Gradient accumulation needs no option. In `Tiny` a gradient is the first event of a backward."""
    pair = Pair(engine, seeded(model))
    for step in range(3):
        for micro in range(3):
            pair.backward(3 * step + micro)
        pair.step()
    pair.check_weights()


@pytest.mark.ranks(3)
def test_backwards_under_no_sync_add_up(engine):
    """All but the last backward of a step run under `no_sync`."""
    pair = Pair(engine, seeded(Tied))
    for step in range(3):
        for micro in range(3):
            pair.backward(3 * step + micro, quiet=micro < 2)
        pair.step()
    pair.check_weights()


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_no_sync_ends_where_it_ends(engine):
    """An inner `no_sync`, or an exception in it, does not end the outer one."""
    pair = Pair(engine, seeded(Blocks))
    pair.backward_of_plain(0)
    pair.backward_of_plain(1)
    with pair.trained.no_sync():
        with contextlib.suppress(ZeroDivisionError), pair.trained.no_sync():
            raise ZeroDivisionError
        pair.loss_of_engine(0).backward()
    pair.loss_of_engine(1).backward()
    pair.step()
    pair.check_weights()


@pytest.mark.stages("zero2", "zero3")
def test_a_step_after_no_sync_only_is_refused(engine):
    """Gradients that were kept on the rank do not count as missing, and training continues."""
    pair = Pair(engine, seeded(Blocks))
    with pair.trained.no_sync():
        pair.loss_of_engine().backward()
    with pytest.raises(RuntimeError, match=r"were kept by no_sync\(\)"):
        pair.trained.step()
    pair.trained.zero_grad()
    pair.train()


@pytest.mark.chapters
def test_evaluations_in_between_change_nothing(engine):
    """A forward under no_grad can come between steps, between backwards, and between a forward and its backward."""
    pair = Pair(engine, seeded(Recomputed))

    def loss_then_evaluation(model, inputs, targets):
        loss = mse(model, inputs, targets)
        with torch.no_grad():
            model(inputs + 1 - 2 * (inputs > 5))
        return loss

    for step in range(3):
        pair.backward(step)
        pair.evaluate()
        pair.loss = loss_then_evaluation
        pair.backward(10 + step)
        pair.loss = mse
        pair.step()
        pair.evaluate()
    pair.check_weights()


@pytest.mark.chapters
def test_a_forward_without_a_backward_changes_nothing(engine):
    """With gradients enabled, right before the weights change: the gathered weights must not be used afterwards."""
    pair = Pair(engine, seeded(Blocks))
    for step in range(3):
        pair.backward(step)
        pair.loss_of_engine(8)
        pair.step()
        pair.evaluate()
    pair.check_weights()


# In each way `scale` is 1/N for plain torch, which adds up the ranks' gradients, and 1 for the engine.


def twice_through_one_graph(model, inputs, targets, scale):
    loss = mse(model, inputs, targets) * scale
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def once_through_two_graphs(model, inputs, targets, scale):
    ((mse(model, inputs, targets) + mse(model, 10 - inputs, targets)) * scale).backward()


def interleaved(model, inputs, targets, scale):
    """The next forward runs before the backward of the previous one, as in a pipeline's schedule."""
    first = mse(model, inputs, targets) * scale
    second = mse(model, 10 - inputs, targets) * scale
    first.backward()
    third = mse(model, inputs, targets + 1) * scale
    second.backward()
    third.backward()


def train_in(way, pair):
    for step in range(3):
        for rank in range(len(pair.ranks)):
            way(pair.plain, *pair.batch(step, rank), 1 / len(pair.ranks))
        way(pair.trained, *pair.batch(step), 1)
        pair.step()
    pair.check_weights()


WAYS = {way.__name__: way for way in (twice_through_one_graph, once_through_two_graphs, interleaved)}


@pytest.mark.chapters
@pytest.mark.parametrize("way", WAYS)
def test_backward_may_be_called_in_any_way(engine, way):
    """Twice through one graph, once through two graphs, and interleaved, as in plain torch."""
    if not engine.ours and engine.documented.drops:
        pytest.skip(f"{engine.name} documents several backwards through its own `backward` only")
    train_in(WAYS[way], Pair(engine, seeded(Blocks)))


@pytest.mark.chapters
def test_gradients_that_are_thrown_away_do_not_count(engine):
    """`zero_grad()` clears the gradients of a backward, and a step can follow after a new backward."""
    if not engine.ours and engine.documented.drops:
        pytest.skip(f"{engine.name} documents no way to throw gradients away")
    pair = Pair(engine, seeded(Blocks))
    for step in range(3):
        pair.loss_of_engine(20 + step).backward()
        pair.trained.zero_grad()
        pair.backward(step)
        pair.step()
    pair.check_weights()


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_steps_use_gradients_again_until_they_are_cleared(engine):
    """Two steps after one backward update twice, and a backward after a step adds to the gradients, as in torch."""
    pair = Pair(engine, seeded(Blocks))
    for step in range(3):
        for part in range(2):
            pair.backward(2 * step + part)
            for _ in range(1 + step % 2):
                pair.optimizer.step()
                pair.trained.step()
        pair.optimizer.zero_grad()
        pair.trained.zero_grad()
    pair.check_weights()


def some_tokens(step, rank):
    """A batch whose ranks have different numbers of tokens; the others are padding (-100). Some have none at all."""
    inputs, _ = batch(step, rank, size=6)
    targets = torch.randint(3, (6,), generator=torch.Generator().manual_seed(100 * step + rank))
    targets[1 + (3 * step + 2 * rank) % 6 :] = -100
    return inputs, targets if (step + rank) % 5 else torch.full_like(targets, -100)


def backward_over_tokens(engine, micro_batches):
    """The lines of the page."""
    tokens = sum((targets != -100).sum() for _, targets in micro_batches)
    dist.all_reduce(tokens)
    for inputs, targets in micro_batches:
        losses = nn.functional.cross_entropy(engine(inputs), targets, reduction="sum")
        (losses * dist.get_world_size() / tokens).backward()


@pytest.mark.ranks(3)
@pytest.mark.chapters
def test_a_mean_over_the_tokens_of_all_ranks(engine):
    """The recipe of docs/using-an-engine.md equals one process, which takes the mean over all tokens at once."""
    if not engine.ours and engine.documented.drops:
        pytest.skip(f"{engine.name} documents several backwards through its own `backward` only")
    pair = Pair(engine, seeded(Blocks), data=some_tokens)
    ranks = range(len(pair.ranks))
    for step in range(3):
        everything = [pair.batch(2 * step + micro, rank) for micro in range(2) for rank in ranks]
        logits = torch.cat([pair.plain(inputs) for inputs, _ in everything])
        nn.functional.cross_entropy(logits, torch.cat([targets for _, targets in everything])).backward()

        backward_over_tokens(pair.trained, [pair.batch(2 * step + micro) for micro in range(2)])
        pair.step()
    pair.check_weights()


# The optimizer and its schedule.

OPTIMIZERS = {
    "Adagrad": partial(torch.optim.Adagrad, lr=0.01, initial_accumulator_value=0.1),  # its constructor makes its state
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW, amsgrad": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_that_treat_each_element_by_itself(engine, optimizer):
    """The optimizer that the user built updates the shards, with all of its options."""
    Pair(engine, seeded(Tied), OPTIMIZERS[optimizer], tolerance=1e-10).train(5)


@pytest.mark.chapters
@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_built_before_or_after_the_engine(engine, when):
    """The engine keeps the optimizer, so a scheduler keeps changing its learning rate."""
    schedule = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10)
    schedules = []

    def make_optimizer(params):
        optimizer = MOMENTUM(params)
        if when == "before":
            schedules.append(schedule(optimizer))
        return optimizer

    pair = Pair(engine, seeded(Blocks), make_optimizer)
    if when == "after":
        schedules = [schedule(optimizer) for optimizer in pair.optimizers]
    if not engine.ours and when == "before" and schedules[1].optimizer is not pair.optimizers[1]:
        pytest.skip(f"{engine.name} makes a new optimizer")
    for step in range(4):
        pair.backward(step)
        pair.step()
        for each in schedules:
            each.step()
    pair.check_weights()


# Clipping.


@pytest.mark.ranks(3, thorough=(2,))
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
def test_clipping_takes_the_norm_of_the_whole_model(engine, norm_type):
    """The norm is over all gradients and equal on every rank. A tied weight counts once, padding does not count."""
    pair = Pair(engine, seeded(Tied), ADAMW, tolerance=1e-10)
    for step in range(4):
        max_norm = 1e6 if step == 2 else 0.05
        pair.backward(step)
        norm = pair.clip(max_norm, norm_type)
        assert (norm > max_norm) == (step != 2), "the norm is on the wrong side of what it is clipped to"
        norms = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
        dist.all_gather(norms, norm)
        assert len(torch.stack(norms).unique()) == 1, "the ranks have different norms"
        pair.step()
    pair.check_weights()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_nan_on_one_rank_is_in_every_ranks_norm(engine, norm_type):
    """With a NaN or an inf in one rank's gradient the norm is NaN or inf on all ranks."""
    model = seeded(Blocks)
    trained = engine(model, MOMENTUM(model.parameters()))
    for value in (math.nan, math.inf):
        trained.zero_grad()
        factor = value if dist.get_rank() == 0 else 1.0
        (mse(trained, *own_batch(0)) * factor).backward()
        norm = trained.clip_grad_norm_(1.0, norm_type).item()
        assert math.isnan(norm) or (math.isinf(value) and math.isinf(norm))


@pytest.mark.ranks(3)
@pytest.mark.stages("zero1", "zero2", "zero3")
def test_clipping_by_value(engine):
    """`clip_grad_value_` does what torch's does on the whole model, also between two backwards of one step."""
    pair = Pair(engine, seeded(Blocks))
    for step in range(3):
        for part in range(2):
            pair.backward(2 * step + part)
            pair.trained.clip_grad_value_(0.01)
            nn.utils.clip_grad_value_(pair.plain.parameters(), 0.01)
        pair.step()
    pair.check_weights()


@pytest.mark.ranks(4)
@pytest.mark.chapters
def test_a_rank_may_own_only_padding(engine):
    """Three elements over four ranks: the last rank owns only padding, and still joins the collectives."""
    pair = Pair(engine, seeded(Tiny))
    for step in range(3):
        pair.backward(step)
        if not engine.chapter:
            pair.clip(0.05)
        pair.step()
    pair.check_weights()


def gradients_of(pair):
    """The parameters of both optimizers that are matrices in the model."""
    mine = [piece for bucket in pair.trained.buckets for param, piece in bucket.pieces.items() if param.ndim > 1]
    return [param for param in pair.plain.parameters() if param.ndim > 1] + mine


def scale_in_place(param):
    param.grad.mul_(3)


def scale(param):
    param.grad = 3 * param.grad


def throw_away(param):
    param.grad = None


CHANGES = {change.__name__: change for change in (scale_in_place, scale, throw_away)}
SETTINGS = {
    "alone": {},
    "mixed precision": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float64},
    "replicas": {"group": "mesh"},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "find_unused": {"find_unused": True},
}
EACH_CHANGE = [("alone", change) for change in CHANGES]
EACH_SETTING = [(setting, "scale_in_place") for setting in SETTINGS if setting != "alone"]


@pytest.mark.stages("zero1", "zero2", "zero3")
@pytest.mark.parametrize("setting, change", EACH_CHANGE + EACH_SETTING)
def test_changed_gradients_stay_changed_in_a_further_backward(engine, setting, change):
    """Backward, a change of some mean gradients, two more backwards: these add their mean to the changed values.

    Only the rank that owns a piece changes it, so averaging the changed values a second time is wrong.
    """
    options = dict(SETTINGS[setting])
    if setting == "replicas":
        options["group"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    pair = Pair(engine, seeded(Blocks), loss=mse_in_float64, **options)
    for step in range(3):
        pair.backward(3 * step)
        pair.trained.reduce_gradients()
        for param in gradients_of(pair):
            CHANGES[change](param)
        pair.backward(3 * step + 1)
        pair.backward(3 * step + 2)
        pair.step()
    pair.check_weights()


@pytest.mark.stages("zero1", "zero2", "zero3")
@pytest.mark.parametrize("norm_type", [0, -math.inf])
def test_norms_that_are_none_are_refused(engine, norm_type):
    """A count of elements or a smallest element cannot be added up over the ranks."""
    pair = Pair(engine, seeded(Blocks))
    pair.backward(0)
    with pytest.raises(ValueError, match=f"norm_type.*{norm_type}"):
        pair.trained.clip_grad_norm_(1.0, norm_type)
    pair.step()
    pair.check_weights()


@pytest.mark.stages("zero2", "zero3")
def test_a_gradient_that_the_last_backward_lacks_is_named(engine):
    """Two backwards, the first under `no_sync`. The last one ran outside, and did not reach `spare`."""
    pair = Pair(engine, seeded(Spare))
    pair.train(1)
    with pair.trained.no_sync():
        pair.loss_of_engine(0).backward()
    pair.model.use = False
    pair.loss_of_engine(1).backward()
    with pytest.raises(RuntimeError, match=r"no gradient for 'spare'.*last backward"):
        pair.trained.step()
    pair.trained.zero_grad()
    pair.model.use = True
    pair.train()


@pytest.mark.needs("keywords")
def test_batches_may_be_keyword_arguments(engine):
    """`engine(tokens=...)` calls the model's forward with it."""

    def by_keyword(model, inputs, targets):
        return nn.functional.mse_loss(model(tokens=inputs), targets)

    Pair(engine, seeded(Blocks), loss=by_keyword, data=batch).train()
