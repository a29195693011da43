"""The cells of the notebooks that a reader writes: `check("cut", my_cut)` tries the reader's function at once.

A check is given the reader's solution. It returns a sentence about a correct one, and raises AssertionError with a
sentence about a mistake. A blank raises NotImplementedError, as in an exercise.
"""

import copy
import math
import weakref
from collections.abc import Callable

import torch
from torch.distributed.fsdp import FSDPModule

from zerolab.measure.fake_ranks import fake_ranks
from zerolab.run.model import GPT, preset
from zerolab.teach import by_hand
from zerolab.teach.threads import on_threads


def check(name: str, solution) -> bool:
    """Try the reader's `solution` of the cell `name`, a function or class. Print the result; True if it is correct.

    A mistake is a sentence and not a traceback, because a notebook must continue.
    """
    try:
        print(f"correct: {CHECKS[name](solution)}")
    except NotImplementedError as blank:
        print(f"not yet: {blank}")
        return False
    except Exception as mistake:  # the reader's own, or the check's
        kind = "" if isinstance(mistake, AssertionError) else f"{type(mistake).__name__}: "
        print(f"not correct yet: {kind}{mistake}")
        return False
    return True


def check_held(solution) -> str:
    """Notebook 1: `my_held(stage, parameters, ranks)` -> bytes (float32, AdamW)."""
    for parameters, ranks in ((1000, 1), (1000, 4), (7 * 10**9, 8)):
        each = {"DDP": 16, "ZeRO-1": 8 + 8 / ranks, "ZeRO-2": 4 + 12 / ranks, "ZeRO-3": 16 / ranks}
        for stage, name in enumerate(each):
            expected, found = each[name] * parameters, solution(stage, parameters, ranks)
            case = f"{name}, {parameters:,} parameters, {ranks} ranks"
            assert found and math.isclose(found, expected, rel_tol=1e-6), f"{case}: expected {expected}, found {found}"
    return "all four stages, on 1, 4 and 8 ranks"


