"""The lists "What goes wrong if you delete a line" at the ends of the chapters are true.

Each test deletes one line on all ranks, and sees what the list says: an error with its text, a wrong result without
any error, a crash, or more memory.
"""

import gc
import re
import sys
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conformance.pair import Pair
from conformance.test_late_collectives import late_collectives
from helpers import (
    MOMENTUM,
    Blocks,
    Normed,
    PartlyRecomputed,
    Recorder,
    SideLoss,
    batch,
    mse,
    own_batch,
    raised_on_every_rank,
    run_on_ranks,
    seeded,
    whole_weights,
    with_side_loss,
)
from mutations import ADD_UP, EVENTS, FOR_NOTHING, LATE, OLD_GRAPH, TWICE, Mutation, mutated
from torch import nn

from zerolab.measure.held import storage_bytes
from zerolab.run.pool import RankFailed
from zerolab.run.ranks import ROOT

CLASSES = {"zero1": "ZeRO1", "zero2": "ZeRO2", "zero3": "ZeRO3"}
ONE_BY_ONE = {"zero1": {"bucket_mb": 0}, "zero2": {"bucket_mb": 0}, "zero3": {}}  # several buckets or units


def build(stage, make=Blocks, make_optimizer=MOMENTUM, **options):
    model = seeded(make)
    return stage(model, make_optimizer(model.parameters()), **options)


def differs(pair):
    """Whether the weights of a Pair differ by more than rounding on some rank."""
    expected = dict(pair.plain.named_parameters())
    apart = [(found - expected[name]).abs().max() for name, found in whole_weights(pair.trained).items()]
    worst = torch.stack(apart).max().nan_to_num(1.0).reshape(1)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item() > 1e-6


def train_both(pair, steps=3, loss=mse):
    """Like `Pair.train`, without its checks."""
    for step in range(steps):
        for rank in pair.ranks:
            (loss(pair.plain, *batch(step, rank)) / len(pair.ranks)).backward()
        loss(pair.trained, *own_batch(step)).backward()
        pair.step()


# What one sees. Each function runs on every rank, with the class of the wrong stage.


def trains_wrong(stage, **options):
    """No error, and other weights than those of plain torch."""
    pair = Pair(stage, seeded(Blocks), **options)
    train_both(pair)
    assert differs(pair), "it trains correctly"


def reads_too_early(stage, **options):
    """What nobody has waited for is not there yet, on a network that is slow enough."""
    with late_collectives(sys.modules[stage.__module__]):
        trains_wrong(stage, **options)


def learns_nothing(stage, **options):
    engine = build(stage, **options)
    before = whole_weights(engine)
    for step in range(2):
        engine.training_step(*own_batch(step), nn.functional.mse_loss)
    assert all(torch.equal(weight, before[name]) for name, weight in whole_weights(engine).items())


def step_raises(stage, text, **options):
    engine = build(stage, **options)
    mse(engine, *own_batch(0)).backward()
    raised_on_every_rank(RuntimeError, text, engine.step)


def backward_raises(stage, error, text, backwards=1, **options):
    engine = build(stage, **options)
    for micro in range(backwards - 1):
        mse(engine, *own_batch(micro)).backward()
    raised_on_every_rank(error, text, mse(engine, *own_batch(9)).backward)


def old_graph_is_wrong(stage, **options):
    """A backward through a graph of before the step raises nothing, where plain torch does."""
    engine = build(stage, **options)
    old = engine(own_batch(0)[0])
    old.square().mean().backward(retain_graph=True)
    engine.step()
    engine.zero_grad()
    old.sum().backward()


def same_mean_forever(stage, **options):
    """With the model's zero_grad() every step repeats the first one, whatever the batch is."""
    engine = build(stage, make_optimizer=partial(torch.optim.SGD, lr=0.1), **options)
    weights = [whole_weights(engine)]
    for step in range(3):
        mse(engine, *own_batch(step)).backward()
        engine.step()
        engine.model.zero_grad()
        weights.append(whole_weights(engine))
    changes = [after["head.weight"] - before["head.weight"] for before, after in zip(weights, weights[1:])]
    for change in changes[1:]:
        assert changes[0].abs().max() > 1e-4 and torch.allclose(change, changes[0], atol=1e-15), changes


