"""Tests of the task whole_matrices: every parameter belongs entirely to one rank."""

import functools
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

from zero1 import ZeRO1
from zerolab.measure.ledger import MemoryLedger
from zerolab.measure.timeline import Timeline
from zerolab.teach.check import models
from zerolab.teach.check.helpers import (
    ADAMW,
    SLACK,
    Differs,
    all_ranks,
    alone,
    backward,
    build,
    expect,
    expect_at_most,
    expect_values,
    on_ranks,
    shards,
    silent,
    train_one_step,
)

MUON = functools.partial(torch.optim.Muon, lr=0.1)
ONE_BUCKET = 2**20
BUCKETS = {"one bucket": ONE_BUCKET, "several buckets": 4_000, "a bucket for each parameter": 0}
# Each large matrix is followed by five small ones, so owners that take turns do not own equally much. All sizes are
# even: two elements in float64 are the 16 bytes to which the chapter aligns.
SHAPES = [(12, 8), (4, 6), (6, 4), (3, 8), (8, 3), (2, 12)] * 6


class Matrices(nn.Module):
    """A model whose batch contains its gradients: whole numbers that N can divide, up to 8. So their mean is exact.

    Muon rounds gradients to bfloat16. A difference in the last bit of a gradient could make a large one there.
    """

    def __init__(self, shapes=SHAPES):
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, gradients):
        return sum((matrix * gradient).sum() for matrix, gradient in zip(self.matrices, gradients))

    def batch(self, step, rank):
        generator = torch.Generator().manual_seed(1_000 * step + rank)
        whole = [torch.randint(-9, 10, each.shape, generator=generator) for each in self.matrices]
        return [840 * each.double() for each in whole], None

    def loss(self, outputs, targets):
        return outputs


OneMatrix = functools.partial(Matrices, [(3, 5)])  # all ranks but one own nothing


def elements_owned(engine) -> list[int]:
    """How many elements each rank's optimizer updates. Each parameter must be whole on exactly one rank."""
    params = dict(engine.model.named_parameters())
    names = set()
    for tensor in shards(engine):
        equal = [name for name, param in params.items() if torch.equal(param, tensor)]
        if tensor.numel() and not equal:
            shape = f"a tensor of shape {tuple(tensor.shape)} that is no parameter: a shard, or a part of a matrix?"
            raise Differs("what optimizer.param_groups[0]['params'] contains", "whole parameters of the model", shape)
        names.update(equal)
    of_ranks = [[] for _ in range(dist.get_world_size(engine.group))]
    dist.all_gather_object(of_ranks, sorted(names), group=engine.group)
    ranks = Counter(sum(of_ranks, []))
    for name in params:
        expect(f"how many ranks have {name} in their optimizer", ranks[name], 1)
    return [sum(params[name].numel() for name in names) for names in of_ranks]


@on_ranks
def test_one_owner(stage):
    """step 0: every parameter belongs entirely to one rank"""
    for make in (Matrices, OneMatrix):
        for when, bucket_bytes in BUCKETS.items():
            engine = build(stage, make, bucket_bytes=bucket_bytes, optimizer=MUON)
            for (name, param), right in zip(engine.model.named_parameters(), models.seeded(make, 0).parameters()):
                expect_values(f"{name} after the build, with {when} (is it in one place only?)", param, right)
            elements_owned(engine)


@on_ranks
def test_balance(stage):
    """step 0: a rank owns at most 1/N of all elements and one matrix, also if each bucket has one parameter"""
    for when, bucket_bytes in BUCKETS.items():
        engine = build(stage, Matrices, bucket_bytes=bucket_bytes, optimizer=MUON)
        owned = elements_owned(engine)
        sizes = [param.numel() for param in engine.model.parameters()]
        most = sum(sizes) // len(owned) + max(sizes)
        expect_at_most(f"elements of the fullest rank, of {owned} on all ranks, with {when}", max(owned), most)


