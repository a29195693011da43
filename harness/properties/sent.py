"""What each stage sends: kind, bytes, order and step of its collectives, against arithmetic done here."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from harness.measure.traffic import TrafficLedger
from harness.properties import parts
from harness.properties.layout import padded
from harness.properties.property import holds, same

ADAMW = parts.OPTIMIZERS["adamw"]


@holds("traffic", sizes=(1, 2, 3))
def collectives_are_those_of_the_stage(engine):
    """Kind, bytes, order and step of every collective of a training step, and what they send in all."""
    engine.needs("zero1", "zero2", "zero3")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layers, width = 4, 12
    model = parts.seeded(lambda: parts.Stack(layers, width), dtype=torch.float32)
    sizes = [width * width, width]
    whole = 4 * padded(sizes, world_size)[0]
    options = {} if engine.like == "zero3" else {"bucket_mb": 4 * sum(sizes) / 2**20}
    trained = engine(model, ADAMW, **options)
    for step in range(2):
        trained.training_step(*parts.vector_batch(step, rank, width), F.mse_loss)
    batch = parts.vector_batch(2, rank, width)
    with TrafficLedger() as traffic:
        trained.training_step(*batch, F.mse_loss)
    gather, reduce = ("all-gather", "step 5 gather parameters"), ("reduce-scatter", "step 3 reduce gradients")
    expected = {
        "zero1": [("all-reduce", "step 3 reduce gradients")] * layers + [gather] * layers,
        "zero2": [reduce] * layers + [gather] * layers,
        # Forward gathers every unit; so does backward, each before the reduction of the unit behind it. A rank that
        # is alone gathers nothing ahead.
        "zero3": [gather] * layers + [gather] + [gather, reduce] * (layers - 1) + [reduce]
        if world_size > 1
        else [gather] * layers + [gather, reduce] * layers,
    }[engine.like]
    found = [(collective.kind, collective.step) for collective in traffic.collectives]
    same("the collectives of a step, and where they are issued", found, expected, step=3)
    same("bytes of the buffers", {collective.whole_bytes for collective in traffic.collectives}, {whole}, step=3)
    times = {"zero1": 3, "zero2": 2, "zero3": 3}[engine.like]
    sent = round(times * layers * whole * (world_size - 1) / world_size)
    same(f"bytes sent in a step, {times}Ψ (N-1)/N elements", traffic.sent_bytes, sent, step=3)


class Lanes(nn.Module):
    """Layers of different sizes, so that a collective's bytes name the layer, run in the order of `way`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, out) for out in (8, 16, 24, 32))
        self.way = [0, 1, 2, 3]

    def forward(self, x):
        *first, last = self.way
        for index in first:
            x = x + self.layers[index](x).sum(-1, keepdim=True)
        return self.layers[last](x)


@holds("order", engines=("zero2",), sizes=(2, 3), cases=({"reverse": False}, {"reverse": True}))
def buckets_are_reduced_in_one_order(engine, reverse):
    """ZeRO-2's buckets are reduced last parameters first, in whatever order autograd finishes, and rightly."""
    engine.needs("zero2")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def build():
        model = parts.seeded(Lanes)
        model.way = [3, 2, 1, 0] if reverse else model.way
        return model

    def batch_of(step, who):
        return parts.vector_batch(step, who, 8, torch.float64)

    def loss_fn(outputs, _):
        return outputs.square().mean()

    _, state = parts.oracle(build(), ADAMW, loss_fn, batch_of, 10, world_size)
    trained = engine(build(), ADAMW, bucket_mb=0)
    layers = [(8 * padded([numel], world_size, 2)[0]) for out in (32, 24, 16, 8) for numel in (out, 8 * out)]
    for step in range(10):
        with TrafficLedger() as traffic:
            trained.training_step(*batch_of(step, rank), loss_fn)
        sizes = [c.whole_bytes for c in traffic.collectives if c.kind == "reduce-scatter"]
        same("bytes of the reduce-scatters, each once, in the order of self.trained_buckets", sizes, layers, step=3)
    same("the weights", trained.full_state_dict(), state, atol=1e-12, step=5)
