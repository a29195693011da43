"""Run on every rank: the collectives that the engines issue, against arithmetic done here."""

import parts
import torch
import torch.distributed as dist
from cases_layout import padded
from torch.nn import functional as F

from harness.measure.traffic import TrafficLedger

ADAMW = parts.OPTIMIZERS["adamw"]


def sequence_of_collectives(stage: str, engine_name: str | None = None) -> None:
    """Kind, bytes, order and step of every collective of a training step, and what they send in all."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layers, width = 4, 12
    model = parts.seeded(lambda: parts.Stack(layers, width), dtype=torch.float32)
    sizes = [width * width, width]
    whole = 4 * padded(sizes, world_size)[0]
    options = {} if stage == "zero3" else {"bucket_mb": 4 * sum(sizes) / 2**20}
    engine = parts.engine_class(engine_name or stage)(model, ADAMW, **options)
    for step in range(2):
        engine.training_step(*parts.vector_batch(step, rank, width), F.mse_loss)
    batch = parts.vector_batch(2, rank, width)
    with TrafficLedger() as traffic:
        engine.training_step(*batch, F.mse_loss)
    gather, reduce = ("all-gather", "step 5 gather parameters"), ("reduce-scatter", "step 3 reduce gradients")
    expected = {
        "zero1": [("all-reduce", "step 3 reduce gradients")] * layers + [gather] * layers,
        "zero2": [reduce] * layers + [gather] * layers,
        # Forward gathers every unit; so does backward, each before the reduction of the unit behind it. A rank that
        # is alone gathers nothing ahead.
        "zero3": [gather] * layers + [gather] + [gather, reduce] * (layers - 1) + [reduce]
        if world_size > 1
        else [gather] * layers + [gather, reduce] * layers,
    }[stage]
    found = [(collective.kind, collective.step) for collective in traffic.collectives]
    assert found == expected, f"found {found}, expected {expected}"
    assert {collective.whole_bytes for collective in traffic.collectives} == {whole}
    factor = (world_size - 1) / world_size
    times = {"zero1": 3 * layers, "zero2": 2 * layers, "zero3": 3 * layers}[stage]
    assert traffic.sent_bytes == round(times * whole * factor), (traffic.sent_bytes, times * whole * factor)


def order_of_reductions(reverse: bool) -> None:
    """ZeRO-2's buckets are reduced last parameters first, in whatever order autograd finishes, and rightly."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected_losses, state = parts.oracle(
        parts.seeded(lambda: parts.Stack(5, 8, reverse)),
        ADAMW,
        F.mse_loss,
        lambda s, r: parts.vector_batch(s, r, 8, torch.float64),
        10,
        world_size,
    )
    engine = parts.ZeRO2(parts.seeded(lambda: parts.Stack(5, 8, reverse)), ADAMW, bucket_mb=0)
    for step in range(10):
        with TrafficLedger() as traffic:
            engine.training_step(*parts.vector_batch(step, rank, 8, torch.float64), F.mse_loss)
        sizes = [c.whole_bytes for c in traffic.collectives if c.kind == "reduce-scatter"]
        bias, weight = 8 * padded([8], world_size, 2)[0], 8 * padded([64], world_size, 2)[0]
        assert sizes == [bias, weight] * 5, sizes
    parts.assert_same_state(engine.full_state_dict(), state, atol=1e-12)
