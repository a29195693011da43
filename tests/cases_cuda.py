"""Run on every rank, with its own GPU or one that ranks share: what only CUDA can show."""

import contextlib
import gc
import math
from functools import partial

import torch
import torch.distributed as dist
from conformance.pair import Pair
from conformance.subjects import subject
from conformance.test_late_collectives import collectives_started_by
from helpers import (
    Dtypes,
    Tied,
    concatenated,
    mse,
    mse_loss,
    own_batch,
    same,
    seeded,
    whole_weights,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zerolab.engine import GradScaler
from zerolab.measure.held import storage_bytes, tensor_leaves
from zerolab.measure.ledger import MemoryLedger, release_sent, warm_up
from zerolab.run import engines
from zerolab.run.model import GPT, GPTConfig, initialize, next_token_loss

STAGES = {f"{name}.py": chapter for name, chapter in engines.CHAPTERS.items()} | engines.STAGES
MODELS = {make.__name__: make for make in (Tied, Dtypes)}
ADAMW = partial(torch.optim.AdamW, lr=0.01, fused=True)
CYCLES = 20_000_000  # of the GPU's clock: about 10 ms, far longer than any kernel here


def weights_of(engine):
    """{name: a copy of the whole weight}, on every rank."""
    return engine.full_state_dict() if hasattr(engine, "full_state_dict") else whole_weights(engine)


# Values.


def mse_on_gpu(model, inputs, targets):
    return mse(model, inputs.cuda(), targets.cuda())


def pair(stage, model, **options):
    """The stage, and plain torch in one process on the batches of all ranks. In float64, on this rank's GPU."""
    return Pair(subject(stage), seeded(MODELS[model]).cuda(), loss=mse_on_gpu, **options)


def equals_one_process(stage, model, options):
    pair(stage, model, **options).train()


def gpt_batch(step):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(32, (2, 9), generator=generator).cuda()


def clipping_takes_the_norm_of_the_whole_model(stage, norm_type):
    both = pair(stage, "Tied")
    for step in range(3):
        both.backward(step)
        expected = nn.utils.clip_grad_norm_(both.plain.parameters(), 0.05, norm_type)
        same(both.trained.clip_grad_norm_(0.05, norm_type), expected, both.tolerance, "the norm")
        both.step()
    both.check_weights()


def an_overflow_on_one_rank_skips_the_step_on_all(stage, options):
    """All ranks skip the step and halve the scale. The other steps are made as without a scaler."""
    both, scaler = pair(stage, "Tied", **options), GradScaler(init_scale=2.0**8)
    for step in range(3):
        if step != 1:
            mse_on_gpu(both.plain, *concatenated(step, both.ranks)).backward()
            both.optimizer.step()
        both.optimizer.zero_grad()
        overflows = step == 1 and dist.get_rank() == 0
        loss = mse_on_gpu(both.trained, *own_batch(step)) * (math.inf if overflows else 1.0)
        scaler.scale(loss).backward()
        scaler.step(both.trained)
        scaler.update()
        both.trained.zero_grad()
        assert scaler.get_scale() == (2.0**8 if step == 0 else 2.0**7), (step, scaler.get_scale())
    both.check_weights()


def a_model_on_meta_starts_as_the_whole_one():
    """From the same seed it gets the same weights to the bit, on this rank's GPU, and trains."""
    config = GPTConfig(2, 16, 2, 32, 8)
    expected = GPT(config, seed=7).state_dict()
    with torch.device("meta"):
        model = GPT(config)
    optimizer = ADAMW(model.parameters())
    with torch.device("cuda", torch.cuda.current_device()):
        engine = engines.STAGES["zero3"](model, optimizer, init_fn=partial(initialize, seed=7))
    assert storage_bytes(model.parameters()) == 0, "bytes that stay gathered"
    for name, value in engine.full_state_dict().items():
        same(value, expected[name], 0.0, name)
    pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
    assert {tensor.device.type for tensor in (*model.parameters(), *pieces)} == {"cuda"}
    tokens = gpt_batch(0)
    assert engine.training_step(tokens[:, :-1], tokens[:, 1:], next_token_loss).isfinite()


# Memory.

LAYERS, LARGE = 8, 1024  # a layer of 4 MiB: what the allocator adds to it is little


class Layers(nn.Module):
    """Layers without biases: hardly anything but weights. No padding: all sizes are powers of two."""

    def __init__(self, layers=LAYERS, width=LARGE):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def layers_on_gpu(make=Layers, *arguments):
    return seeded(make, *arguments, dtype=torch.float32).cuda()


def vectors(step, width=LARGE):
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return [torch.randn(4, width, generator=generator).cuda() for _ in range(2)]


def allocated_before_a_case():
    """Bytes that belong to no engine: what the case before has left is gone, and CUDA's libraries have theirs."""
    device = torch.device("cuda", torch.cuda.current_device())
    warm_up(device)
    mse_loss(layers_on_gpu(Layers, 1, 16)(vectors(0, 16)[0]), vectors(0, 16)[1]).backward()
    gc.collect()
    release_sent(device)
    return torch.cuda.memory_allocated()


# Bytes of parameters, gradients and optimizer state: what is whole, per parameter, and what is divided by the ranks.
HELD = {
    "zero1": [(4, 0), (4, 0), (0, 8)],
    "zero2": [(4, 0), (0, 4), (0, 8)],
    "zero3": [(0, 4), (0, 4), (0, 8)],
}
HELD_WITH_OFFLOAD = {  # on the GPU and in the host's memory together
    "zero1": [(4, 4), (4, 4), (0, 8)],
    "zero2": [(4, 4), (0, 4), (0, 8)],
    "zero3": [(0, 4), (0, 4), (0, 8)],
}
ON_GPU_WITH_OFFLOAD = {"zero1": 8, "zero2": 4, "zero3": 0}  # bytes per parameter: whole weights, whole gradients


def held_bytes_are_the_accounting(stage, options):
    """Between `step()` and `zero_grad()`, by storages, and by what the allocator has given out."""
    name = stage.removesuffix(".py")
    before = allocated_before_a_case()
    model = layers_on_gpu()
    psi = sum(param.numel() for param in model.parameters())
    held = HELD_WITH_OFFLOAD if "offload_policy" in options else HELD
    expected = [whole * psi + divided * psi // dist.get_world_size() for whole, divided in held[name]]
    engine = STAGES[stage](model, ADAMW(model.parameters()), **options)
    for step in range(2):
        engine.zero_grad()
        mse_loss(engine(vectors(step)[0]), vectors(step)[1]).backward()
        engine.step()
    buckets = engine.buckets if hasattr(engine, "buckets") else engine.units
    updated = [piece for group in engine.optimizer.param_groups for piece in group["params"]]
    state = [value for values in engine.optimizer.state.values() for value in values.values()]
    counters = 4 * len(updated)  # AdamW counts the steps of each tensor that it updates
    params = [*model.parameters(), *(bucket.shard for bucket in buckets)]
    gradients = [*(bucket.gradient for bucket in buckets), *(piece.grad for piece in updated)]
    found = tuple(storage_bytes(tensor_leaves(each)) for each in (params, gradients, state))
    assert found == (*expected[:2], expected[2] + counters), (found, expected, counters)
    gc.collect()
    release_sent(torch.device("cuda", torch.cuda.current_device()))
    on_gpu = ON_GPU_WITH_OFFLOAD[name] * psi if "offload_policy" in options else sum(expected)
    assert 0 <= torch.cuda.memory_allocated() - before - on_gpu <= 2**16, "what the allocator has given out"


def allocators_peak(stage):
    """The allocator's peak of a step over the ledger's. Both see the same storages; the allocator rounds up."""
    batches = [vectors(step) for step in range(3)]
    before = allocated_before_a_case()
    with MemoryLedger() as memory:
        model = layers_on_gpu()
        engine = STAGES[stage](model, ADAMW(model.parameters()))
        for batch in batches[:2]:
            engine.training_step(*batch, mse_loss)
        memory.reset_peak()
        torch.cuda.reset_peak_memory_stats()
        engine.training_step(*batches[2], mse_loss)
        allocated, ledger = torch.cuda.max_memory_allocated() - before, memory.peak
    buckets = engine.buckets if hasattr(engine, "buckets") else engine.units
    # The ledger cannot see workspaces inside kernels, and gloo's copy of a reduce-scatter's input.
    bucket = max(bucket.numel * bucket.flat.element_size() for bucket in buckets)
    unseen = 2 * bucket if dist.get_backend() == "gloo" else 0
    assert ledger <= allocated + 2**16, f"the ledger counts {ledger - allocated} bytes that were never allocated"
    assert allocated <= 1.25 * ledger + 8 * 2**20 + unseen, (allocated, ledger)
    return allocated / ledger


def a_gather_allocates_what_the_ledger_sees(stage, options):
    """In bytes that were asked for, because the allocator rounds them up."""

    def requested(what):
        return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]

    with MemoryLedger() as memory:
        model = layers_on_gpu()
        engine = STAGES[stage](model, ADAMW(model.parameters()), **options)
        engine.training_step(*vectors(0), mse_loss)
        bucket = engine.buckets[0]
        memory.reset_peak()
        torch.cuda.reset_peak_memory_stats()
        before, live = requested("current"), memory.live
        if stage == "zero3":
            bucket.start_gather()
            bucket.wait()
        else:
            bucket.gather().wait()
        assert requested("peak") - before == memory.peak - live, (requested("peak") - before, memory.peak - live)


def ddp_leaves_nothing():
    """After `release_sent` the allocator has nothing of an engine that is gone, nor of what its collectives sent."""
    device, before = torch.device("cuda", torch.cuda.current_device()), allocated_before_a_case()
    model = DistributedDataParallel(layers_on_gpu(), device_ids=[device], gradient_as_bucket_view=True)
    mse_loss(model(vectors(0)[0]), vectors(0)[1]).backward()
    assert torch.cuda.memory_allocated() > before
    del model
    gc.collect()
    release_sent(device)
    assert torch.cuda.memory_allocated() == before, torch.cuda.memory_allocated() - before


# Order.


class Sleep(torch.autograd.Function):
    """A kernel that takes long and changes nothing, in forward and in backward."""

    @staticmethod
    def forward(ctx, x, cycles):
        ctx.cycles = cycles
        torch.cuda._sleep(cycles)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(ctx.cycles)
        return gradient.clone(), None


class Sleepy(Layers):
    """Layers that compute slowly, so that whatever does not wait for them reads what was there before."""

    cycles = 0

    def forward(self, x):
        for layer in self.layers:
            x = Sleep.apply(layer(x), self.cycles) if self.cycles else layer(x)
        return x


def slow_or_not(stage, options, cycles=0):
    """Weights after four steps of a `Sleepy` model. Every step changes the weights, so stale ones show."""
    model = layers_on_gpu(Sleepy, 4, 256)
    model.cycles = cycles
    own = {"bucket_mb": 0.3} if "zero3" not in stage else {}  # a bucket per layer
    engine = STAGES[stage](model, ADAMW(model.parameters()), **own, **options)
    if cycles:
        engine.optimizer.register_step_pre_hook(lambda *_: torch.cuda._sleep(cycles))
    for step in range(4):
        engine.training_step(*vectors(step, 256), mse_loss)
    return weights_of(engine)


def same_weights(found, expected, tolerance=0.0):
    for name in expected:
        same(found[name], expected[name], tolerance, name)


def collectives_wait_for_slow_kernels(stage, options):
    """Slow kernels in forward, backward and before the update: a collective must not read before they have written."""
    same_weights(slow_or_not(stage, options, CYCLES), slow_or_not(stage, options))


def offload_changes_nothing(stage, options):
    """Weights as without offload, except for the rounding of AdamW, which the host computes in a different order."""
    same_weights(slow_or_not(stage, options), slow_or_not(stage, {}), 1e-5)


def kernels_wait_for_slow_collectives(stage, options):
    """Collectives that end late, on the GPU and not on the host: what is computed before their end reads NaN."""
    expected = slow_or_not(stage, options)
    with late_collectives() as late:
        found = slow_or_not(stage, options)
    torch.cuda.synchronize()
    assert late, "no collective was asynchronous: nothing was late"
    same_weights(found, expected)


@contextlib.contextmanager
def late_collectives():
    """Asynchronous collectives run late, and what they write to is NaN until they do. Yields those that have run.

    Each is issued from a stream that sleeps first. The stream that computes does not, so it runs ahead until it waits.
    """
    issued = []

    def run_on_a_slow_stream(collective):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            work = collective(async_op=True)
        issued.append((side, work))
        return work

    with collectives_started_by(run_on_a_slow_stream):
        yield issued
