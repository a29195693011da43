"""Claims about pipelines: schedules replayed, forward and backward, without time for messages."""

from dataclasses import dataclass

from harness.teach.articles.claim import FRAMEWORKS, Claim, holds_when, verdict

FORWARD, BACKWARD = 1, 2  # time slots of one micro-batch on one stage: backward has twice the products
STAGES, MICRO_BATCHES = 4, 8  # the article's


@dataclass(frozen=True)
class Replay:
    """`idle`: share of all stages' time. `kept`: most micro-batches whose activations the first stage holds."""

    idle: float
    kept: int


def all_forward_first(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """GPipe's order of one stage (arXiv 1811.06965): all forwards, then all backwards."""
    return [("F", m) for m in range(micro_batches)] + [("B", m) for m in reversed(range(micro_batches))]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """PipeDream's order of one stage (arXiv 1806.03377): a backward as soon as it can be, then the next forward."""
    ahead = min(stages - stage, micro_batches)
    order = [("F", m) for m in range(ahead)]
    for m in range(micro_batches):
        order.append(("B", m))
        if ahead + m < micro_batches:
            order.append(("F", ahead + m))
    return order


def replay(order_of, stages: int, micro_batches: int, length: float = 1) -> Replay:
    """Every stage does what its order says, as soon as its input is there. A micro-batch takes 3 slots x `length`."""
    orders = [order_of(stage, stages, micro_batches) for stage in range(stages)]
    ends, clocks, places = {}, [0.0] * stages, [0] * stages
    while any(place < len(order) for place, order in zip(places, orders)):
        for stage in range(stages):
            while places[stage] < len(orders[stage]):
                what, m = orders[stage][places[stage]]
                before = stage - 1 if what == "F" else stage + 1
                if 0 <= before < stages and (what, m, before) not in ends:
                    break
                begin = max(clocks[stage], ends.get((what, m, before), 0.0))
                clocks[stage] = begin + length * (FORWARD if what == "F" else BACKWARD)
                ends[what, m, stage] = clocks[stage]
                places[stage] += 1
    kept, most = 0, 0
    for what, _ in orders[0]:
        kept += 1 if what == "F" else -1
        most = max(most, kept)
    busy = stages * micro_batches * length * (FORWARD + BACKWARD)
    return Replay(1 - busy / (stages * max(clocks)), most)


def naive(stages: int, micro_batches: int) -> Replay:
    """The batch goes through the stages as a whole: one micro-batch that is so many times longer."""
    return replay(all_forward_first, stages, 1, length=micro_batches)


def gpipe_and_naive() -> tuple[str, str]:
    whole, cut = naive(STAGES, MICRO_BATCHES), replay(all_forward_first, STAGES, MICRO_BATCHES)
    measured = f"{STAGES} stages: idle {whole.idle:.1%} with the batch as one, {cut.idle:.1%} in {MICRO_BATCHES} parts"
    return measured, verdict(cut.idle < whole.idle)


def pipedream() -> tuple[str, str]:
    """As it is used for exact training, emptied after each batch; and as its paper has it, running on (10 batches)."""
    gpipe = replay(all_forward_first, STAGES, MICRO_BATCHES)
    flushed = replay(one_forward_one_backward, STAGES, MICRO_BATCHES)
    running = replay(one_forward_one_backward, STAGES, 10 * MICRO_BATCHES)
    measured = (
        f"idle: GPipe {gpipe.idle:.1%}, 1F1B {flushed.idle:.1%} if emptied after each batch, {running.idle:.1%} if "
        f"never in 10; micro-batches kept by the first stage: {gpipe.kept}, {flushed.kept}, {running.kept}"
    )
    condition = "the pipeline is never emptied, so that weights are old; emptied, it saves activations and no time"
    return measured, holds_when(condition, running.idle < gpipe.idle - 1e-9, flushed.idle < gpipe.idle - 1e-9)


def more_micro_batches() -> tuple[str, str]:
    numbers = (4, 8, 16, 64)
    idle = [
        [replay(order, STAGES, number).idle for number in numbers]
        for order in (all_forward_first, one_forward_one_backward)
    ]
    measured = f"{STAGES} stages, {', '.join(map(str, numbers))} micro-batches: idle " + " and ".join(
        ", ".join(f"{share:.1%}" for share in shares) for shares in idle
    )
    return f"{measured} (GPipe, 1F1B)", verdict(all(b < a for shares in idle for a, b in zip(shares, shares[1:])))


_SCHEDULES = "schedules replayed: forward 1 slot, backward 2, messages take no time"
CLAIMS = [
    Claim(FRAMEWORKS, "GPipe's micro-batches reduce the bubble", _SCHEDULES, gpipe_and_naive),
    Claim(FRAMEWORKS, "PipeDream's schedule reduces the bubble further", _SCHEDULES, pipedream),
    Claim(FRAMEWORKS, "more micro-batches shrink the bubble", _SCHEDULES, more_micro_batches),
]  # fmt: skip
