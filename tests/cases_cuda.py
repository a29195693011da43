"""Run on every rank, with a GPU each or one that they share: what only CUDA can show."""

import copy
import gc
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from harness.measure.ledger import MemoryLedger, held_bytes, let_go, storage_bytes, warm_up
from harness.properties import parts
from harness.properties.layout import padded
from harness.properties.property import same
from harness.run.model import GPT, PRESETS, initialize, next_token_loss

ADAMW = partial(torch.optim.AdamW, lr=0.01)
CYCLES = 20_000_000  # of the GPU's clock: some 10 ms, far longer than any kernel here
LAYERS = 8
WIDTHS = {"cuda": 1024, "cpu": 128}  # a layer of 4 MiB: what the allocator adds to it is little


def allocated_before_a_case() -> int:
    """Bytes that are no engine's: what the case before has left is gone, and CUDA's libraries have theirs."""
    device = torch.device("cuda", torch.cuda.current_device())
    warm_up(device)
    gc.collect()
    let_go(device)
    return torch.cuda.memory_allocated()


def wide(device: str, layers: int = LAYERS, width: int | None = None) -> nn.Module:
    """Layers without biases: hardly anything but weights."""

    def build():
        model = parts.Stack(layers, width or WIDTHS[device])
        for layer in model.layers:
            layer.bias = None
        return model

    return parts.seeded(build, dtype=torch.float32, device=device)


def batch_on(device: str, step: int, width: int | None = None):
    return [tensor.to(device) for tensor in parts.vector_batch(step, dist.get_rank(), width or WIDTHS[device])]


