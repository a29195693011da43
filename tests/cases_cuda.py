"""Run on every rank, with a GPU each or one that they share: what only CUDA can show."""

import gc
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from zerolab.measure.ledger import MemoryLedger, let_go, warm_up
from zerolab.properties import fixtures
from zerolab.properties.overlap import spoilt_until_they_run
from zerolab.properties.property import same

FUSED = partial(torch.optim.AdamW, lr=0.01, fused=True)
CYCLES = 20_000_000  # of the GPU's clock: some 10 ms, far longer than any kernel here
LAYERS = 8
WIDTH = 1024  # a layer of 4 MiB: what the allocator adds to it is little


def allocated_before_a_case() -> int:
    """Bytes that are no engine's: what the case before has left is gone, and CUDA's libraries have theirs."""
    device = torch.device("cuda", torch.cuda.current_device())
    warm_up(device)
    gc.collect()
    let_go(device)
    return torch.cuda.memory_allocated()


def wide() -> nn.Module:
    """Layers without biases: hardly anything but weights."""

    model = fixtures.seeded(lambda: fixtures.Stack(LAYERS, WIDTH), dtype=torch.float32, device="cuda")
    for layer in model.layers:
        layer.bias = None
    return model


def own_batch(step: int, width: int = WIDTH):
    return [tensor.cuda() for tensor in fixtures.vector_batch(step, dist.get_rank(), width)]


def allocators_peak(stage: str) -> float:
    """The allocator's peak of a step over the ledger's. Both see the same storages; the allocator rounds up."""
    batches = [own_batch(step) for step in range(3)]
    before = allocated_before_a_case()
    with MemoryLedger() as memory:
        engine = fixtures.STAGES[stage](wide(), FUSED)
        for batch in batches[:2]:
            engine.training_step(*batch, F.mse_loss)
        memory.reset_peak()
        torch.cuda.reset_peak_memory_stats()
        engine.training_step(*batches[2], F.mse_loss)
        allocated, ledger = torch.cuda.max_memory_allocated() - before, memory.peak
    # What the ledger cannot see: workspaces inside kernels, and gloo's copy of a reduce-scatter's input.
    bucket = max(bucket.numel * bucket.flat.element_size() for bucket in engine.all_buckets)
    unseen = 2 * bucket if dist.get_backend() == "gloo" else 0
    assert ledger <= allocated + 2**16, f"the ledger counts {ledger - allocated} bytes that were never allocated"
    assert allocated <= 1.25 * ledger + 8 * 2**20 + unseen, (allocated, ledger)
    return allocated / ledger


def ddp_leaves_nothing() -> None:
    """After `let_go` the allocator has nothing of an engine that is gone, nor of what its collectives have sent."""
    device, before = torch.device("cuda", torch.cuda.current_device()), allocated_before_a_case()
    model = DistributedDataParallel(wide(), device_ids=[device], gradient_as_bucket_view=True)
    F.mse_loss(model(own_batch(0)[0]), own_batch(0)[1]).backward()
    assert torch.cuda.memory_allocated() > before
    del model
    gc.collect()
    let_go(device)
    assert torch.cuda.memory_allocated() == before, torch.cuda.memory_allocated() - before


class _Sleep(torch.autograd.Function):
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


class Sleepy(fixtures.Stack):
    """A stack that computes slowly, so that whoever does not wait for it reads what was there before."""

    cycles = 0

    def forward(self, x):
        for layer in self.layers:
            x = _Sleep.apply(layer(x), self.cycles) if self.cycles else layer(x)
        return x


def _train(stage: str, options: dict, cycles: int = 0, steps: int = 4) -> dict[str, torch.Tensor]:
    """Weights after some steps of a `Sleepy` model. Every step leaves other weights, so old ones show."""
    model = fixtures.seeded(lambda: Sleepy(4, 256), dtype=torch.float32, device="cuda")
    model.cycles = cycles
    own = {"bucket_mb": 0.3} if stage != "zero3" else {}  # a bucket per layer
    engine = fixtures.STAGES[stage](model, FUSED, **own, **options)
    if cycles:
        engine.optimizer.register_step_pre_hook(lambda *_: torch.cuda._sleep(cycles))
    for step in range(steps):
        engine.training_step(*own_batch(step, 256), F.mse_loss)
    return engine.full_state_dict()


def collectives_wait_for_compute(stage: str, options: dict) -> None:
    """Slow kernels in forward, backward and before the update: a collective must not read before they have written."""
    same("the state", _train(stage, options, CYCLES), _train(stage, options), atol=0)


def offload_changes_nothing(stage: str) -> None:
    """Weights as without offload, but for the rounding of AdamW, which the host computes in another order."""
    found = _train(stage, {"offload_policy": CPUOffloadPolicy()})
    same("the state", found, _train(stage, {}), atol=1e-5)


def compute_waits_for_collectives(stage: str, options: dict) -> bool:
    """Collectives that end late, on the GPU and not on the host: what is computed before their end reads NaN.

    Each is issued from a stream that sleeps first. The stream that computes does not, so it runs ahead until it waits.
    Returns whether the weights are those of prompt collectives. (That each wait is needed: extra/simulated_gpu/.)
    """
    expected = _train(stage, options)
    kept = []

    def start(name, run):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            work = run(async_op=True)
        kept.append((side, work))
        return work

    with spoilt_until_they_run(start):
        found = _train(stage, options)
    torch.cuda.synchronize()
    assert kept, "no collective was asynchronous: nothing was late"
    return all(torch.equal(found[name], expected[name]) for name in expected)