def two_steps_without_zero_grad(stage, **options):
    """The gradients of the second step should be added to those of the first one, as in plain torch."""
    pair = Pair(stage, seeded(Blocks), **options)
    for step in range(2):
        for rank in range(2):
            (mse(pair.plain, *batch(step, rank)) / 2).backward()
        mse(pair.trained, *own_batch(step)).backward()
        pair.optimizers[0].step()
        pair.trained.step()
    assert differs(pair), "the second step was reduced"


def frozen_weights_stay_different(stage, **options):
    model = seeded(Blocks)
    model.head.bias.requires_grad_(False).fill_(dist.get_rank())
    engine = stage(model, MOMENTUM(model.parameters()), **options)
    engine.training_step(*own_batch(0), nn.functional.mse_loss)
    assert model.head.bias[0] == dist.get_rank()


def a_model_of_pieces(stage, **options):
    """Ranks begin with other weights, and after a step they have one model, which is not rank 0's trained."""
    model = seeded(Blocks, seed=dist.get_rank())
    outputs = model(own_batch(0)[0])
    engine = stage(model, MOMENTUM(model.parameters()), **options)
    assert torch.equal(engine(own_batch(0)[0]), outputs), "the ranks began alike"
    engine.training_step(*own_batch(0), nn.functional.mse_loss)
    for weight in whole_weights(engine).values():
        of_rank_0 = weight.clone()
        dist.broadcast(of_rank_0, 0)
        assert torch.equal(weight, of_rank_0)
    pair = Pair(stage, seeded(Blocks, seed=0))
    pair.trained = engine
    for rank in range(2):
        (mse(pair.plain, *batch(0, rank)) / 2).backward()
    pair.optimizers[0].step()
    assert differs(pair), "it is rank 0's model"


def adds_an_aborted_bucket(stage, **options):
    """A backward raises an error after it has sent a bucket. The next step is wrong, in spite of `zero_grad()`."""
    pair = Pair(stage, seeded(Blocks), **options)

    def stumble(gradient):
        raise KeyError("stumble")

    x = pair.trained.model.embedding.weight
    handle = x.register_hook(stumble)
    raised_on_every_rank(KeyError, "stumble", mse(pair.trained, *own_batch(7)).backward)
    handle.remove()
    pair.trained.zero_grad()
    train_both(pair, 1)
    assert differs(pair), "it trains correctly"


def stays_in_memory(stage, **options):
    engine = build(stage, **options)
    engine.training_step(*own_batch(0), nn.functional.mse_loss)
    dropped = [weakref.ref(engine), weakref.ref(engine.model)]
    del engine
    gc.collect()
    assert all(each() is not None for each in dropped), "it was freed"


def other_orders_add_other_buckets(stage, **options):
    """Rank 1 calls two equal branches in the other order."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

        def forward(self, tokens):
            order = [0, 1] if dist.get_rank() == 0 else [1, 0]
            return sum((index + 1) * self.branches[index](tokens.double()) for index in order)

    pair = Pair(stage, seeded(Branches), **options)
    train_both(pair)
    assert differs(pair), "it trains correctly"


def trains_wrong_or_fails(stage, make=Blocks, loss=mse, **options):
    """An error, or other weights than plain torch's. (A crash of the process is seen by the caller.)"""
    pair = Pair(stage, seeded(make), **options)
    try:
        train_both(pair, loss=loss)
    except RuntimeError:
        return
    assert differs(pair), "it trains correctly"


def gathered_bytes(engine):
    return storage_bytes(engine.model.parameters())


def root_bytes(engine):
    return sum(unit.flat.nbytes for unit in engine.units if unit.module is engine.model)


def gathered_after_forward(stage, **options):
    engine = build(stage, **options)
    mse(engine, *own_batch(0))
    assert gathered_bytes(engine) == sum(unit.flat.nbytes for unit in engine.units)


