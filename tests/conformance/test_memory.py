"""The bytes that a rank holds, exactly, and the most bytes that are alive at any operation."""

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import Block, Blocks, Recomputed, Recorder, Tied, mse, own_batch, seeded
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conformance.pair import Pair
from conformance.subjects import subject
from zerolab.measure.held import storage_bytes, tensor_leaves
from zerolab.teach.check import student
from zerolab.teach.check.helpers import Differs, same_memory
from zerolab.teach.exercises import EXERCISES

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
FUSED = partial(torch.optim.AdamW, lr=1e-3, fused=True)  # makes no temporary tensors
MODELS = {make.__name__: make for make in (Recomputed, Tied)}


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


def updated(trained):
    """The tensors that the optimizer updates on this rank."""
    return [param for group in trained.optimizer.param_groups for param in group["params"]]


def shards(trained):
    """The shards: an engine's optimizer has views of them."""
    buckets = getattr(trained, "all_buckets", None) or getattr(trained, "buckets", None) or trained.units
    return [bucket.shard for bucket in buckets]


def held_by(trained):
    """Bytes of (parameters, gradients, optimizer state)."""
    params = [*trained.model.parameters(), *shards(trained)]
    gradients = [param.grad for param in updated(trained)]
    for bucket in getattr(trained, "buckets", ()):
        gradients.append(bucket.gradient)  # of ZeRO-1
    state = [value for values in trained.optimizer.state.values() for value in values.values()]
    return tuple(storage_bytes(tensor_leaves(each)) for each in (params, gradients, state))


MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
PRECISIONS = {"float32": {}, "mixed": MIXED}


def held_by_formula(stage, psi, n, mixed):
    """(parameters, gradients, optimizer state) of Ψ parameters in bytes, on one of n ranks.

    In mixed precision whole parameters take 2 bytes each, and the shards 4.
    """
    shard = 4 * psi // n
    parameters = shard if stage == "zero3" else 4 * psi
    if mixed:
        parameters = shard if stage == "zero3" else 2 * psi + shard
    gradients = 4 * psi if stage == "zero1" else shard
    return parameters, gradients, 2 * shard


@pytest.mark.ranks(2, 4, thorough=(1,))
@pytest.mark.stages("zero1", "zero2", "zero3")
@pytest.mark.chapters
@pytest.mark.parametrize("precision", PRECISIONS)
def test_held_bytes_are_the_accounting(engine, precision):
    """Between backward and `zero_grad()` only the bytes in the chapter's accounting are alive."""
    model = seeded(Wide, dtype=torch.float32)
    psi = sum(param.numel() for param in model.parameters())
    expected = held_by_formula(engine.like, psi, dist.get_world_size(), precision == "mixed")
    with Recorder(model.parameters()) as recorder:
        trained = engine(model, FUSED(model.parameters()), **PRECISIONS[precision])
        for step in range(2):
            trained.zero_grad()
            mse(trained, *wide_batch(step)).backward()
            trained.step()
        found = held_by(trained)
        trained.zero_grad()
        gc.collect()
        after = recorder.live_bytes()
    counters = 4 * len(updated(trained))  # AdamW counts the steps of each tensor that it updates
    assert found == (*expected[:2], expected[2] + counters)
    kept = expected[1] if engine.like == "zero1" else 0  # the buffer for gradients
    assert after == expected[0] + expected[2] + counters + kept, "bytes of all tensors alive after zero_grad()"


def peak_by_formula(stage, psi, n, bucket, root, head):
    """The accounting at the end of each chapter. Bytes: of a bucket or unit, of the root, of the head's gradients."""
    if stage == "zero1":
        return 8 * psi + 8 * psi / n + bucket
    if stage == "zero2":
        return 4 * psi + 12 * psi / n + (2 - 1 / n) * bucket
    return 16 * psi / n + root + head + 4 * bucket - (root + 2 * bucket) / n


def peak_of(engine, **options):
    """The engine, and the most bytes that were alive at an operation of its second step."""
    model = seeded(Wide, 256, dtype=torch.float32)
    if engine.like in ("zero1", "zero2"):
        options["bucket_mb"] = 0  # a layer is a bucket
    with Recorder(model.parameters()) as recorder:
        trained = engine(model, FUSED(model.parameters()), **options)
        for step in range(2):
            recorder.peak = 0  # the first step makes the optimizer's state
            mse(trained, *wide_batch(step)).backward()
            trained.step()
            trained.zero_grad()
    return trained, recorder.peak


