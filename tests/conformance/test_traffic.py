"""The collectives of a rank, their order, and the computation meanwhile."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from helpers import Blocks, Recorder, mse, own_batch, same, seeded
from torch.distributed.device_mesh import init_device_mesh

from conformance.test_memory import FUSED, Wide, wide_batch
from zerolab.measure.held import storage_bytes, tensor_leaves
from zerolab.measure.traffic import TrafficLedger


def wide_engine(engine, **options):
    model = seeded(Wide, dtype=torch.float32)
    if engine.like != "zero3":
        options.setdefault("bucket_mb", 0.02)
    return engine(model, FUSED(model.parameters()), **options)


def sizes(trained):
    """Elements of the whole buffers of the buckets, or of the units with the root last."""
    return [bucket.numel for bucket in getattr(trained, "buckets", None) or trained.units]


def expected_step(stage, sizes, no_sync=False):
    """The collectives of a backward and of `step()`: [(kind, elements)] each."""
    gathers = [("all-gather", size) for size in sizes]
    if stage == "zero1":
        return [], [("all-reduce", size) for size in sizes] + gathers
    reduces = [] if no_sync else [("reduce-scatter", size) for size in sizes]
    if stage == "zero2":
        return reduces, gathers
    *units, root = sizes
    found = [("all-gather", root)] + [("all-gather", size) for size in units]
    waiting = [("all-gather", size) for size in reversed(units)]
    found += [waiting.pop(0), waiting.pop(0)]  # the last unit, and the one that is prefetched
    for size in reversed(units):
        found += [] if no_sync else [("reduce-scatter", size)]
        found += [waiting.pop(0)] if waiting else []
    return found + ([] if no_sync else [("reduce-scatter", root)]), []


@pytest.mark.ranks(2, thorough=(3, 4))
@pytest.mark.stages("zero1", "zero2", "zero3")
@pytest.mark.chapters
@pytest.mark.parametrize("backwards", [1, 2])
def test_sent_is_the_accounting(engine, backwards):
    """Kind, order and elements of every collective in a step, and their sum: 2Ψ or 3Ψ."""
    trained = wide_engine(engine)
    with Recorder() as recorder:
        for micro in range(backwards):
            mse(trained, *wide_batch(micro)).backward()
        trained.step()
        trained.zero_grad()
    of_backward, of_step = expected_step(engine.like, sizes(trained))
    assert recorder.collectives == of_backward * backwards + of_step
    psi = sum(param.numel() for param in trained.model.parameters())
    factor = {"zero1": 3, "zero2": backwards + 1, "zero3": 3 * backwards}[engine.like]
    sent = sum((2 if kind == "all-reduce" else 1) * elements for kind, elements in recorder.collectives)
    if engine.like == "zero3":
        sent += backwards * sizes(trained)[-1]  # the root is gathered once, not twice
    padding = 3 * 4 * dist.get_world_size() * len(recorder.collectives)
    assert factor * psi <= sent <= factor * psi + padding


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_no_sync_sends_no_gradients(engine):
    """Under `no_sync` ZeRO-2 sends nothing and ZeRO-3 only gathers. The last backward sends the sum of all."""
    trained = wide_engine(engine)
    with Recorder() as recorder:
        with trained.no_sync():
            mse(trained, *wide_batch(0)).backward()
            mse(trained, *wide_batch(1)).backward()
        mse(trained, *wide_batch(2)).backward()
        trained.step()
    quiet, _ = expected_step(engine.like, sizes(trained), no_sync=True)
    of_backward, of_step = expected_step(engine.like, sizes(trained))
    assert recorder.collectives == quiet * 2 + of_backward + of_step


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_mixed_precision_sends_two_bytes_per_weight(engine):
    """Gathers send bfloat16, and reductions `reduce_dtype`."""
    trained = wide_engine(engine, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with TrafficLedger() as traffic:
        mse(trained, *wide_batch(0)).backward()
        trained.step()
    of_backward, of_step = expected_step(engine.like, sizes(trained))
    expected = [(kind, (2 if kind == "all-gather" else 4) * elements) for kind, elements in of_backward + of_step]
    assert [(each.kind, each.whole_bytes) for each in traffic.collectives] == expected


def block_of(layers):
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers)))


class Growing(Wide):
    """Each block is larger than the one before it, so the size of a gather tells whose it is."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(block_of(layers) for layers in (1, 2, 3, 4))


