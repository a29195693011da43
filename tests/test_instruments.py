"""The ledgers, on cases whose answer is known by hand."""

from dataclasses import replace

import cases_instruments as cases
import parts
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from harness.measure.memory import MemoryLedger, held_bytes, storage_bytes
from harness.measure.parts import PartsLedger
from harness.measure.timeline import Span, Timeline, chrome_trace
from harness.measure.traffic import TrafficLedger, sent_bytes


def test_a_storage_counts_once_and_whole():
    with MemoryLedger() as memory:
        a = torch.zeros(1000)
        views = [a[:10], a.view(10, 100).t(), a.detach()]
        assert memory.live == 4000
        b = a + 1
        assert memory.live == memory.peak == 8000
        del a
        assert memory.live == 8000  # the views keep the whole storage
        del views
        assert memory.live == 4000 and memory.peak == 8000
        memory.reset_peak()
        assert memory.peak == 4000
        del b
        assert memory.live == 0


def test_a_resized_storage_counts_with_its_new_size():
    plain = torch.UntypedStorage.resize_
    with MemoryLedger() as memory:
        a = torch.zeros(1000)
        a.untyped_storage().resize_(0)
        assert memory.live == 0
        a.untyped_storage().resize_(6000)
        assert memory.live == memory.peak == 6000
    assert torch.UntypedStorage.resize_ is plain


def test_what_autograd_saved_is_alive():
    weight = torch.zeros(50, 50, requires_grad=True)
    with MemoryLedger() as memory:
        x = torch.ones(20, 50)
        y = (x @ weight).exp()  # saves x for the weight's gradient, and its own result
        del x
        assert memory.live == 4 * (20 * 50 + 20 * 50)
        y.sum().backward()
        del y
        assert memory.live == 4 * 50 * 50  # the gradient
    assert storage_bytes([weight, weight.grad, weight.t(), weight[0]]) == 2 * 4 * 50 * 50


def test_freeing_by_assignment_leaks_and_the_ledger_sees_it():
    """One article's way to free a weight, and the storage's: the reason for zero3.py's longest comment."""
    for resize in (False, True):
        weight = torch.nn.Parameter(torch.empty(0))
        with MemoryLedger() as memory:
            x = torch.ones(1, 100, requires_grad=True)
            whole = torch.zeros(100, 100)
            weight.data = whole
            y = F.linear(x, weight)  # saves weight.t()
            before = memory.live
            if resize:
                whole.untyped_storage().resize_(0)
            else:
                weight.data = torch.empty(0)
            del whole
            assert before - memory.live == (4 * 100 * 100 if resize else 0)
            del y


