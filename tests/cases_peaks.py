"""Run on every rank: live bytes at the worst moment of forward and of backward."""

import parts
import torch
import torch.distributed as dist
from torch.nn import functional as F

from harness.measure.memory import MemoryLedger

ADAMW = parts.OPTIMIZERS["adamw"]


def gradients_in_backward(engine_name: str = "zero2", reverse: bool = False) -> None:
    """ZeRO-2: live bytes in backward never exceed parameters, state, 1/N of the gradients and two buckets."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layers, width = 12, 64
    layer = 4 * (width * width + width)
    group = parts.silent_group()
    batches = [parts.vector_batch(step, rank, width) for step in range(3)]
    with MemoryLedger() as memory:
        model = parts.seeded(lambda: parts.Stack(layers, width, reverse), dtype=torch.float32)
        # a bucket per layer
        engine = parts.engine_class(engine_name)(model, ADAMW, bucket_mb=layer / 2**20, group=group)
        for batch in batches[:2]:
            engine.training_step(*batch, F.mse_loss)
        between = memory.live
        loss = F.mse_loss(engine(batches[2][0]), batches[2][1])
        memory.reset_peak()
        loss.backward()
        most = memory.peak - between
    allowed = layers * layer / world_size + 2 * layer
    activations = (4 + layers) * 4 * width  # all of the layers' inputs, and the gradients between them
    if reverse:
        # documented: every bucket waits for bucket 0, whose gradients come last
        assert most > allowed + activations, "in the opposite order all gradients should be whole at once"
        assert most <= layers * layer + 2 * layer + activations
    else:
        assert most <= allowed + activations, f"{most} bytes of gradients at the worst moment, allowed {allowed}"
        assert most > allowed - layer, "the bound is far from tight: what was measured here?"


def parameters_in_a_step(options: dict) -> None:
    """ZeRO-3: gathered are the root, the unit at work and `prefetch` more; none after backward."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layers, width = 12, 64
    prefetch, group = options.get("prefetch", 1), parts.silent_group()
    layer = 4 * (width * width + width)
    state = layers * layer / world_size * 3  # parameters, and AdamW's two moments
    counters = 4 * 2 * layers
    noise = (16 + 2 * layers) * 4 * width
    batches = [parts.vector_batch(step, rank, width) for step in range(3)]
    with MemoryLedger() as memory:
        model = parts.seeded(lambda: parts.Stack(layers, width), dtype=torch.float32)
        engine = parts.ZeRO3(model, ADAMW, group=group, **options)
        assert memory.live <= layers * layer / world_size + noise, "gathered parameters outlive the construction"
        for batch in batches[:2]:
            engine.training_step(*batch, F.mse_loss)
        between = memory.live
        assert between <= state + counters + noise
        memory.reset_peak()
        loss = F.mse_loss(engine(batches[2][0]), batches[2][1])
        in_forward, after_forward = memory.peak - between, memory.live - between
        memory.reset_peak()
        loss.backward()
        in_backward, after_backward = memory.peak - between, memory.live - between
    if options.get("reshard_after_forward", True):
        units = 1 + min(prefetch, layers - 1)
        assert in_forward <= units * layer + noise, f"{in_forward / layer:.2f} units gathered in forward"
        assert in_forward >= units * layer, "fewer units than promised were gathered: is prefetching on?"
        assert after_forward <= noise, f"{after_forward / layer:.2f} units gathered after forward"
        # backward adds the gradients' shards and at most two units of whole gradients
        assert in_backward <= (units + 2) * layer + layers * layer / world_size + noise
    else:
        assert layers * layer <= after_forward <= layers * layer + noise
    assert after_backward <= layers * layer / world_size + noise, "gathered parameters outlive backward"


class ByKeyword(parts.Stack):
    def forward(self, x):
        for layer in self.layers:
            x = layer(input=x)
        return x


def frozen_units_in_backward(kind: str) -> None:
    """ZeRO-3: a frozen unit has no gradient that tells when to free it, and is freed in time all the same."""
    layers, width = 12, 64
    layer = 4 * (width * width + width)

    def build():
        model = {"Stack": parts.Stack, "ByKeyword": ByKeyword}[kind](layers, width)
        for frozen in model.layers[1:]:
            frozen.requires_grad_(False)
        return model

    engine = parts.ZeRO3(parts.seeded(build, dtype=torch.float32), ADAMW, group=parts.silent_group())
    x, y = parts.vector_batch(0, dist.get_rank(), width)
    with MemoryLedger() as memory:
        loss = F.mse_loss(engine(x), y)
        before = memory.live
        memory.reset_peak()
        loss.backward()
    most = memory.peak - before
    assert most <= 4 * layer, f"{most / layer:.2f} units gathered in backward"


def evaluation_frees_at_once() -> None:
    """`reshard_after_forward=False` keeps units for backward; where none will come, it keeps none."""
    layers, width = 12, 64
    layer = 4 * (width * width + width)
    engine = parts.ZeRO3(
        parts.seeded(lambda: parts.Stack(layers, width), dtype=torch.float32),
        ADAMW,
        group=parts.silent_group(),
        reshard_after_forward=False,
    )
    x, _ = parts.vector_batch(0, dist.get_rank(), width)
    with MemoryLedger() as memory, torch.no_grad():
        engine(x)
    assert memory.peak <= 2 * layer + 16 * 4 * width, f"{memory.peak / layer:.2f} units gathered in an evaluation"


def units_under_no_sync() -> None:
    """ZeRO-3 under `no_sync()`: gradients stay whole, as documented, parameters are freed."""
    layers, width = 12, 64
    layer = 4 * (width * width + width)
    engine = parts.ZeRO3(
        parts.seeded(lambda: parts.Stack(layers, width), dtype=torch.float32), ADAMW, group=parts.silent_group()
    )
    x, y = parts.vector_batch(0, dist.get_rank(), width)
    with MemoryLedger() as memory, engine.no_sync():
        loss = F.mse_loss(engine(x), y)
        before = memory.live
        memory.reset_peak()
        loss.backward()
    most = memory.peak - before - layers * layer
    assert most <= 2.5 * layer, f"{most / layer:.2f} units gathered besides the gradients"


def units_in_another_order() -> None:
    """ZeRO-3 gathers ahead by the last forward's order. Where the next takes another, few are gathered."""
    layers, width = 12, 64
    layer = 4 * (width * width + width)
    model = parts.seeded(lambda: parts.Stack(layers, width), dtype=torch.float32)
    engine = parts.ZeRO3(model, ADAMW, group=parts.silent_group())
    batch = parts.vector_batch(0, dist.get_rank(), width)
    engine.training_step(*batch, F.mse_loss)
    model.reverse = True
    with MemoryLedger() as memory:
        engine(batch[0])
    assert memory.peak <= 3.5 * layer, f"{memory.peak / layer:.2f} units gathered in forward"