@pytest.mark.ranks(2, thorough=(1, 4))
@pytest.mark.stages("zero1", "zero2", "zero3")
@pytest.mark.chapters
def test_peak_is_the_accounting(engine):
    """At no operation are more bytes alive than in the accounting and in the chapter, apart from activations."""
    trained, peak = peak_of(engine)
    psi = sum(param.numel() for param in trained.model.parameters())
    unit, root, head = 4 * 256 * 256, 4 * (256 + 32 * 256), 4 * 32 * 256
    ranks = dist.get_world_size()
    if ranks > 1:
        expected = peak_by_formula(engine.like, psi, ranks, unit, root, head)
        assert expected - unit / 4 <= peak <= expected + 40_000, (expected, peak, (peak - expected) / unit)
    if engine.chapter:
        return
    _, of_chapter = peak_of(subject(f"{engine.like}.py"))
    assert of_chapter <= peak <= of_chapter + 4 * len(updated(trained)), "the engine needs more than its chapter"


@pytest.mark.stages("free")
@pytest.mark.chapters
def test_a_free_file_needs_no_more_bytes_than_the_chapter(engine):
    """Of `./launch.sh check`. What such a file keeps where is unknown, so all that is alive is counted."""
    _, name, file = engine.name.split(":", 2)
    exercise = EXERCISES[name]
    try:
        same_memory(student.stage_of(name, file, None), getattr(exercise.solution(), exercise.engine))
    except Differs as difference:  # not raised by this file, so it would count as the engine's refusal
        pytest.fail(str(difference))


@pytest.mark.stages("zero3")
@pytest.mark.chapters
def test_peak_of_zero3_is_not_above_fsdp2s(engine):
    """With the same units and prefetch ZeRO-3 needs no more memory than `fully_shard`."""
    _, found = peak_of(engine)
    _, of_fsdp2 = peak_of(subject("fsdp2"))
    assert 0 < found <= of_fsdp2, (found, of_fsdp2)


def gathered(model):
    return storage_bytes(model.parameters())


@pytest.mark.ranks(2, thorough=(1, 3, 4))
@pytest.mark.stages("zero3")
@pytest.mark.chapters
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_zero3_frees_what_it_gathers(engine, model, prefetch):
    """Only the root, the unit at work and the prefetched ones have memory at any time, and none between the steps."""
    model = seeded(MODELS[model], dtype=torch.float32)
    trained = engine(model, ADAMW(model.parameters()), prefetch=prefetch)
    sizes = sorted((unit.flat.nbytes for unit in trained.units if unit.module is not model), reverse=True)
    root = sum(unit.flat.nbytes for unit in trained.units if unit.module is model)
    assert gathered(model) == 0, "gathered after the build"
    with Recorder(probe=partial(gathered, model)) as recorder:
        for step in range(2):
            loss = mse(trained, *own_batch(step, dtype=torch.float32))
            loss.backward()
            assert gathered(model) == 0, "gathered after backward"
            mse(trained, *own_batch(step + 5, dtype=torch.float32))  # its root stays gathered for a backward
            trained.step()
            assert gathered(model) == 0, "gathered after a forward without a backward, and a step"
            trained.zero_grad()
            with torch.no_grad():
                trained(own_batch(step)[0])
            assert gathered(model) == 0, "gathered after an evaluation"
    ahead = prefetch if dist.get_world_size() > 1 else 0
    assert max(recorder.probed) <= root + sum(sizes[: 1 + ahead])


class LateReader(Block):
    """Backward reads a weight of the unit after the last of the unit's gradients."""

    def forward(self, x):
        return super().forward(x * self.scale.detach())


@pytest.mark.stages("zero3")
@pytest.mark.chapters
def test_zero3_frees_a_unit_that_is_gathered_again(engine):
    """It was freed with its last gradient, and is gathered once more."""
    model = seeded(Blocks)
    model.blocks[1] = seeded(LateReader)
    trained = engine(model, ADAMW(model.parameters()))
    with Recorder() as recorder:
        mse(trained, *own_batch(0)).backward()
    gathers = [name for name, _ in recorder.collectives if name == "all-gather"]
    assert len(gathers) == 2 * 3 + 1 + 1, "the unit was not gathered again, so this proves nothing"
    assert gathered(model) == 0


class PartlyFrozen(Wide):
    """All but the first and the last layer are frozen."""

    def __init__(self):
        super().__init__()
        self.blocks.requires_grad_(False)
        self.blocks[0].requires_grad_(True)


