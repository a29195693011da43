"""The traffic ledger counts every operation of torch.distributed, by hand on real ranks."""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from zero1 import all_gather
from zero2 import reduce_scatter
from zerolab.measure.traffic import TrafficLedger
from zerolab.run.pool import run_on_ranks

ELEMENTS = 6  # of each part, in float32
PART = 4 * ELEMENTS


def every_kind() -> tuple[dict[str, tuple], list[str]]:
    """({what was called: (the kinds that were counted, the bytes that this rank sent)}, the steps of two gathers)"""
    rank, n = dist.get_rank(), dist.get_world_size()
    part, whole = torch.ones(ELEMENTS), torch.ones(n * ELEMENTS)
    parts = list(whole.chunk(n))
    ring = [dist.P2POp(dist.isend, part, (rank + 1) % n), dist.P2POp(dist.irecv, part.clone(), (rank - 1) % n)]

    found = {}

    @contextlib.contextmanager
    def counted(name):
        with TrafficLedger() as traffic:
            yield
        found[name] = sorted(traffic.count), traffic.sent_bytes

    with counted("all-reduce"):
        dist.all_reduce(whole)
    with counted("all-gather"):
        all_gather(whole, part)
    with counted("a list"):
        dist.all_gather(parts, part)
    with counted("reduce-scatter"):
        reduce_scatter(part, whole)
    with counted("broadcast"):
        dist.broadcast(whole, 0)
    with counted("reduce"):
        dist.reduce(whole, 0)
    with counted("gather to 1"):
        dist.gather(part, parts if rank == 1 else None, dst=1)
    with counted("scatter from 1"):
        dist.scatter(part, parts if rank == 1 else None, src=1)
    with counted("all-to-all"):
        dist.all_to_all_single(torch.empty_like(whole), whole)
    with counted("functional"):
        functional.all_to_all_single(whole, None, None, dist.group.WORLD).sum()
    with counted("one by one"):
        sending = dist.isend(part, (rank + 1) % n)
        dist.irecv(part.clone(), (rank - 1) % n).wait()
        sending.wait()
    with counted("a batch"):
        for work in dist.batch_isend_irecv(ring):
            work.wait()
    with counted("coalesced"), dist._coalescing_manager():
        dist.all_reduce(part)
        dist.all_reduce(whole)
    with counted("barrier"):
        dist.barrier()
    label = torch.profiler.record_function
    with TrafficLedger() as traffic:
        all_gather(whole, part)
        with label("step 5 gather parameters"), label("something inside"):
            all_gather(whole, part)
    return found, [collective.step for collective in traffic.collectives]


def test_every_kind_is_counted_in_its_step():
    n = 3
    whole, others = n * PART, (n - 1) * PART  # of a buffer of n parts all but one
    for rank, (found, steps) in enumerate(run_on_ranks(n, every_kind)):
        assert steps == ["", "5 gather parameters"]
        assert found == {
            "all-reduce": (["all-reduce"], 2 * others),
            "all-gather": (["all-gather"], others),
            "a list": (["all-gather"], others),
            "reduce-scatter": (["reduce-scatter"], others),
            "broadcast": (["broadcast"], others),
            "reduce": (["reduce"], others),
            "gather to 1": (["gather"], 0 if rank == 1 else PART),
            "scatter from 1": (["scatter"], others if rank == 1 else 0),
            "all-to-all": (["all-to-all"], others),
            "functional": (["all-to-all"], others),
            "one by one": (["receive", "send"], PART),
            "a batch": (["receive", "send"], PART),
            "coalesced": (["all-reduce"], 2 * (PART + whole) * (n - 1) / n),
            "barrier": ([], 0),
        }
