"""The dry run's formulas: what a rank holds per parameter, and the exact peak of each stage.

Ψ is the number of parameters. A formula of a peak is a `Formula`: its text, which tables print, and a function with the
same arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass

from zero1 import Bucket, group_by_size
from zerolab.run.engines import ENGINES
from zerolab.run.model import GPT

# Bytes per parameter that a rank holds, (whole, cut into N), with 0, 1, 2 or 3 things sharded: first the optimizer
# state, then the gradients, then the parameters. fp32 is 4Ψ of weights, 4Ψ of gradients and 8Ψ of AdamW's two moments;
# an article (`ARTICLE` in memory.py) has it as a table for 7e9 parameters on 8 GPUs. bf16 has bfloat16 weights
# (2Ψ) next to float32 ones, which are cut with the optimizer state, and float32 gradients. No article has that count.
# (In DDP and ZeRO-3 the bfloat16 weights exist only while the model computes.)
BYTES_PER_PARAMETER = {
    "fp32": [(16, 0), (8, 8), (4, 12), (0, 16)],
    "bf16": [(16, 0), (6, 12), (2, 16), (0, 16)],
}


def held_by_formula(name: str, precision: str, parameters: int, ranks: int) -> int:
    """Bytes that a rank of the engine `name` holds when all gradients are there."""
    sharded, _ = ENGINES[name].promise
    whole, cut = BYTES_PER_PARAMETER[precision][len(sharded)]
    return round(parameters * (whole + cut / ranks))


@dataclass(frozen=True)
class Letters:
    """The letters of the formulas. All are numbers of elements (4 bytes each), except N and p."""

    Ψ: int  # all parameters
    N: int  # ranks
    G: int  # the largest single gradient, on its way into ZeRO-1's buffer
    U: int  # the largest unit
    R: int  # the root: the parameters that are in no unit
    p: int  # units that are gathered ahead
    # Of ZeRO-2, for the bucket whose reduction is the worst moment of backward:
    B: int  # this bucket; if it ends in a bias, also that bias's weight in the next bucket, whose gradient comes first
    A: int  # the larger of this bucket and the one that was reduced before it, which may still be in flight
    T: int  # this bucket and all that are reduced after it: their shards of the gradients do not exist yet


@dataclass(frozen=True)
class Formula:
    """A formula as tables print it, and as a function that returns bytes."""

    text: str
    bytes: Callable[[Letters], float]


def zero1_peak(of: Letters) -> float:
    return 8 * of.Ψ + 8 * of.Ψ / of.N + 4 * of.G


def zero2_peak(of: Letters) -> float:
    return 4 * of.Ψ + 8 * of.Ψ / of.N + 4 * (of.Ψ - of.T) / of.N + 4 * of.A + 4 * of.B


def zero3_peak(of: Letters) -> float:
    return 4 * (4 * of.Ψ - of.R - (of.p + 1) * of.U) / of.N + 4 * of.R + 4 * (of.p + 3) * of.U


# The exact peaks, in bytes, of a step with one backward, in float32 with AdamW, without activations and temporaries.
# (The chapters have a shorter formula, for buckets or units of equal size. zero3.py's has H, the gradient of a head
# that does not share the embedding's weight. In all presets it does.)
PEAKS = {
    "zero1": Formula("8Ψ + 8Ψ/N + 4G", zero1_peak),
    "zero2": Formula("4Ψ + 8Ψ/N + 4(Ψ - T)/N + 4A + 4B", zero2_peak),
    "zero3": Formula("4(4Ψ - R - (p + 1)U)/N + 4R + 4(p + 3)U", zero3_peak),
}


class Layout(Bucket):
    """The layout of a bucket of these parameters, which are not moved."""

    def flatten(self):
        return self.params[0].detach().new_empty(1).expand(self.numel)


def letters(model: GPT, ranks: int, bucket_mb: float | None = None, prefetch: int = 1) -> Letters:
    """The letters for a GPT in a process group of `ranks`, without building its engine."""
    units = [sum(param.numel() for param in block.parameters()) for block in model.blocks]
    sizes = [param.numel() for param in model.parameters()]
    ahead = 0 if ranks == 1 else max(0, min(prefetch, len(units) - 2))
    made = [Layout("", some, None) for some in group_by_size(model, bucket_mb)]
    found = [_of_bucket(made[number:], made[max(0, number - 1)]) for number in range(len(made))]
    worst = max(found, key=lambda of: of["A"] + of["B"] - of["T"] / ranks)
    return Letters(Ψ=sum(sizes), N=ranks, G=max(sizes), U=max(units), R=sum(sizes) - sum(units), p=ahead, **worst)


def _of_bucket(buckets: list[Layout], before: Layout) -> dict[str, int]:
    """ZeRO-2's letters for the first of `buckets`, in the order of reduction. `before` was reduced before it."""
    bucket, *following = buckets
    filling = bucket.numel
    if following and _module(following[0].names[0]) == _module(bucket.names[-1]):
        filling += following[0].params[0].numel()  # the weight of that bias: its gradient comes first
    return {"A": max(before.numel, bucket.numel), "B": filling, "T": sum(each.numel for each in buckets)}


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
