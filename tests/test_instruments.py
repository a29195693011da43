"""The ledgers, on cases whose answer is known by hand."""

import parts
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from harness.instruments.memory import MemoryLedger, held_bytes, storage_bytes
from harness.instruments.traffic import TrafficLedger, sent_bytes


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
    """The articles' way to free a weight, and the storage's: the reason for zero3.py's longest comment."""
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
    assert sent_bytes(kind, 1000, 4) == expected
    assert sent_bytes(kind, 1000, 1) == 0


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