def bytes_held(stage: str, device: str, engine_name: str | None = None) -> None:
    """Parameters, gradients and state to the byte; on CUDA the allocator has given out little more than that."""
    world_size = dist.get_world_size()
    numel = LAYERS * padded([WIDTHS[device] ** 2], world_size)[0]
    batches, held = [batch_on(device, step) for step in range(2)], {}
    before = allocated_before_a_case() if device == "cuda" else 0
    adamw = partial(ADAMW, fused=True)
    engine = (parts.DDPInDisguise if engine_name == "impostor" else parts.STAGES[stage])(wide(device), adamw)
    engine.training_step(*batches[0], F.mse_loss)

    def look(optimizer, *_):
        held.update(held_bytes(engine))
        held["allocated"] = torch.cuda.memory_allocated() - before if device == "cuda" else None

    engine.optimizer.register_step_pre_hook(look)
    engine.training_step(*batches[1], F.mse_loss)
    pieces = [piece for group in engine.optimizer.param_groups for piece in group["params"]]
    state = 8 * sum(piece.numel() for piece in pieces) + 4 * len(pieces)  # AdamW's moments, and a counter per piece
    cut = {"zero1": (1, 1), "zero2": (1, world_size), "zero3": (world_size, world_size)}[stage]
    expected = [4 * numel // cut[0], 4 * numel // cut[1], state]
    assert state <= 8 * numel // world_size + 4 * len(pieces), f"{state} bytes of optimizer state, expected a shard's"
    allocated = held.pop("allocated")
    assert list(held.values()) == expected, f"held {held}, expected {expected}"
    if allocated is not None:
        # The allocator rounds: a block to 512 bytes, and a large one's rest of up to 1 MiB stays with it.
        assert sum(expected) <= allocated <= 1.25 * sum(expected) + 4 * 2**20, (allocated, sum(expected))


def weights_are_aligned(stage: str, device: str) -> None:
    """Weights and shards of odd sizes start on multiples of 256 bytes on a GPU, of 16 on the CPU, and of no more."""
    model = parts.seeded(
        lambda: nn.Sequential(*(nn.Linear(width, 7) for width in (3, 5, 9))), dtype=torch.float32, device=device
    )
    for dtype in (None, torch.bfloat16):
        engine = parts.STAGES[stage](copy.deepcopy(model), ADAMW, param_dtype=dtype)
        for bucket in engine.buckets:
            align = {"cpu": 16, "cuda": 256}[device] // (4 if dtype is None else 2)  # elements
            places = (*bucket.offsets, bucket.shard_numel)
            assert not any(place % align for place in places), (stage, dtype, places)
            numel, _ = padded([shape.numel() for shape in bucket.shapes], dist.get_world_size(), align)
            assert bucket.numel == numel, (stage, dtype, bucket.numel, numel)


def allocators_peak(stage: str) -> float:
    """The allocator's peak of a step over the ledger's. Both see the same storages; the allocator rounds up."""
    device = "cuda"
    batches = [batch_on(device, step) for step in range(3)]
    before = allocated_before_a_case()
    with MemoryLedger() as memory:
        engine = parts.STAGES[stage](wide(device), partial(ADAMW, fused=True))
        for batch in batches[:2]:
            engine.training_step(*batch, F.mse_loss)
        memory.reset_peak()
        torch.cuda.reset_peak_memory_stats()
        engine.training_step(*batches[2], F.mse_loss)
        allocated, ledger = torch.cuda.max_memory_allocated() - before, memory.peak
    # What the ledger cannot see: workspaces inside kernels, and gloo's copy of a reduce-scatter's input.
    bucket = max(bucket.numel * bucket.flat.element_size() for bucket in engine.buckets)
    unseen = 2 * bucket if dist.get_backend() == "gloo" else 0
    assert ledger <= allocated + 2**16, f"the ledger counts {ledger - allocated} bytes that were never allocated"
    assert allocated <= 1.25 * ledger + 8 * 2**20 + unseen, (allocated, ledger)
    return allocated / ledger


def ddp_leaves_nothing() -> None:
    """After `let_go` the allocator has nothing of an engine that is gone, nor of what its collectives have sent."""
    device, before = torch.device("cuda", torch.cuda.current_device()), allocated_before_a_case()
    model = DistributedDataParallel(wide("cuda"), device_ids=[device], gradient_as_bucket_view=True)
    F.mse_loss(model(batch_on("cuda", 0)[0]), batch_on("cuda", 0)[1]).backward()
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


class Sleepy(parts.Stack):
    """A stack that computes slowly, so that whoever does not wait for it reads what was there before."""

    cycles = 0

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if self.cycles:
                x = _Sleep.apply(x, self.cycles)
        return x


def _train(stage: str, options: dict, cycles: int = 0, steps: int = 4) -> dict[str, torch.Tensor]:
    """Weights after some steps of a `Sleepy` model. Every step leaves other weights, so old ones show."""
    model = parts.seeded(lambda: Sleepy(4, 256), dtype=torch.float32, device="cuda")
    model.cycles = cycles
    own = {"bucket_mb": 0.3} if stage != "zero3" else {}  # a bucket per layer
    engine = parts.STAGES[stage](model, partial(ADAMW, fused=True), **own, **options)
    if cycles:
        engine.optimizer.register_step_pre_hook(lambda *_: torch.cuda._sleep(cycles))
    for step in range(steps):
        engine.training_step(*batch_on("cuda", step, 256), F.mse_loss)
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
    Returns whether the weights are those of prompt collectives. (That each wait is needed: tests/test_simulated.py.)
    """
    expected = _train(stage, options)
    real = {name: getattr(dist, name) for name in ("all_gather_single", "reduce_scatter_single", "all_reduce")}
    kept = []

    def late(name):
        def issue(output, *inputs, async_op=False, **more):
            if not async_op:
                return real[name](output, *inputs, **more)
            if inputs:
                own = inputs[0].clone()
                output.fill_(torch.nan)
                inputs[0].copy_(own)  # it may be a part of the output
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(CYCLES)
                work = real[name](output, *inputs, async_op=True, **more)
            kept.append((side, work))
            return work

        return issue

    for name in real:
        setattr(dist, name, late(name))
    try:
        found = _train(stage, options)
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    torch.cuda.synchronize()
    assert kept, "no collective was asynchronous: nothing was late"
    return all(torch.equal(found[name], expected[name]) for name in expected)


def meta_to_the_device(device: str) -> None:
    """A model on `meta` gets its memory on the ranks' device, and the weights that it would have had."""
    with torch.device("meta"):
        model = GPT(PRESETS["toy"])
    # Over gloo nothing says which device is meant but torch's default.
    with torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu"):
        engine = parts.ZeRO3(model, ADAMW, init_fn=initialize)
    assert {param.device.type for param in model.parameters()} == {device}
    assert {piece.device.type for bucket in engine.trained_buckets for _, piece in bucket.pieces} == {device}
    assert storage_bytes(model.parameters()) == 0, "gathered parameters outlive the construction"
    same("the state", engine.full_state_dict(), GPT(PRESETS["toy"]).state_dict(), atol=0)
    other = parts.ZeRO3(copy.deepcopy(GPT(PRESETS["toy"])).to(device), ADAMW)
    for step in range(2):
        generator = torch.Generator().manual_seed(1_000 * step + dist.get_rank())
        tokens = torch.randint(256, (2, 17), generator=generator).to(device)
        losses = [e.training_step(tokens[:, :-1], tokens[:, 1:], next_token_loss) for e in (engine, other)]
        assert torch.equal(*losses)


def norm_of_gradients(stage: str, device: str) -> None:
    """Clipping on the device: the norm is plain PyTorch's of the whole batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, engine = wide(device, 4, 64), parts.STAGES[stage](wide(device, 4, 64), ADAMW)
    inputs, targets = (t.to(device) for t in parts.whole(partial(parts.vector_batch, width=64), 0, world_size))
    F.mse_loss(model(inputs), targets).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    F.mse_loss(engine(inputs[rank : rank + 1]), targets[rank : rank + 1]).backward()
    found = engine.clip_grad_norm_(1.0)
    assert found.device.type == device
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
