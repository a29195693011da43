"""Claims about slow ranks, uneven batches and old gradients: recorded step times, and small simulations."""

import heapq
import json
import random
import statistics
from pathlib import Path

import torch

from harness.teach.articles.claim import FRAMEWORKS, Claim, holds_when, verdict

SLOW_RUN = Path(__file__).parents[3] / "results" / "step-time-slow-rank-cpu-2ranks.json"
RANKS, STEPS = 8, 200
TIMES = 100, 100, 140, 100  # milliseconds of the article's four ranks
WIDTH = 4096


def per_rank_step_times() -> tuple[str, str]:
    """The recorded run delayed rank 1 in every step: who looks slow by the step, and who by its own work?"""
    recorded = json.loads(SLOW_RUN.read_text())
    slow, _ = recorded["slow_rank"]
    ratios = {}
    for key in ("step_ms", "own_ms"):
        ratios[key] = []
        for run in recorded["runs"].values():
            ranks = {row["rank"]: row[key] for row in run["step_time"]["ranks"]}
            if len(ranks) > 1:
                ratios[key].append(ranks.pop(slow) / max(ranks.values()))
    low, high = min(ratios["step_ms"]), max(ratios["step_ms"])
    measured = (
        f"measured, {len(ratios['own_ms'])} engines on 2 ranks, one delayed: its steps take {low:.2f} to {high:.2f} "
        f"times those of the other, its own work at least {min(ratios['own_ms']):.1f} times"
    )
    condition = "a rank's own work is timed, without its waiting for the others"
    return measured, holds_when(condition, min(ratios["own_ms"]) >= 1.2, min(ratios["step_ms"]) >= 1.2)


def cost(length: int) -> float:
    """Computation of a sequence: its products with weights, and attention, as FLOPs are counted in the PaLM paper."""
    return length * (1 + length / (6 * WIDTH))


def lengths() -> list[int]:
    """Documents as long texts have them: most are short, some fill the 4,096 tokens."""
    chance = random.Random(0)
    return [min(4096, max(16, int(chance.lognormvariate(6.5, 1)))) for _ in range(RANKS * STEPS)]


def steps_of(ordered: list[int], pad: bool = False) -> tuple[float, float]:
    """(time of all steps, in which the slowest rank decides; share of it in which a rank waits), a sequence a rank."""
    time = waits = 0.0
    for start in range(0, len(ordered), RANKS):
        step = [cost(length) for length in ordered[start : start + RANKS]]
        slowest = max(step)
        time += slowest
        waits += 0.0 if pad else slowest - statistics.fmean(step)
    return time, waits / time


def uneven_lengths() -> tuple[str, str]:
    (_, uneven), (_, even) = steps_of(lengths()), steps_of([1024] * RANKS * STEPS)
    measured = f"{RANKS} ranks, {STEPS} steps: ranks wait {uneven:.0%} of the time, with equal lengths {even:.0%}"
    return measured, verdict(uneven > 0.2 and even == 0)


def bucketing() -> tuple[str, str]:
    """Neighbours in length go into one step, and the steps are shuffled: the same sequences, other companions."""
    plain = lengths()
    by_length = sorted(plain)
    steps = [by_length[start : start + RANKS] for start in range(0, len(plain), RANKS)]
    random.Random(1).shuffle(steps)
    bucketed = steps_of([length for step in steps for length in step])
    at_random, padded = steps_of(plain), steps_of(plain, pad=True)
    measured = "; ".join(
        f"{what}: {time / at_random[0]:.2f} of the time, {waits:.0%} of it waiting"
        for what, (time, waits) in (("as they come", at_random), ("bucketed", bucketed), ("padded", padded))
    )
    condition = "it is bucketing; padding turns waiting into work for nothing, and is no faster"
    return measured, holds_when(condition, bucketed[0] < 0.95 * at_random[0], padded[0] < 0.95 * at_random[0])


def time_per_micro_batch(together: int, moving: bool) -> float:
    """Mean time of a micro-batch with `together` of them per step. One in 8 is slow: always rank 0's, or anyone's."""
    chance, total = random.Random(0), 0.0
    for _ in range(STEPS):
        sums = [0.0] * RANKS
        for _ in range(together):
            for rank in range(RANKS):
                slow = chance.random() < 1 / RANKS if moving else rank == 0
                sums[rank] += 1.4 if slow else 1.0
        total += max(sums) / together
    return total / STEPS


