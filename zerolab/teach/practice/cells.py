"""The cells that a reader writes: the check of a solution, hints, and where to go on.

A check is given the reader's solution. It returns a sentence about a correct one, and raises AssertionError with a
sentence about a mistake. A blank raises NotImplementedError, as in an exercise.
"""

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zerolab.teach import by_hand
from zerolab.teach.practice.threads import on_threads


def check_held(solution) -> str:
    """Notebook 1: `my_held(stage, parameters, ranks)` -> bytes (float32, AdamW)."""
    for parameters, ranks in ((1000, 1), (1000, 4), (7 * 10**9, 8)):
        each = {"DDP": 16, "ZeRO-1": 8 + 8 / ranks, "ZeRO-2": 4 + 12 / ranks, "ZeRO-3": 16 / ranks}
        for stage, name in enumerate(each):
            expected = each[name] * parameters
            found = solution(stage, parameters, ranks)
            assert found is not None, "my_held returns nothing"
            case = f"{name}, {parameters:,} parameters, {ranks} ranks"
            assert abs(found / expected - 1) <= 1e-6, f"{case}: expected {expected:,.0f} bytes, found {found:,.0f}"
    return "all four stages, on 1, 4 and 8 ranks"


def check_cut(solution) -> str:
    """Notebook 1: `my_cut(values, ranks)` -> a shard per rank, all of one length, padded with zeros."""
    for length, ranks in ((10, 4), (12, 4), (3, 5), (1, 1), (9, 2)):
        values = [float(number) for number in range(1, length + 1)]
        shards = solution(list(values), ranks)
        assert shards is not None, "my_cut returns nothing"
        case = f"{length} values for {ranks} ranks"
        assert len(shards) == ranks, f"{case}: {len(shards)} shards"
        lengths = {len(shard) for shard in shards}
        assert len(lengths) == 1, f"{case}: shards of {sorted(lengths)} elements; a collective needs one length"
        together = sum(map(list, shards), [])
        assert together[:length] == values, f"{case}: put together they are {together}"
        assert not any(together[length:]), f"{case}: the padding must be zeros, it is {together[length:]}"
        size = -(-length // ranks)
        assert lengths == {size}, f"{case}: {size} elements per shard are enough, you have {lengths.pop()}"
    return "every length, every number of ranks, also where a rank owns only padding"


def check_ring(solution) -> str:
    """Notebook 2: `my_round(buffers, turn)` does one round of the ring's reduce-scatter, in place."""
    for ranks in (2, 4, 5):
        buffers = [[number * 10**rank for number in range(1, ranks + 1)] for rank in range(ranks)]
        expected = copy.deepcopy(buffers)
        for turn in range(ranks - 1):
            solution(buffers, turn)
            by_hand.reduce_round(expected, turn)
            for rank, (found, right) in enumerate(zip(buffers, expected)):
                wrong = f"after round {turn} rank {rank} has {found}, expected {right}"
                assert found == right, f"{ranks} ranks: {wrong}: in a round each rank must receive one number"
    return "2, 4 and 5 ranks: shard r of the sum is on rank r after N - 1 rounds, one number sent in each"


def check_zero1(solution) -> str:
    """Notebook 3: `my_step(rank, ranks, dist, weights, gradients, momentum)`: steps 3 to 5 of ZeRO-1 on one rank."""
    ranks, length, steps = 4, 12, 2
    gradients = [[torch.arange(length) * (rank + 1.0) + step for rank in range(ranks)] for step in range(steps)]

    def one(rank, dist):
        mine, own = torch.arange(length).float(), torch.zeros(length // ranks)
        for step in range(steps):
            solution(rank, ranks, dist, mine, gradients[step][rank].clone(), own)
        return mine, [kind for kind, _ in dist.calls]

    found = on_threads(ranks, one)
    kinds = found[0][1]

    def in_one_process(divisor: int) -> torch.Tensor:
        weights, momentum = torch.arange(length).float(), torch.zeros(length)
        for step in range(steps):
            momentum = momentum / 2 + sum(gradients[step]) / divisor
            weights = weights - momentum / 4
        return weights

    weights, of_sums = in_one_process(ranks), in_one_process(1)
    for rank, (mine, _) in enumerate(found):
        own = slice(rank * 3, rank * 3 + 3)
        summed = "; are the gradients summed, and not averaged?" if torch.equal(mine[own], of_sums[own]) else ""
        wrong = f"{mine[own].tolist()}, expected {weights[own].tolist()}{summed}"
        assert torch.equal(mine[own], weights[own]), f"rank {rank}'s own weights are {wrong}"
    for rank, (mine, _) in enumerate(found):
        wrong = f"and not the others' updated weights: {mine.tolist()}"
        assert torch.equal(mine, weights), f"rank {rank} has the correct shard, {wrong}"
    if kinds == ["reduce_scatter_single", "all_gather_single"] * steps:
        return "and by a reduce-scatter: that is the paper's ZeRO-1, which sends 2Ψ and not 3Ψ"
    expected = ["all_reduce", "all_gather_single"] * steps
    assert kinds == expected, f"the weights are correct, by {', '.join(kinds)}; {', '.join(expected)} are enough"
    return "4 ranks, 2 steps, the weights of one process to the bit, by one all-reduce and one all-gather per step"


def check_reduction(solution) -> str:
    """Notebook 4: a class; `__init__(dist, gradients)` sends a bucket's gradients, `finish(ranks)` receives."""
    ranks = 4

    def one(rank, dist):
        bucket = solution(dist, [torch.full((2, 3), float(rank + 1)), torch.arange(6.0) * 4 * rank])
        assert dist.calls == [("reduce_scatter_single", 12)], f"expected one reduce-scatter of 12, found {dist.calls}"
        at_once = "the collective was waited for at once: backward cannot go on meanwhile. Use async_op=True"
        assert not all(work.waited for work in dist.works), at_once
        whole = weakref.ref(bucket.flat)
        bucket.finish(ranks)
        assert all(work.waited for work in dist.works), "finish() must wait for the collective"
        return bucket.shard.clone(), whole() is None or whole().untyped_storage().nbytes() == 0

    found = on_threads(ranks, one)
    whole = torch.cat([torch.full((6,), 2.5), torch.arange(6.0) * 6])
    for rank, (shard, _) in enumerate(found):
        expected = whole[3 * rank : 3 * rank + 3]
        summed = "; that is the sum: divide by the number of ranks" if torch.equal(shard, ranks * expected) else ""
        wrong = f"rank {rank} has {shard.tolist()}, expected {expected.tolist()}{summed}"
        assert torch.equal(shard, expected), wrong
    assert all(freed for _, freed in found), "the whole gradients (`self.flat`) are still alive after finish()"
    return "sent and not waited for, the mean is correct, and the whole gradients are gone: that is ZeRO-2"


def check_gather(solution) -> str:
    """Notebook 5: (my_gather, my_free). `my_gather(whole, shard, dist)` and `my_free(whole)`, again and again."""
    my_gather, my_free = solution
    alive = (
        "64 bytes are still alive: to delete a name, or to give it another value, frees nothing, because the view "
        "that autograd has saved keeps the old storage. Free the storage itself"
    )
    tensor_resized = (
        "all 64 bytes are still there: `Tensor.resize_` changes the tensor and not its memory. The memory is its "
        "storage, which has its own resize_()"
    )
    copied = (
        "the values are correct, at twice the memory: they are gathered into a second buffer of 64 bytes and copied. "
        "Give all_gather_single `whole` itself as its output"
    )

    def one(rank, dist):
        values = torch.arange(16.0).view(4, 4)
        whole, shard = values.clone(), values.flatten()[4 * rank : 4 * rank + 4].clone()
        storage, saved = whole.untyped_storage(), whole.t()  # autograd keeps such a view for backward
        for turn in range(2):
            my_free(whole)
            elsewhere = whole.untyped_storage()._cdata != storage._cdata  # it was given other memory
            assert storage.nbytes() == 0, alive if elsewhere or whole.shape == (4, 4) else tensor_resized
            assert whole.shape == (4, 4), f"the freed tensor must keep its shape, it has {tuple(whole.shape)}"
            my_gather(whole, shard, dist)
            assert storage.nbytes() == 64, f"the storage has {storage.nbytes()} bytes after the gather, expected 64"
            assert torch.equal(whole, values), f"gathered {whole.tolist()}, expected {values.tolist()}"
            assert torch.equal(saved, values.t()), "the saved view must see the gathered values too"
            assert dist.filled[turn] == storage._cdata, copied
        return dist.calls

    calls = on_threads(4, one)[0]
    assert calls == [("all_gather_single", 4)] * 2, f"expected one all-gather of the shard per gather, found {calls}"
    return "freed to 0 bytes and gathered again, twice, and the view that autograd saved sees the weights"


def check_wrap(solution) -> str:
    """Notebook 6: `my_wrap(model)` puts `fully_shard` where ZeRO-3 has its units and its root."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from zerolab.measure.fake_ranks import fake_ranks
    from zerolab.run.model import GPT, preset

    with fake_ranks(4):
        model = GPT(preset("toy"))
        try:
            solution(model)
        except Exception as error:
            inside_out = isinstance(model, FSDPModule) and not all(isinstance(one, FSDPModule) for one in model.blocks)
            first = "the model was wrapped before its blocks, and has taken their parameters: wrap the blocks first"
            raise AssertionError(first) if inside_out else error from None
        parameters = dict(model.named_parameters())
        whole = [name for name, param in parameters.items() if not isinstance(param, DTensor)]
        units = [name or "the model" for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        assert not whole, f"{len(whole)} parameters are in no unit, {whole[0]} among them: wrap the model too, last"
        missing = [f"blocks.{number}" for number in range(len(model.blocks)) if f"blocks.{number}" not in units]
        assert not missing, f"units: {', '.join(units)}; {missing[0]} is none, so it is gathered with all the rest"
        local = sum(param.to_local().numel() for param in parameters.values())
        total = sum(param.numel() for param in parameters.values())
    return f"units: {', '.join(units)}; rank 0 of 4 holds {local:,} of {total:,} elements"


@dataclass(frozen=True)
class Cell:
    """`hints` are given one by one on request; `onward` says where to go on after a correct solution."""

    check: Callable[[object], str]
    hints: tuple[str, ...]
    onward: str


def whole_class(chapter: str) -> str:
    return f"the whole class: ./launch.sh exercise {chapter}, then ./launch.sh check {chapter}. Bugs: ./launch.sh bug"


CELLS = {
    "held": Cell(
        check_held,
        hints=(
            "three terms: 4 bytes for parameters, 4 for gradients, 8 for the optimizer state. Which are divided by N?",
            "ZeRO-1 divides the third, ZeRO-2 the second and third, ZeRO-3 all three",
        ),
        onward="question 1 below asks where this leads at N = 1,000",
    ),
    "cut": Cell(
        check_cut,
        hints=(
            "first the length of a shard: 10 / 4, rounded up. -(-a // b) rounds up",
            "then add zeros until there are ranks * size values",
            "shard r is values[r * size : (r + 1) * size]",
        ),
        onward="the chapter does this in step 0: ./launch.sh exercise zero1",
    ),
    "ring": Cell(
        check_ring,
        hints=(
            "in round t rank r sends the sum of shard (r - 1 - t) % N, so that the sum of shard s ends on rank s",
            "it goes to rank (r + 1) % N, which adds it to what it has there",
            "buffers[(rank + 1) % N][shard] += buffers[rank][shard], for every rank, with the shard of hint 1",
        ),
        onward="the next cells do all rounds, and then the all-gather",
    ),
    "zero1": Cell(
        check_zero1,
        hints=(
            "step 3: all_reduce gives the sum on every rank, in place, and you need the mean",
            "step 5: all_gather_single(output, input): the whole is the output, this rank's shard the input",
            "this rank's shard, updated in step 4, is weights[own]",
        ),
        onward=whole_class("zero1"),
    ),
    "reduction": Cell(
        check_reduction,
        hints=(
            "reduce_scatter_single(output, input, async_op=True) returns at once; its result has wait()",
            "after wait() nobody needs the whole buffer: drop the only name it has",
            "the collective sums, and training needs the mean",
        ),
        onward=whole_class("zero2"),
    ),
    "gather": Cell(
        check_gather,
        hints=(
            "a tensor's memory is tensor.untyped_storage(); it has resize_(bytes)",
            "free: resize to 0. Gather: resize to numel() * element_size(), then all_gather_single into the tensor",
            "the output may have any shape: all_gather_single(whole, shard)",
        ),
        onward=whole_class("zero3"),
    ),
    "wrap": Cell(
        check_wrap,
        hints=(
            "a unit of ZeRO-3 is a block. What is the module that holds everything else?",
            "fully_shard(module) changes the module in place; the blocks come first",
        ),
        onward="`fsdp2` in zerolab/run/counterparts.py does the same",
    ),
}