class WithoutRoot(nn.Sequential):
    """Nothing is gathered before the first unit of forward and of backward, so these gather several at once."""

    def __init__(self):
        super().__init__(nn.Linear(1, 64, bias=False), block_of(1), block_of(2), nn.Linear(64, 32, bias=False))


@pytest.mark.stages("zero3")
@pytest.mark.chapters
@pytest.mark.parametrize("make", [Growing, WithoutRoot])
@pytest.mark.parametrize("prefetch", [1, 3])
def test_units_are_gathered_in_the_order_of_their_use(engine, make, prefetch):
    """Also ahead: the root, the units from first to last in forward, and from last to first in backward."""
    model = seeded(make, dtype=torch.float32)
    trained = engine(model, FUSED(model.parameters()), prefetch=prefetch)
    with Recorder() as recorder:
        mse(trained, *wide_batch(0)).backward()
    root = [unit.numel for unit in trained.units if unit.module is model]
    units = [unit.numel for unit in trained.units if unit.module is not model]
    gathered = [size for kind, size in recorder.collectives if kind == "all-gather"]
    assert gathered == [*root, *units, *reversed(units)]


class TwoKinds(Wide):
    """Each block has a trained unit and a frozen one, of another size."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.bias = nn.Parameter(torch.ones(64), requires_grad=False)


@pytest.mark.stages("zero3")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_modules_units_are_gathered_one_after_the_other(engine, prefetch):
    """Else the gathers of the next module would be between them, and the module would wait for those, too."""
    model = seeded(TwoKinds, dtype=torch.float32)
    trained = engine(model, FUSED([param for param in model.parameters() if param.requires_grad]), prefetch=prefetch)
    with Recorder() as recorder:
        mse(trained, *wide_batch(0)).backward()
    of_root, *of_blocks = [size for kind, size in recorder.collectives if kind == "all-gather"]
    pairs = [{first, second} for first, second in zip(of_blocks[::2], of_blocks[1::2])]
    assert of_root == sizes(trained)[-1]
    assert pairs == [{64, 64 * 64}] * 12, "six blocks in forward, and six in backward"


@pytest.mark.ranks(4)
@pytest.mark.stages("zero1", "zero2", "zero3")
def test_replicas_send_only_shards_of_gradients(engine):
    """On a 2 x 2 mesh a row sends what a stage on two ranks sends, and each shard is sent across the rows once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    trained = wide_engine(engine, group=mesh)
    with Recorder() as recorder:
        mse(trained, *wide_batch(0)).backward()
        trained.step()
    of_backward, of_step = expected_step(engine.like, sizes(trained))
    across = [("all-reduce", size // 2) for size in sizes(trained)]
    assert sorted(recorder.collectives) == sorted([*of_backward, *of_step, *across])


@pytest.mark.stages("zero1", "zero2", "zero3")
def test_finding_the_unused_costs_one_small_all_reduce(engine):
    """A step with `find_unused` sends one more byte for each trained parameter."""
    found = []
    for find_unused in (False, True):
        trained = wide_engine(engine, find_unused=find_unused)
        with Recorder() as recorder:
            mse(trained, *wide_batch(0)).backward()
            trained.step()
        found.append(sorted(recorder.collectives))
    small = ("all-reduce", len(list(trained.model.parameters())))
    assert found[1] == sorted([*found[0], small])


@pytest.mark.chapters
def test_a_step_sends_no_more_than_promised(engine):
    """At most the 2Ψ or 3Ψ (N-1)/N elements in the engine's documentation, with a tolerance of 1%."""
    if engine.promise is None:
        pytest.skip(f"{engine.name} says nothing of its traffic: COUNTERPART would")
    model = seeded(Wide, dtype=torch.float32)
    psi = sum(param.numel() for param in model.parameters())
    trained = engine(model, torch.optim.AdamW(model.parameters()))
    for step in range(3):
        with Recorder() as recorder:
            mse(trained, *wide_batch(step)).backward()
            trained.step()
            trained.zero_grad()
    sent = sum((2 if kind == "all-reduce" else 1) * elements for kind, elements in recorder.collectives)
    assert sent <= 1.01 * engine.promise[1] * psi


@pytest.mark.ranks(4)
@pytest.mark.chapters
def test_what_is_shared_out_is_not_on_every_rank(engine):
    """Four ranks together hold at most two copies of the sharded tensors before `zero_grad()`."""
    if engine.promise is None:
        pytest.skip(f"{engine.name} does not say what its ranks divide: COUNTERPART would")
    kinds, _ = engine.promise
    model = seeded(Wide, dtype=torch.float32)
    whole = storage_bytes(model.parameters())
    trained = engine(model, torch.optim.AdamW(model.parameters()))
    for step in range(2):
        trained.zero_grad()
        mse(trained, *wide_batch(step)).backward()
        trained.step()
    inner = getattr(trained.optimizer, "optim", trained.optimizer)  # ZeroRedundancyOptimizer wraps it
    state = [value for values in inner.state.values() for value in values.values()]
    held = {"parameters": list(trained.model.parameters()), "optimizer": state}
    for kind in set(kinds) & set(held):
        total = torch.tensor(storage_bytes(tensor_leaves(held[kind])))
        dist.all_reduce(total)
        assert total <= 2.1 * whole * (1 + (kind == "optimizer")), kind  # AdamW has two moments


# The order in a step.


@pytest.mark.stages("zero3")
@pytest.mark.chapters
def test_zero3_gathers_the_next_unit_while_the_present_one_computes(engine):
    """In forward and in backward. It is waited for when its own unit begins, and not before."""
    model = seeded(Wide, dtype=torch.float32)
    trained = engine(model, FUSED(model.parameters()))
    *units, _ = trained.units
    places = {unit.module: index for index, unit in enumerate(units)}
    in_flight = []

    def before_forward(module, args):
        in_flight.extend(unit.work is not None for unit in units[places[module] + 1 :][:1])

    def after_forward(module, args, output):
        def before_backward(gradient):
            in_flight.extend(unit.work is not None for unit in units[: places[module]][-1:])

        output.register_hook(before_backward)

    for module in places:
        module.register_forward_pre_hook(before_forward)
        module.register_forward_hook(after_forward)
    mse(trained, *wide_batch(0)).backward()
    assert in_flight == [True] * 2 * (len(units) - 1)


class Branches(Blocks):
    """Blocks that do not depend on each other: ranks may finish their gradients in different orders."""

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        order = list(self.blocks)[:: -1 if dist.get_rank() else 1]
        return self.head(sum(block(x) for block in order))


@pytest.mark.stages("zero2")
@pytest.mark.chapters
def test_zero2_sends_buckets_in_one_order_on_all_ranks(engine):
    """The last parameters first, in any order in which a rank's autograd finishes them."""
    model = seeded(Branches, dtype=torch.float32)
    trained = engine(model, FUSED(model.parameters()), bucket_mb=0)
    with Recorder() as recorder:
        mse(trained, *own_batch(0, dtype=torch.float32)).backward()
        trained.reduce_gradients()
    found = [size for kind, size in recorder.collectives if kind == "reduce-scatter"]
    same(found, sizes(trained), what="elements of the reduce-scatters")
    same([bucket.names[0] for bucket in trained.buckets][0], "head.bias", what="the first bucket")