def test_held_bytes_of_plain_adamw():
    model = torch.nn.Linear(10, 10)
    engine = type("Engine", (), {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    assert held_bytes(engine) == {"parameters": 440, "gradients": 0, "optimizer": 0}
    model(torch.ones(1, 10)).sum().backward()
    engine.optimizer.step()
    assert held_bytes(engine) == {"parameters": 440, "gradients": 440, "optimizer": 880 + 2 * 4}


@pytest.mark.parametrize(
    "kind, expected", (("all-reduce", 1500), ("all-gather", 750), ("reduce-scatter", 750), ("broadcast", 750))
)
def test_sent_bytes_by_hand(kind, expected):
    assert sent_bytes(kind, 1000, 4) == expected and sent_bytes(kind, 1000, 1) == 0


def count_by_hand() -> list:
    n = dist.get_world_size()
    whole, shard = torch.zeros(6 * n), torch.zeros(6)
    with TrafficLedger() as traffic:
        dist.all_reduce(whole)
        label = torch.profiler.record_function
        with label("step 5 gather parameters"), label("something inside"):
            dist.all_gather_single(whole, shard)
        dist.reduce_scatter_single(shard, whole)
        dist.broadcast(whole, 0)
        dist.all_gather(list(whole.chunk(n)), shard)
        dist.barrier()
        whole.add_(1)
    parts.seeded(parts.OddModel)  # nothing is counted outside
    return [(c.kind, c.whole_bytes, c.sent_bytes, c.step) for c in traffic.collectives] + [traffic.sent_bytes]


@pytest.mark.parametrize("world_size", (1, 3))
def test_the_traffic_ledger_counts_what_was_issued(ranks, world_size):
    whole = 4 * 6 * world_size
    part = whole * (world_size - 1) / world_size
    for found in ranks(world_size).run(count_by_hand):
        assert found == [
            ("all-reduce", whole, 2 * part, ""),
            ("all-gather", whole, part, "step 5 gather parameters"),
            ("reduce-scatter", whole, part, ""),
            ("broadcast", whole, part, ""),
            ("all-gather", whole, part, ""),
            round(6 * part),
        ]


class Unsharded:
    """Plain PyTorch as an engine: a model, and an optimizer over it."""

    def __init__(self, model):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def training_step(self, inputs, targets, loss_fn):
        with record_function("step 1 forward"):
            loss = loss_fn(self.model(inputs), targets)
        with record_function("step 2 backward"):
            loss.backward()
        with record_function("step 4 update the shard"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


WEIGHT = 4 * 100 * 100  # bytes of one of the two layers below


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(100, 100, bias=False), nn.ReLU(), nn.Linear(100, 100, bias=False))


def squares(outputs, targets):
    return (outputs - targets).pow(2).sum()


def test_the_parts_of_an_unsharded_engine():
    engine = Unsharded(two_layers())
    x, y = torch.ones(10, 100), torch.ones(10, 100)
    engine.training_step(x, y, squares)
    with PartsLedger(engine) as memory:
        engine.training_step(x, y, squares)
    moments = list(memory.moments())
    assert all(sum(moment.parts.values()) == moment.live for moment in moments)
    assert {moment.parts["parameters"] for moment in moments[2:]} == {2 * WEIGHT}
    assert moments[-1].parts["optimizer"] == 4 * WEIGHT + 8  # two moments a weight, and a counter of four bytes
    assert moments[-1].parts["gathered units"] == moments[-1].parts["gradients in flight"] == 0
    # Forward keeps what ReLU and the second layer share, and the difference that `pow` saves: 4,000 bytes each.
    forward = [moment for moment in moments if moment.step == "1 forward"][-1]
    assert 8_000 <= forward.parts["activations"] <= 8_000 + 8 and forward.parts["gradients"] == 0
    update = [moment for moment in moments if moment.step == "4 update the shard"]
    assert {moment.parts["gradients"] for moment in update} == {2 * WEIGHT}
    peak = memory.peak_moment()
    assert peak.live == memory.peak and peak.phase == "4 update the shard", peak
    assert sum(peak.made.values()) == peak.parts["temporaries"] > 0


class Recomputed(nn.Module):
    """(2x)² of a linear layer's output x, run again in backward: only the 2x that `pow` needs is an activation."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(100, 100, bias=False)

    def forward(self, x):
        return checkpoint(lambda x: (x * 2 + 1).mul(2).pow(2), self.layer(x), use_reentrant=False)


def test_what_is_run_again_is_an_activation_if_backward_needs_it():
    engine, x, y = Unsharded(Recomputed()), torch.ones(10, 100), torch.ones(10, 100)
    with PartsLedger(engine) as memory:
        engine.training_step(x, y, squares)
    before = [moment for moment in memory.moments() if moment.step == "1 forward"][-1].parts["activations"]
    backward = [moment.parts["activations"] for moment in memory.moments() if moment.step == "2 backward"]
    # The layer's output and the loss's difference, and the loss; then, without the difference, what `pow` saves in the
    # second forward. The sum and the first product are gone when its backward goes on.
    assert before == 8_000 + 4 and max(backward) == 8_000 + 4 + 4, (before, backward)
    second = [moment.parts["activations"] for moment in memory.moments() if moment.module == "Recomputed"]
    assert second[-1] <= 4_000 + 8 and 8_000 <= max(second) <= 8_000 + 8, second


def test_an_engine_opened_late_is_counted_as_one_opened_early(ranks):
    ranks(2).run(cases.ledgers_agree_on_an_open_engine)


@pytest.mark.parametrize("stage", parts.STAGES)
def test_the_timeline_has_all_six_steps_and_every_collective(ranks, stage):
    for found in ranks(2).run(cases.timeline_of_a_step, stage=stage):
        assert found == ["0 partition", "1 forward", "2 backward", "3 reduce gradients", "4 update the shard",
                         "5 gather parameters"]  # fmt: skip


def test_a_unit_that_is_never_freed_is_seen(ranks):
    ranks(2).run(cases.a_unit_that_stays_gathered)


def test_a_collective_ends_when_it_is_complete(ranks):
    ranks(2).run(cases.a_collectives_span)


def test_a_collective_of_gloo_on_the_second_gpu(ranks):
    ranks(2).run(cases.gloo_on_the_second_gpu)


def test_a_collective_without_a_work_is_a_wait(ranks):
    ranks(2).run(cases.a_collective_without_a_work)


def test_a_trace_has_memory_and_spans_on_one_clock(ranks, tmp_path):
    ranks(2).run(cases.memory_and_spans_on_one_clock, folder=str(tmp_path))


def test_a_gpu_that_waits_for_a_slow_host_does_not_compute():
    assert cases.computing_with(dispatch=1.0, kernel=0.25) == (4, 4 * 0.25, 1.0)
    operations, seconds, first = cases.computing_with(dispatch=0.125, kernel=1.0)  # the host is far ahead
    assert (operations, seconds, first) == (4, 4.0, 0.125)


def test_the_timeline_of_an_unsharded_engine():
    engine = Unsharded(two_layers())
    plain = dist.Work.wait
    with Timeline(engine) as timeline:
        engine.training_step(torch.ones(10, 100), torch.ones(10, 100), squares)
    assert dist.Work.wait is plain
    steps = [span for span in timeline.spans if span.lane == "steps"]
    assert [span.name for span in steps] == ["1 forward", "2 backward", "4 update the shard"]
    assert all(a.end <= b.start for a, b in zip(steps, steps[1:]))
    compute = [(span.step[:1], span.name) for span in timeline.spans if span.lane == "compute" and span.step]
    assert compute == [
        *(("1", name) for name in ("0", "1", "2", "root")),
        *(("2", name) for name in ("root", "2", "1", "0")),
        ("4", "optimizer"),
    ]
    for span in timeline.spans:
        inside = [step for step in steps if step.name == span.step]
        assert span.start <= span.end and all(step.start <= span.start <= span.end <= step.end for step in inside)
    assert not any(span.lane == "collectives" for span in timeline.spans)


def test_the_trace_is_what_chrome_reads():
    spans = [
        Span("steps", "1 forward", 0.0, 0.5),
        Span("compute", "blocks.0", 0.1, 0.2, "1 forward"),
        Span("collectives", "all-gather", 0.05, 0.15, "5 gather parameters", 4000),
        Span("collectives", "all-gather", 0.12, 0.2, "5 gather parameters", 4000),  # while the other is under way
        Span("collectives", "all-gather", 0.2, 0.3, "5 gather parameters", 4000),
    ]
    trace = chrome_trace([spans, spans[:1]], [[(0.1, {"gradients": 2_000_000})], []], title="a title")
    events = trace["traceEvents"]
    named = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    lanes = ("steps", "compute", "all-gather", "all-gather 2")
    assert named == {(0, "rank 0"), (1, "rank 1"), (1, "steps"), *((0, lane) for lane in lanes)}
    complete = [(e["pid"], e["name"], e["dur"]) for e in events if e["ph"] == "X"]
    assert complete[0] == (0, "step 1 forward", 500_000.0) and complete[5] == (1, "step 1 forward", 500_000.0)
    gathers = [e["tid"] for e in events if e["ph"] == "X" and e["name"] == "all-gather"]
    assert gathers[0] == gathers[2] != gathers[1]
    gather = next(e for e in events if e["name"] == "all-gather")
    assert (gather["ts"], gather["dur"]) == (50_000.0, 100_000.0)  # microseconds
    assert gather["args"] == {"step": "5 gather parameters", "bytes": 4000}
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"MB": 2.0}, {"gradients": 2.0}]
    assert trace["otherData"] == {"title": "a title"}
    alive = {"parameters": 1_000_000, "gradients": 500_000}
    events = chrome_trace([[replace(spans[2], unit="blocks.3")]], [[(0.1, alive)]])["traceEvents"]
    counters = {e["name"]: e["args"] for e in events if e["ph"] == "C"}
    assert list(counters.values()) == [{"MB": 1.5}, {"parameters": 1.0, "gradients": 0.5}]
    assert next(e["args"]["unit"] for e in events if e["ph"] == "X") == "blocks.3"