def gathered_in_backward(stage, **options):
    """Before the end of backward, when the embedding's gradient is there, all units have memory."""
    engine = build(stage, **options)
    found = []
    engine.model.embedding.weight.register_hook(lambda gradient: found.append(gathered_bytes(engine)))
    mse(engine, *own_batch(0)).backward()
    assert found == [sum(unit.flat.nbytes for unit in engine.units)], found


def gathered_after_evaluation(stage, **options):
    engine = build(stage, **options)
    with torch.no_grad():
        engine(own_batch(0)[0])
    assert gathered_bytes(engine) == root_bytes(engine) > 0


def never_freed(stage, **options):
    engine = build(stage, **options)
    mse(engine, *own_batch(0)).backward()
    assert gathered_bytes(engine) == sum(unit.flat.nbytes for unit in engine.units)


def in_flight_after_backward(stage, **options):
    engine = build(stage, **options)
    mse(engine, *own_batch(0)).backward()
    assert engine.in_flight is not None and engine.in_flight.gradient is not None
    engine.step()


def one_more_gather(stage, **options):
    """In backward the root's norm asks for its weight last, and the last unit is gathered again."""
    engine = build(stage, make=Normed, **options)
    loss = mse(engine, *own_batch(0))
    found = []
    engine.model.embedding.weight.register_hook(lambda gradient: found.append(engine.units[2].allocated))
    with Recorder() as recorder:
        loss.backward()
    gathers = [kind for kind, _ in recorder.collectives if kind == "all-gather"]
    assert len(gathers) == 4 and found == [True], (gathers, found)


def stale_root(stage, **options):
    """A forward without a backward comes before a step; the next forward uses the weights of before the step."""
    pair = Pair(stage, seeded(Blocks), **options)
    for rank in range(2):
        (mse(pair.plain, *batch(0, rank)) / 2).backward()
    mse(pair.trained, *own_batch(0)).backward()
    pair.trained(own_batch(1)[0])
    pair.step()
    tokens = own_batch(2)[0]
    assert not torch.allclose(pair.trained(tokens), pair.plain(tokens)), "the weights are new"


def exp_is_never_freed(stage, **options):
    class Exp(Blocks):
        def call(self, block, x):
            y = block(x).exp()
            saved.append(weakref.ref(y))
            return y

    saved = []
    engine = build(stage, make=Exp, **options)
    engine(own_batch(0)[0])
    gc.collect()
    assert any(each() is not None for each in saved), "it was freed"


# The table: (the line, what one sees, its arguments). The order is the chapters'.

