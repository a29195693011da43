"""The instruments on real ranks."""

import time
from functools import partial

import parts
import torch
import torch.distributed as dist
from torch.nn import functional as F

from harness.measure.memory import MemoryLedger, engine_tensors, storage_bytes
from harness.measure.parts import PartsLedger
from harness.measure.timeline import Timeline
from harness.measure.traffic import TrafficLedger

ADAMW = partial(torch.optim.AdamW, lr=1e-3, foreach=False)


def stack() -> parts.Stack:
    return parts.seeded(lambda: parts.Stack(6, 32), dtype=torch.float32)


def ledgers_agree_on_an_open_engine() -> None:
    """A ledger that was there from the start, and one that is opened on the finished engine, count the same bytes."""
    batch = parts.vector_batch(0, dist.get_rank(), 32)
    for stage in parts.STAGES.values():
        with MemoryLedger() as early:
            engine = stage(stack(), ADAMW, group=parts.silent_group())
            engine.training_step(*batch, F.mse_loss)
        with MemoryLedger(engine) as late:
            assert late.live == storage_bytes(engine_tensors(engine)) == early.live
            engine.training_step(*batch, F.mse_loss)
            assert late.live == early.live


def timeline_of_a_step(stage: str) -> list[str]:
    """Returns the names of the steps seen in construction and one step; checks the spans against the traffic ledger."""
    with Timeline() as construction:
        engine = parts.STAGES[stage](stack(), ADAMW)
    batch = parts.vector_batch(0, dist.get_rank(), 32)
    with TrafficLedger() as traffic, Timeline(engine) as timeline:
        engine.training_step(*batch, F.mse_loss)
    collectives = [span for span in timeline.spans if span.lane == "collectives"]
    expected = [(c.kind, c.whole_bytes, c.step.removeprefix("step ")) for c in traffic.collectives]
    assert [(span.name, span.nbytes, span.step) for span in collectives] == expected and expected
    units = {span.name for span in timeline.spans if span.lane == "compute"}
    assert {f"layers.{index}" for index in range(6)} <= units and "optimizer" in units, units
    last = max(span.end for span in timeline.spans)
    assert all(0 <= span.start <= span.end <= last for span in timeline.spans)
    assert all(span.end > span.start for span in collectives)
    steps = [span.name for span in construction.spans + timeline.spans if span.lane == "steps"]
    return sorted(set(steps))


def a_unit_that_stays_gathered() -> None:
    """An engine that frees nothing holds, right after its forward, all that it has gathered."""
    alive = {}
    for leaks in (False, True):
        engine = parts.ZeRO3(stack(), ADAMW, group=parts.silent_group())
        x, y = parts.vector_batch(0, dist.get_rank(), 32)
        engine.training_step(x, y, F.mse_loss)
        if leaks:
            engine._free = lambda unit: None
        with PartsLedger(engine) as memory:
            outputs = engine(x)
        alive[leaks] = list(memory.moments())[-1].parts["gathered units"]
        del outputs
        gathered = sum(bucket.numel * 4 for bucket in engine.buckets)
    assert alive == {False: 0, True: gathered}, (alive, gathered)


class Naive:
    """One article's way: a gathered weight is let go by pointing `.data` at the shard."""

    def __init__(self, model):
        self.model = model
        self.shards = {layer: layer.weight.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()
                       for layer in model.layers}  # fmt: skip
        self.optimizer = torch.optim.SGD(self.shards.values(), lr=0.1)
        for layer in model.layers:
            layer.weight.data = self.shards[layer]
            layer.register_forward_pre_hook(self.gather)
            layer.register_forward_hook(self.let_go)

    def gather(self, layer, inputs):
        whole = torch.empty(32, 32)
        dist.all_gather_single(whole, self.shards[layer])
        layer.weight.data = whole

    def let_go(self, layer, inputs, outputs):
        layer.weight.data = self.shards[layer]


def gathered_by_a_naive_engine() -> None:
    """All but the first layer's weights, which no backward needs, are alive after forward."""
    engine = Naive(stack())
    x, _ = parts.vector_batch(0, dist.get_rank(), 32)
    with PartsLedger(engine) as memory:
        outputs = engine.model(x)
    last = list(memory.moments())[-1]
    assert last.parts["gathered units"] == 5 * 4 * 32 * 32, last.parts
    del outputs


def a_collectives_span() -> None:
    """From its issue to its completion, if nobody waits; to the end of the wait, where the backend tells nothing."""
    whole, shard = torch.zeros(64), torch.ones(32)
    with Timeline() as timeline:
        issued = time.perf_counter()
        work = dist.all_gather_single(whole, shard, async_op=True)
        (_, entry), patience = timeline._under_way[id(work)], time.perf_counter() + 30
        while entry[3] is None and time.perf_counter() < patience:
            time.sleep(0.001)
        told = time.perf_counter()
        work.wait()
        work = dist.reduce_scatter_single(shard, whole, async_op=True)
        time.sleep(0.01)
        waited = time.perf_counter()
        work.wait()
        done = time.perf_counter()
        time.sleep(0.01)
    gather, reduce = (span for span in timeline.spans if span.lane == "collectives")
    assert (gather.name, gather.nbytes) == ("all-gather", 256)
    assert (reduce.name, reduce.nbytes) == ("reduce-scatter", 256)
    assert issued <= gather.start + timeline.opened <= gather.end + timeline.opened <= told < patience
    if dist.get_backend() == "gloo":  # its reduce-scatter ends inside the wait
        assert waited <= reduce.end + timeline.opened <= done