def check_cut(solution) -> str:
    """Notebook 1: `my_cut(values, ranks)` -> a shard per rank, all of one length, padded with zeros."""
    for length, ranks in ((10, 4), (12, 4), (3, 5), (1, 1), (9, 2)):
        values = [float(number) for number in range(1, length + 1)]
        expected, found = by_hand.cut(values, ranks), solution(list(values), ranks)
        assert found == expected, f"{length} values for {ranks} ranks: expected {expected}, found {found}"
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
        weights, momentum = torch.arange(length).float(), torch.zeros(length // ranks)
        for step in range(steps):
            solution(rank, ranks, dist, weights, gradients[step][rank].clone(), momentum)
        return weights, [kind for kind, _ in dist.calls]

    def in_one_process(divisor: int) -> torch.Tensor:
        weights, momentum = torch.arange(length).float(), torch.zeros(length)
        for step in range(steps):
            momentum = momentum / 2 + sum(gradients[step]) / divisor
            weights = weights - momentum / 4
        return weights

    found = on_threads(ranks, one)
    expected, of_sums = in_one_process(ranks), in_one_process(1)
    for rank, (weights, _) in enumerate(found):
        own = slice(rank * 3, rank * 3 + 3)
        summed = "; are the gradients summed, and not averaged?" if torch.equal(weights[own], of_sums[own]) else ""
        wrong = f"{weights[own].tolist()}, expected {expected[own].tolist()}{summed}"
        assert torch.equal(weights[own], expected[own]), f"rank {rank}'s own weights are {wrong}"
    for rank, (weights, _) in enumerate(found):
        wrong = f"and not the others' updated weights: {weights.tolist()}"
        assert torch.equal(weights, expected), f"rank {rank} has the correct shard, {wrong}"
    kinds = found[0][1]
    if kinds == ["reduce_scatter_single", "all_gather_single"] * steps:
        return "and by a reduce-scatter: that is the paper's ZeRO-1, which sends 2Ψ and not 3Ψ"
    enough = ["all_reduce", "all_gather_single"] * steps
    assert kinds == enough, f"the weights are correct, by {', '.join(kinds)}; {', '.join(enough)} are enough"
    return "4 ranks, 2 steps, the weights of one process to the bit, by one all-reduce and one all-gather per step"


def check_reduction(solution) -> str:
    """Notebook 4: a class; `__init__(dist, gradients)` sends a bucket's gradients, `finish(ranks)` receives."""
    ranks = 4

    def one(rank, dist):
        bucket = solution(dist, [torch.full((2, 3), float(rank + 1)), torch.arange(6.0) * 4 * rank])
        assert dist.calls == [("reduce_scatter_single", 12)], f"expected one reduce-scatter of 12, found {dist.calls}"
        at_once = "the collective was waited for at once: backward cannot go on meanwhile. Use async_op=True"
        assert not dist.works[0].waited, at_once
        whole = weakref.ref(bucket.flat)
        bucket.finish(ranks)
        assert dist.works[0].waited, "finish() must wait for the collective"
        freed = whole() is None or whole().untyped_storage().nbytes() == 0
        assert freed, "the whole gradients (`self.flat`) are still alive after finish()"
        return bucket.shard.clone()

    whole = torch.cat([torch.full((6,), 2.5), torch.arange(6.0) * 6])
    for rank, shard in enumerate(on_threads(ranks, one)):
        expected = whole[3 * rank : 3 * rank + 3]
        summed = "; that is the sum: divide by the number of ranks" if torch.equal(shard, ranks * expected) else ""
        wrong = f"rank {rank} has {shard.tolist()}, expected {expected.tolist()}{summed}"
        assert torch.equal(shard, expected), wrong
    return "sent and not waited for, the mean is correct, and the whole gradients are gone: that is ZeRO-2"


def check_gather(solution) -> str:
    """Notebook 5: (my_gather, my_free). `my_gather(whole, shard, dist)` and `my_free(whole)`, again and again."""
    my_gather, my_free = solution
    alive = (
        "64 bytes are still alive. To delete a name or to assign `.data` frees nothing, because the view that autograd "
        "has saved keeps the storage, and `Tensor.resize_` changes the tensor and not its memory. Resize the storage"
    )

    def one(rank, dist):
        values = torch.arange(16.0).view(4, 4)
        whole, shard = values.clone(), values.flatten()[4 * rank : 4 * rank + 4].clone()
        storage, saved = whole.untyped_storage(), whole.t()  # autograd keeps such a view for backward
        for _ in range(2):
            my_free(whole)
            assert storage.nbytes() == 0, alive
            my_gather(whole, shard, dist)
            assert storage.nbytes() == 64, f"the storage has {storage.nbytes()} bytes after the gather, expected 64"
            assert torch.equal(whole, values), f"gathered {whole.tolist()}, expected {values.tolist()}"
            assert torch.equal(saved, values.t()), "the saved view must see the gathered values too"
        return dist.calls

    calls = on_threads(4, one)[0]
    assert calls == [("all_gather_single", 4)] * 2, f"expected one all-gather of the shard per gather, found {calls}"
    return "freed to 0 bytes and gathered again, twice, and the view that autograd saved sees the weights"


def check_wrap(solution) -> str:
    """Notebook 6: `my_wrap(model)` puts `fully_shard` where ZeRO-3 has its units and its root."""
    with fake_ranks(4):
        model = GPT(preset("toy"))
        solution(model)
        units = [name or "the model" for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        expected = ["the model", *(f"blocks.{number}" for number in range(len(model.blocks)))]
        assert units == expected, f"the units are {units}, expected {expected}"
        local = sum(param.to_local().numel() for param in model.parameters())
        total = sum(param.numel() for param in model.parameters())
    return f"units: {', '.join(units)}; rank 0 of 4 holds {local:,} of {total:,} elements"


CHECKS: dict[str, Callable[[object], str]] = {
    "held": check_held,
    "cut": check_cut,
    "ring": check_ring,
    "zero1": check_zero1,
    "reduction": check_reduction,
    "gather": check_gather,
    "wrap": check_wrap,
}