EARLY = "optimizer.step() was called before the gradients were reduced"
SENT = "was set after the gradients were sent"
SECOND = "came before its bucket was complete"
DELETED = [
    (Mutation("zero1", "ZeRO1.reduce_gradients", "work.wait()", found_by=LATE), reads_too_early, {}),
    (
        Mutation(
            "zero1",
            "ZeRO1.reduce_gradients",
            "check_gradients(self.buckets)",
            found_by="test_chapters.py::test_zero1_refuses_gradients_that_left_the_bucket",
        ),
        same_mean_forever,
        {},
    ),
    (Mutation("zero1", "ZeRO1.finish_reduce", "bucket.gradient /= self.world_size", found_by=LATE), trains_wrong, {}),
    (Mutation("zero1", "ZeRO1.step", "bucket.shard.grad = None", found_by=ADD_UP), two_steps_without_zero_grad, {}),
    (Mutation("zero1", "ZeRO1.step", "gather_parameters(self.buckets)", found_by=LATE), trains_wrong, {}),
    (Mutation("zero1", "ZeRO1.zero_grad", "bucket.gradient.zero_()", found_by=LATE), trains_wrong, {}),
    (Mutation("zero1", "ZeRO1.zero_grad", "param.grad = grad", found_by=LATE), step_raises, {"text": "was replaced"}),
    (
        Mutation(
            "zero1",
            "ZeRO1.partition",
            "self.broadcast_untrained()",
            found_by="conformance/test_values.py::test_all_ranks_start_with_rank_0s_weights",
        ),
        frozen_weights_stay_different,
        {},
    ),
    (Mutation("zero1", "Bucket.flatten", "param.data = self.place(flat, index)", found_by=LATE), learns_nothing, {}),
    (Mutation("zero1", "Bucket.flatten", "broadcast_whole([flat], self.group)", found_by=LATE), a_model_of_pieces, {}),
    (Mutation("zero1", "gather_parameters", "work.wait()", found_by=LATE), reads_too_early, {}),
    (
        Mutation("zero1", "gather_parameters", "increment_version(bucket.params)", found_by=OLD_GRAPH),
        old_graph_is_wrong,
        {},
    ),
    (
        Mutation("zero2", "ZeRO2.on_gradient", "self.expect_gradients()", found_by=ADD_UP),
        backward_raises,
        {"error": RuntimeError, "text": SECOND, "backwards": 2},
    ),
    (
        Mutation("zero2", "ZeRO2.on_gradient", "bucket.missing.remove(param)", found_by=LATE),
        step_raises,
        {"text": "no gradient for"},
    ),
    (Mutation("zero2", "ZeRO2.on_gradient", "self.send_complete()", found_by=LATE), step_raises, {"text": SENT}),
    (
        Mutation("zero2", "ZeRO2.send_complete", "self.turn += 1", found_by=LATE),
        backward_raises,
        {"error": TypeError, "text": "copy_"},
    ),
    (
        Mutation(
            "zero2",
            "ZeRO2.send",
            "self.receive()",
            found_by="conformance/test_late_collectives.py::test_backward_computes_while_a_reduction_is_in_flight",
        ),
        step_raises,
        {"text": EARLY},
    ),
    (Mutation("zero2", "ZeRO2.receive", "self.in_flight.finish()", found_by=LATE), step_raises, {"text": EARLY}),
    (Mutation("zero2", "ZeRO2.reduce_gradients", "self.receive()", found_by=LATE), step_raises, {"text": EARLY}),
    (Mutation("zero2", "ZeRO2.step", "gather_parameters(self.buckets)", found_by=LATE), trains_wrong, {}),
    (
        Mutation(
            "zero2",
            "ZeRO2.zero_grad",
            "self.receive()",
            found_by="test_chapters.py::test_refuses_the_optimizers_own_step",
        ),
        adds_an_aborted_bucket,
        {},
    ),
    (Mutation("zero2", "ZeRO2.zero_grad", "bucket.shard.grad = None", found_by=LATE), trains_wrong, {}),
    (Mutation("zero2", "Reduction.finish", "self.work.wait()", found_by=LATE), reads_too_early, {}),
    (Mutation("zero2", "Reduction.finish", "self.average()", found_by=LATE), trains_wrong, {}),
    (Mutation("zero2", "take_gradients", "param.grad = None", found_by=LATE), step_raises, {"text": SENT}),
    (
        Mutation(
            "zero2",
            "weak_hook",
            "method = weakref.WeakMethod(method)",
            "strong = method; method = lambda: strong",
            found_by="test_chapters.py::test_a_dropped_stage_is_freed",
        ),
        stays_in_memory,
        {},
    ),
    (
        Mutation(
            "zero2",
            "ZeRO2.on_gradient",
            "self.send_complete()",
            "if not bucket.missing: self.send(bucket)",
            found_by=ADD_UP,
        ),
        other_orders_add_other_buckets,
        {},
    ),
    (Mutation("zero3", "ZeRO3.before_forward", "each.start_gather()", found_by=LATE), trains_wrong_or_fails, {}),
    (Mutation("zero3", "ZeRO3.before_forward", "unit.wait()", found_by=LATE), reads_too_early, {}),
    (Mutation("zero3", "ZeRO3.after_forward", "unit.free()", found_by=TWICE), gathered_after_forward, {}),
    (
        Mutation("zero3", "ZeRO3.after_forward", "self.watch_output(unit, output)", found_by=EVENTS),
        trains_wrong_or_fails,
        {"make": PartlyRecomputed},
    ),
    (
        Mutation("zero3", "ZeRO3.unpack", "self.before_backward(unit)", found_by=EVENTS),
        trains_wrong_or_fails,
        {"make": SideLoss, "loss": with_side_loss},
    ),
    (Mutation("zero3", "ZeRO3.before_backward", "if each.missing:", "if True:", found_by=TWICE), one_more_gather, {}),
    (
        Mutation("zero3", "ZeRO3.notice_backward", "self.expect_gradients()", found_by=ADD_UP),
        backward_raises,
        {"error": RuntimeError, "text": SECOND, "backwards": 2},
    ),
    (
        Mutation(
            "zero3",
            "ZeRO3.notice_backward",
            "Variable._execution_engine.queue_callback(weak_hook(self.end_backward))",
            found_by=FOR_NOTHING,
        ),
        in_flight_after_backward,
        {},
    ),
    (Mutation("zero3", "ZeRO3.finish", "unit.free()", found_by=TWICE), gathered_in_backward, {}),
    (Mutation("zero3", "ZeRO3.send", "self.receive()", found_by=LATE), step_raises, {"text": EARLY}),
    (
        Mutation(
            "zero3",
            "ZeRO3.__call__",
            "self.free_all()",
            found_by="conformance/test_memory.py::test_zero3_frees_what_it_gathers",
        ),
        gathered_after_evaluation,
        {},
    ),
    (
        Mutation(
            "zero3",
            "ZeRO3.step",
            "self.free_all()",
            found_by="conformance/test_values.py::test_the_choice_and_life_of_units_change_no_value",
        ),
        stale_root,
        {},
    ),
    (Mutation("zero3", "ZeRO3.step", "increment_version(unit.params)", found_by=OLD_GRAPH), old_graph_is_wrong, {}),
    (
        Mutation(
            "zero3",
            "Unit.free",
            "self.flat.untyped_storage().resize_(0)",
            found_by="conformance/test_traffic.py::test_what_is_shared_out_is_not_on_every_rank",
        ),
        never_freed,
        {},
    ),
    (
        Mutation(
            "zero3",
            "Unit.make_shard",
            "return self.flat[self.own].clone()",
            "return self.flat[self.own]",
            found_by=LATE,
        ),
        trains_wrong_or_fails,
        {},
    ),
    (
        Mutation(
            "zero3",
            "ZeRO3.pack",
            "return tensor.detach(), tensor._version",
            "return tensor, tensor._version",
            found_by="conformance/test_lifetime.py::test_what_autograd_has_saved_goes_with_the_graph",
        ),
        exp_is_never_freed,
        {},
    ),
]