def accumulation() -> tuple[str, str]:
    found = {moving: [time_per_micro_batch(number, moving) for number in (1, 8)] for moving in (True, False)}
    measured = "time of a micro-batch, 1 and 8 per step: " + "; ".join(
        f"slow is {'now this rank, now that' if moving else 'always one rank'} {one:.2f}, {eight:.2f}"
        for moving, (one, eight) in found.items()
    )
    helps = {moving: eight < 0.95 * one for moving, (one, eight) in found.items()}
    return measured, holds_when("the slow rank is another one each time", helps[True], helps[False])


def asynchronous(rate: float, until: float, momentum: float = 0.0) -> tuple[float, int]:
    """(distance from the minimum, gradients) of x²/2 from x = 1 after `until` ms: each rank sends when it is ready."""
    x, speed, updates = 1.0, 0.0, 0
    ready = [(time, rank, x) for rank, time in enumerate(TIMES)]
    while ready[0][0] <= until:
        now, rank, seen = heapq.heappop(ready)
        speed = momentum * speed + seen  # the gradient at the x that this rank has seen, old by now
        x -= rate * speed
        updates += 1
        heapq.heappush(ready, (now + TIMES[rank], rank, x))
    return abs(x), updates


def synchronous(rate: float, until: float, momentum: float = 0.0) -> tuple[float, int]:
    """The same with all ranks' gradients at one x, added up when the last rank is ready."""
    x, speed, steps = 1.0, 0.0, int(until // max(TIMES))
    for _ in range(steps):
        speed = momentum * speed + len(TIMES) * x
        x -= rate * speed
    return abs(x), steps * len(TIMES)


def fast_ranks_run_ahead() -> tuple[str, str]:
    (_, alone), (_, together) = asynchronous(0.01, 7_000), synchronous(0.01, 7_000)
    measured = f"ranks of {', '.join(map(str, TIMES))} ms: {alone} gradients in 7 s, {together} if they wait"
    return measured, verdict(alone > 1.1 * together)


def sensitive_to_old_gradients() -> tuple[str, str]:
    """Up to which learning rate (of one gradient) does x²/2 converge? Momentum repeats an old gradient's mistake."""

    def largest(run, momentum: float) -> float:
        rates = [number / 100 for number in range(1, 101)]
        return max(rate for rate in rates if run(rate, 70_000, momentum)[0] < 1e-3)

    found = {momentum: [largest(run, momentum) for run in (asynchronous, synchronous)] for momentum in (0.9, 0.0)}
    measured = "largest learning rate that converges on x²/2: " + "; ".join(
        f"momentum {momentum:g} {alone:g}, {together:g} if they wait" for momentum, (alone, together) in found.items()
    )
    sensitive = [alone < together / 2 for alone, together in found.values()]
    return measured, holds_when("there is momentum, as in AdamW", *sensitive)


def used(micro_batches: int, every: int) -> list[int]:
    """Its loop, run over that many micro-batches: the numbers of those that reached a step."""
    weight = torch.zeros(micro_batches, requires_grad=True)  # micro-batch i gives element i its gradient
    seen = torch.zeros(micro_batches)
    for number in range(micro_batches):
        (weight[number] / every).backward()
        if (number + 1) % every == 0:
            seen += weight.grad != 0
            weight.grad = None
    return seen.nonzero().flatten().tolist()


def left_over() -> tuple[str, str]:
    whole, rest = used(8, 4), used(10, 4)
    measured = (
        f"K = 4: of 8 micro-batches {len(whole)} reach a step, of 10 {len(rest)}; the gradients of the others are lost "
        "by the next zero_grad(), or count in the next epoch's first step"
    )
    return measured, holds_when("K divides their number", len(whole) == 8, len(rest) == 10)


_SIMULATED = "a simulation: 8 ranks, the slowest decides, lengths drawn at random"
CLAIMS = [
    Claim(FRAMEWORKS, "step times logged per rank show the straggler, 20% or more higher",
          "a recorded run with one rank delayed (./launch.sh compare --slow-rank)", per_rank_step_times),
    Claim(FRAMEWORKS, "uneven sequence lengths make stragglers", _SIMULATED, uneven_lengths),
    Claim(FRAMEWORKS, "bucketing or padding evens out uneven lengths", _SIMULATED, bucketing),
    Claim(FRAMEWORKS, "gradient accumulation mitigates stragglers",
          "a simulation: 8 ranks, one micro-batch in 8 takes 40% longer", accumulation),
    Claim(FRAMEWORKS, "asynchronous SGD lets fast GPUs run ahead",
          "a simulation of its four ranks", fast_ranks_run_ahead),
    Claim(FRAMEWORKS, "stale gradients make convergence sensitive",
          "x²/2 minimised by its four ranks, with and without waiting", sensitive_to_old_gradients),
    Claim(FRAMEWORKS, "its accumulation loop uses every micro-batch",
          "the loop over 8 and 10 micro-batches", left_over),
]  # fmt: skip
