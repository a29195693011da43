"""What every engine says of its memory and its traffic, ours and others: to the order, where `held` has the bytes."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from harness.measure.ledger import held_bytes, optimizer_of
from harness.measure.traffic import TrafficLedger
from harness.properties import parts
from harness.properties.property import NotApplicable, Subject, expect, holds
from harness.run import engines


def promised(engine: Subject):
    """(what its ranks share out between steps, how often Ψ (N-1)/N elements leave a rank in a step)."""
    entry = engines.ENGINES.get(engine.like or engine.name)
    if entry is None or entry.promise is None:
        raise NotApplicable(f"{engine.name} says nothing of its memory and traffic: COUNTERPART would")
    return entry.promise


def built(engine: Subject):
    """(the engine, the bytes of its parameters, a function that takes a step)."""
    trained = engine(parts.seeded(lambda: parts.Stack(4, 32), dtype=torch.float32), parts.ADAMW)
    whole = sum(param.nbytes for param in parts.Stack(4, 32).parameters())
    return trained, whole, lambda n: trained.training_step(*parts.vector_batch(n, dist.get_rank(), 32), F.mse_loss)


@holds("bytes", sizes=(4,))
def what_is_shared_out_is_no_more_than_twice_there(engine):
    """Of what the ranks share out, all four together have two copies at most before the update, and not four."""
    kinds, _ = promised(engine)
    trained, whole, step = built(engine)
    inner, held = getattr(trained, "_engine", trained) if engine.foreign else trained, {}
    optimizer_of(inner).register_step_pre_hook(lambda *_: held.update(held_bytes(inner)))
    for number in range(2):
        step(number)
    for kind in kinds:
        copy = whole * (1 + (kind == "optimizer"))  # AdamW has two moments
        total = torch.tensor(float(held[kind]))
        dist.all_reduce(total)
        most = 2.1 * copy
        if kind == "gradients":  # an engine may document a buffer that gradients go through, of a size of its own
            most += dist.get_world_size() * getattr(inner, "bucket_bytes", 0)
        expect(total <= most, f"bytes of {kind} on all ranks", f"{most:.0f} at most", total.item(), step=4)


@holds("traffic", further_sizes=(4,))
def a_step_sends_no_more_than_is_promised(engine):
    """A step sends the 2Ψ or 3Ψ (N-1)/N elements that the engine's documentation says, and 1 % for notes."""
    _, times = promised(engine)
    _, whole, step = built(engine)
    step(0)
    step(1)
    with TrafficLedger() as traffic:
        step(2)
    most = 1.01 * times * whole * (1 - 1 / dist.get_world_size())
    expect(traffic.sent_bytes <= most, "bytes that a rank sends in a step", f"{most:.0f} at most", traffic.sent_bytes)