def run_mutated(mutation, sees, arguments):
    """On a rank: call `sees` with the class of the wrong chapter."""
    with mutated(mutation) as chapter:
        stage = getattr(chapter, CLASSES[mutation.chapter])
        sees(stage, **ONE_BY_ONE[mutation.chapter], **arguments)


@pytest.mark.parametrize("index", range(len(DELETED)), ids=[str(mutation) for mutation, _, _ in DELETED])
def test_a_deleted_line_does_what_the_chapter_says(index):
    mutation, sees, arguments = DELETED[index]
    try:
        run_on_ranks(2, run_mutated, mutation, sees, arguments)
    except RankFailed as failed:
        if sees is not trains_wrong_or_fails or failed.failures or not failed.died:
            raise  # a rank that died is what one sees there: it read memory that was freed


@pytest.mark.parametrize("chapter", CLASSES)
def test_the_list_of_a_chapter_is_the_table(chapter):
    """Every entry of the list is in the table, and the other way round."""
    source = (ROOT / f"{chapter}.py").read_text()
    text = re.sub(r"\n# *", " ", source[source.index("# What goes wrong if you delete a line") :])
    listed = re.findall(r" - `([^`]+)` in `([^`]+)`(?:, as `([^`]+)`)?: ", text)
    table = [each for each, _, _ in DELETED if each.chapter == chapter]
    assert listed == [
        (each.statement, each.function, "" if each.replacement == "pass" else each.replacement) for each in table
    ]
