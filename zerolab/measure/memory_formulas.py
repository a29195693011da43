"""The dry run's formulas: what a rank holds per parameter, and the exact peak of each stage. Ψ: all parameters."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from zero1 import Bucket, group_by_size
from zerolab.run.engines import ENGINES
from zerolab.run.model import GPT

FORMULAS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def held_by_formula(name: str, precision: str, parameters: int, ranks: int) -> int:
    """Bytes that a rank of the engine `name` holds when all gradients are there."""
    shared_out, _ = ENGINES[name].promise
    whole, cut = FORMULAS["bytes_per_parameter"][precision][len(shared_out)]
    return round(parameters * (whole + cut / ranks))


@dataclass(frozen=True)
class Letters:
    """The peak's letters. All are numbers of elements (4 bytes each), but N and p."""

    Ψ: int  # all parameters
    N: int  # ranks
    G: int  # the largest single gradient, on its way into ZeRO-1's buffer
    U: int  # the largest unit
    R: int  # the root: the parameters of no unit
    p: int  # units that are gathered ahead
    # ZeRO-2, for that bucket in backward which makes the sum largest:
    B: int  # this bucket; if it ends in a bias, also that bias's weight in the next bucket, whose gradient comes first
    A: int  # the larger of this bucket and the one that was reduced before it, which may still be in flight
    T: int  # this bucket and all that are reduced after it: their shards of the gradients do not exist yet


def formula_of_peak(name: str, precision: str, accumulate: int) -> str | None:
    """The stage's formula of the peak. None for other engines, and for mixed precision."""
    if precision != "fp32":
        return None
    return FORMULAS["once" if accumulate == 1 else "several"].get(name)


def zero1_peak(of: Letters) -> float:
    return 8 * of.Ψ + 8 * of.Ψ / of.N + 4 * of.G


def zero2_peak(of: Letters) -> float:
    return 4 * of.Ψ + 8 * of.Ψ / of.N + 4 * (of.Ψ - of.T) / of.N + 4 * of.A + 4 * of.B


def zero3_peak(of: Letters) -> float:
    return 4 * (4 * of.Ψ - of.R - (of.p + 1) * of.U) / of.N + 4 * of.R + 4 * (of.p + 3) * of.U


def zero2_peak_of_several(of: Letters) -> float:
    return 4 * of.Ψ + 12 * of.Ψ / of.N + 4 * of.A + 4 * of.B + 4 * of.A / of.N


def zero3_peak_of_several(of: Letters) -> float:
    return 16 * of.Ψ / of.N + 4 * of.R + 4 * (of.p + 3) * of.U + 4 * of.U / of.N


COMPUTED_BY = {
    FORMULAS["once"]["zero1"]: zero1_peak,  # with several backwards the same
    FORMULAS["once"]["zero2"]: zero2_peak,
    FORMULAS["once"]["zero3"]: zero3_peak,
    FORMULAS["several"]["zero2"]: zero2_peak_of_several,
    FORMULAS["several"]["zero3"]: zero3_peak_of_several,
}


def value(formula: str, of: Letters) -> float:
    """The bytes that a printed formula gives."""
    return COMPUTED_BY[formula](of)


class Layout(Bucket):
    """What a bucket of these parameters would be. They stay where they are."""

    def flatten(self):
        return self.params[0].detach().new_empty(1).expand(self.numel)


def letters(model: GPT, ranks: int, bucket_mb: float | None = None, prefetch: int = 1, accumulate: int = 1) -> Letters:
    """What the letters stand for in a GPT, without its engine, in a process group of `ranks`."""
    units = [sum(param.numel() for param in block.parameters()) for block in model.blocks]
    sizes = [param.numel() for param in model.parameters()]
    ahead = 0 if ranks == 1 else max(0, min(prefetch, len(units) - 2))
    made = [Layout(some, None) for some in group_by_size(model, bucket_mb)]
    share = 1 / ranks if accumulate == 1 else 0  # with several backwards all shards are there, so T does not count
    found = [_of_bucket(made[number:], made[max(0, number - 1)]) for number in range(len(made))]
    worst = max(found, key=lambda of: of["A"] + of["B"] - of["T"] * share)
    return Letters(Ψ=sum(sizes), N=ranks, G=max(sizes), U=max(units), R=sum(sizes) - sum(units), p=ahead, **worst)


def _of_bucket(buckets: list[Layout], before: Layout) -> dict[str, int]:
    """ZeRO-2's letters for the first of `buckets`, which are in the order of reduction; `before` was reduced before."""
    bucket, *following = buckets
    filling = bucket.numel
    if following and _module(following[0].names[0]) == _module(bucket.names[-1]):
        filling += following[0].params[0].numel()  # the weight of that bias: its gradient comes first
    return {"A": max(before.numel, bucket.numel), "B": filling, "T": sum(each.numel for each in buckets)}


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]