@on_ranks
def test_bytes_held(stage):
    """step 0: bytes alive between steps: shards as large as the fullest rank needs, and the owner's momentum"""
    owned = elements_owned(build(stage, Matrices, bucket_bytes=ONE_BUCKET, optimizer=MUON))
    own = owned[dist.get_rank()]
    with MemoryLedger() as memory:
        engine = build(stage, Matrices, bucket_bytes=ONE_BUCKET, optimizer=MUON, group=silent)
        for step in range(2):
            train_one_step(engine, step)
        buffer = 8 * len(owned) * max(owned)
        what = f"bytes alive (weights and gradients of {buffer:,} each, {8 * own:,} of momentum, {SLACK:,} to spare)"
        expect_at_most(what, memory.live, 2 * buffer + 8 * own + SLACK)


def flat_weights(model) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def train_beside_one_process(stage, make, ranks: list[int], group, bucket_bytes: int, at: str) -> None:
    """Three steps with two backwards each, and other learning rates in the optimizer that is built here."""
    model, plain = models.seeded(make, dist.get_rank()), models.seeded(make, ranks[0])
    optimizer, plain_optimizer = MUON(model.parameters()), MUON(plain.parameters())
    engine = stage(model, optimizer, bucket_mb=bucket_bytes / 2**20, group=group)
    for step, rate in enumerate((0.1, 0.02, 0.3)):
        optimizer.param_groups[0]["lr"] = plain_optimizer.param_groups[0]["lr"] = rate
        for number in (2 * step, 2 * step + 1):
            backward(engine, number)
            for rank in ranks:
                (plain(plain.batch(number, rank)[0]) / len(ranks)).backward()
        engine.step()
        engine.zero_grad()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        what = f"the weights after step {step + 1}, with a learning rate that was set to {rate}, {at}"
        expect_values(what, flat_weights(model), flat_weights(plain))


@on_ranks
def test_muon(stage):
    """steps 3 to 5: with torch.optim.Muon all ranks have the weights of one process, on 1, 2 and all ranks"""
    every_rank = list(range(dist.get_world_size()))
    two = every_rank[-2:]  # the first one is not rank 0, but has number 0 in the group
    of_two = dist.new_group(two)
    for ranks, group in [(every_rank, all_ranks()), (two, of_two), ([dist.get_rank()], alone())]:
        for when, bucket_bytes in BUCKETS.items():
            if dist.get_rank() in ranks:
                train_beside_one_process(stage, Matrices, ranks, group, bucket_bytes, f"{when}, group of ranks {ranks}")
    train_beside_one_process(stage, OneMatrix, every_rank, all_ranks(), 0, "all ranks but one own nothing")


@on_ranks
def test_adamw(stage):
    """steps 3 to 5: with AdamW the weights are the chapter's, for a model with vectors, scalars and a frozen layer"""
    elements_owned(build(stage, Matrices, optimizer=MUON))
    engine, right = build(stage), build(ZeRO1)
    for step in range(3):
        train_one_step(engine, step)
        train_one_step(right, step)
        what = f"the weights after step {step + 1} of the model Odd"
        expect_values(what, flat_weights(engine.model), flat_weights(right.model))


def collectives_of_a_step(stage, bucket_bytes: int, optimizer) -> Counter:
    """{kind: number} in the second step."""
    engine = build(stage, Matrices, bucket_bytes=bucket_bytes, optimizer=optimizer)
    for step in range(2):
        with Timeline(engine) as timeline:
            train_one_step(engine, step)
    return Counter(each.name for each in timeline.collectives)


@on_ranks
def test_collectives(stage):
    """steps 3 and 5: one reduction and one all-gather for each bucket"""
    elements_owned(build(stage, Matrices, optimizer=MUON))
    for when, bucket_bytes in BUCKETS.items():
        buckets = collectives_of_a_step(ZeRO1, bucket_bytes, ADAMW)["all-gather"]
        found = collectives_of_a_step(stage, bucket_bytes, MUON)
        reductions = found.pop("all-reduce", 0) + found.pop("reduce-scatter", 0)
        expect_at_most(f"all-reduces and reduce-scatters in a step, with {when}", reductions, buckets)
        expect_at_most(f"all-gathers in a step, with {when}", found.pop("all-gather", 0), buckets)
        expect(f"other collectives in a step, with {when}", dict(found), {})