class Idle(Wide):
    """Each unit has a weight that is never used, so with `find_unused` no unit is ever complete."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.idle = nn.Parameter(torch.ones(1))


class FrozenInput(Wide):
    """The first layer, which is in the root, is frozen, so the root has two units and each block has one."""

    def __init__(self):
        super().__init__()
        self.first.requires_grad_(False)


NOT_COMPLETE = {
    "frozen": (PartlyFrozen, {}),
    "frozen input": (FrozenInput, {}),
    "unused": (Idle, {"find_unused": True}),
    "no_sync": (Wide, {}),
}


@pytest.mark.stages("zero3")
@pytest.mark.parametrize("case", NOT_COMPLETE)
def test_zero3_frees_units_that_are_never_complete(engine, case):
    """A unit without a last gradient is freed when backward leaves it: frozen, partly unused, or under `no_sync`."""
    make, options = NOT_COMPLETE[case]
    model = seeded(make, dtype=torch.float32)
    trained = engine(model, FUSED(model.parameters()), **options)
    unit = 4 * 64 * 64 + 16
    root = sum(each.flat.nbytes for each in trained.units if each.module is model)
    for step in range(2):
        with Recorder(probe=partial(gathered, model)) as recorder:
            if case == "no_sync":
                with trained.no_sync():
                    mse(trained, *wide_batch(step)).backward()
            else:
                mse(trained, *wide_batch(step)).backward()
                trained.step()
        trained.zero_grad()
        assert max(recorder.probed) <= root + 2 * unit + 64
        assert gathered(model) == 0


@pytest.mark.stages("zero3")
def test_zero3_keeps_units_until_backward_if_asked(engine):
    """`reshard_after_forward=False`: all are gathered after forward, none after backward, few in an evaluation.

    So each unit is gathered once in a step, and a step sends 2Ψ.
    """
    model = seeded(Wide, dtype=torch.float32)
    whole = gathered(model)
    trained = engine(model, FUSED(model.parameters()), reshard_after_forward=False)
    for step in range(2):
        with Recorder() as recorder:
            loss = mse(trained, *wide_batch(step))
            assert gathered(model) == whole
            loss.backward()
            assert gathered(model) == 0
            trained.step()
        trained.zero_grad()
        kinds = [kind for kind, _ in recorder.collectives]
        assert kinds.count("all-gather") == kinds.count("reduce-scatter") == len(trained.units)
    with torch.no_grad(), Recorder(probe=partial(gathered, model)) as recorder:
        trained(wide_batch(5)[0])
    assert max(recorder.probed) < whole / 2


@pytest.mark.stages("zero3")
@pytest.mark.parametrize("quiet", [False, True])
def test_zero3_keeps_units_through_micro_batches_if_asked(engine, quiet):
    """`reshard_after_backward=False`: each unit is gathered once in a step of three micro-batches, and freed by it.

    An evaluation in between frees the units, and the next forward gathers them again.
    """
    pair = Pair(engine, seeded(Blocks), reshard_after_backward=False)
    units = len(pair.trained.units)
    for step in range(3):
        with Recorder() as recorder:
            for micro in range(3):
                pair.backward(3 * step + micro, quiet=quiet and micro < 2)
                assert all(unit.allocated for unit in pair.trained.units)
            pair.step()
        sent = [name for name, _ in recorder.collectives]
        assert sent.count("all-gather") == units and sent.count("reduce-scatter") == (1 if quiet else 3) * units
        assert gathered(pair.model) == 0, "gathered after the step"
    pair.backward(0)
    pair.evaluate()
    assert gathered(pair.model) == 0, "gathered after an evaluation"
    pair.backward(1)
    pair.step()
    pair.check_weights()


@pytest.mark.stages("zero2")
@pytest.mark.chapters
def test_zero2_has_whole_gradients_of_two_buckets_at_most(engine):
    """At any operation of a backward these are the bucket that autograd fills, and the one in flight."""
    model = seeded(Wide, dtype=torch.float32)
    trained = engine(model, FUSED(model.parameters()), bucket_mb=0)
    get_grad = torch._C.TensorBase.grad.__get__  # an engine's `param.grad` raises an error once the gradient has moved

    def whole_gradients():
        tensors = [get_grad(param) for param in trained.model.parameters()]
        if trained.in_flight is not None:
            tensors.append(trained.in_flight.gradient)
        return storage_bytes(tensor_leaves(tensors))

    with Recorder(probe=whole_gradients) as recorder:
        for step in range(2):
            mse(trained, *wide_batch(step)).backward()
            trained.step()
            trained.zero_grad()
    bucket = 4 * 64 * 64
    assert bucket <= max(recorder.probed) <= 2 * bucket


class ZeroedBytes(TorchDispatchMode):
    """Counts the bytes that operations fill with zeros."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("zeros", "new_zeros", "zeros_like", "zero_", "_foreach_zero_"):
            written = args if result is None else result
            self.nbytes += sum(leaf.nbytes for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor))
        return result


@pytest.mark.stages("zero2", "zero3")
def test_only_padding_is_filled_with_zeros(engine):
    """A buffer for gradients is written once: what autograd has computed into its places, and zeros into padding."""
    plain, model = seeded(Blocks), seeded(Blocks)
    with ZeroedBytes() as of_plain:  # autograd itself makes some
        mse(plain, *own_batch(0)).backward()
    trained = engine(model, ADAMW(model.parameters()))
    padding = [bucket.numel - sum(param.numel() for param in bucket.params) for bucket in trained.buckets]
    with ZeroedBytes() as zeroed:
        mse(trained, *own_batch(0)).backward()
        trained.reduce_gradients()
    assert zeroed.nbytes - of_plain.nbytes == 8 * sum(padding) > 0
