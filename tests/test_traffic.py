"""The traffic ledger counts every operation of torch.distributed, by hand on real ranks."""

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from zerolab.measure.traffic import TrafficLedger
from zerolab.run.pool import run_on_ranks

ELEMENTS = 6  # of each part, in float32
PART = 4 * ELEMENTS


def ring_all_gather() -> tuple[dict, int]:
    """An all-gather as notebook 2 teaches it: every rank passes on to its neighbour what it has got last."""
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = [torch.full((ELEMENTS,), float(index)) for index in range(n)]
    with TrafficLedger() as traffic:
        for step in range(n - 1):
            sending = dist.isend(parts[(rank - step) % n], (rank + 1) % n)
            receiving = dist.irecv(torch.empty(ELEMENTS), (rank - 1) % n)
            sending.wait()
            receiving.wait()
    return dict(traffic.count), traffic.sent_bytes


def test_a_ring_of_sends_is_counted():
    assert run_on_ranks(3, ring_all_gather) == [({"send": 2, "receive": 2}, 2 * PART)] * 3


def every_kind() -> dict[str, float]:
    """{what was called: the bytes that this rank sent}"""
    rank, n = dist.get_rank(), dist.get_world_size()
    part, whole = torch.ones(ELEMENTS), torch.ones(n * ELEMENTS)
    parts = list(whole.chunk(n))
    ring = [dist.P2POp(dist.isend, part, (rank + 1) % n), dist.P2POp(dist.irecv, part.clone(), (rank - 1) % n)]

    def batch_isend_irecv():
        for work in dist.batch_isend_irecv(ring):
            work.wait()

    def in_two_buffers():
        with dist._coalescing_manager():
            dist.all_reduce(part)
            dist.all_reduce(whole)

    def reduce_to_0():
        dist.reduce(whole, 0)

    def gather_to_1():
        dist.gather(part, parts if rank == 1 else None, dst=1)

    def scatter_from_1():
        dist.scatter(part, parts if rank == 1 else None, src=1)

    def all_to_all_single():
        dist.all_to_all_single(torch.empty_like(whole), whole)

    def functional_all_to_all():
        functional.all_to_all_single(whole, None, None, dist.group.WORLD).sum()

    calls = {
        "reduce": reduce_to_0,
        "gather to 1": gather_to_1,
        "scatter from 1": scatter_from_1,
        "all_to_all_single": all_to_all_single,
        "batch_isend_irecv": batch_isend_irecv,
        "coalesced": in_two_buffers,
        "functional": functional_all_to_all,
        "barrier": dist.barrier,
    }
    sent = {}
    for name, call in calls.items():
        with TrafficLedger() as traffic:
            call()
        sent[name] = traffic.sent_bytes
    return sent


def test_every_kind_is_counted():
    n = 3
    whole, others = n * PART, (n - 1) * PART  # of a buffer of n parts all but one
    for rank, sent in enumerate(run_on_ranks(n, every_kind)):
        assert sent == {
            "reduce": others,
            "gather to 1": 0 if rank == 1 else PART,
            "scatter from 1": others if rank == 1 else 0,
            "all_to_all_single": others,
            "batch_isend_irecv": PART,
            "coalesced": 2 * (PART + whole) * (n - 1) / n,
            "functional": others,
            "barrier": 0,
        }
