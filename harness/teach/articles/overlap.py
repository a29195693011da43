"""Claims about when things happen: the order in which an engine gathers, computes, reduces and updates.

Order is all that is looked at here: what is issued before a computation can hide behind it. What that saves in time
is measured by ./launch.sh sweeps.
"""

import functools

from harness.measure.traffic import TrafficLedger
from harness.teach.articles.claim import (
    FRAMEWORKS,
    MULTIPLE_GPUS,
    NAMES,
    SCALING,
    SHARDING_STATE,
    Claim,
    holds_when,
    verdict,
)
from harness.teach.articles.runs import (
    SGD,
    batch_for,
    build,
    chain,
    fake_ranks,
    loss_for,
    one_rank,
)

REDUCE, GATHER = "reduce-scatter", "all-gather"


def fsdp_flow() -> tuple[str, str]:
    """One letter per event in a unit's life: Gather, Compute, Reduce."""
    orders = {}
    for name in ("zero3", "fsdp2"):
        with fake_ranks(8):
            model = chain(layers=1)
            engine, (inputs, targets) = build(name, model, SGD), batch_for(model)
            with Events() as events:
                loss = loss_for(model)(engine(inputs), targets)
                events.letters += "|"
                loss.backward()
            orders[name] = "".join(events.letters)
            del engine
    found = set(orders.values())
    measured = "; ".join(f"{NAMES[name]} {order}" for name, order in orders.items())
    return f"G gather, C compute, R reduce: {measured}", verdict(found == {"GC|GCR"})


class Events(TrafficLedger):
    """The order of all-gathers (G), matrix products (C) and reduce-scatters (R)."""

    def __init__(self):
        super().__init__(on_event=self._on_collective)
        self.letters: list[str] = []

    def _on_collective(self, what: str, depth: int, collective) -> None:
        self.letters += {GATHER: "G", REDUCE: "R"}.get(what, "")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.letters += {"aten::mm": "C", "aten::addmm": "C"}.get(func._schema.name, "")
        return super().__torch_dispatch__(func, types, args, kwargs)


def events_of_a_step(name: str, **options) -> list[str]:
    """The events of one forward and backward of an engine over `chain(4)`, after two steps to learn the order."""
    with fake_ranks(8):
        model = chain(layers=4)
        engine, (inputs, targets) = build(name, model, SGD, **options), batch_for(model)
        for _ in range(3):
            with Events() as events:
                loss = loss_for(model)(engine(inputs), targets)
                events.letters += "|"
                loss.backward()
            engine.step()
            engine.zero_grad()
        del engine
    return events.letters


def prefetch(name: str = "zero3", **without) -> tuple[str, str]:
    """Whether the gather of the next unit is always issued before the computation of the present one."""

    def ahead(letters: str) -> bool:
        gathers = letters.count("G")
        per_unit = round(letters.count("C") / gathers)  # 1 in forward, 2 in backward
        computations = [position for position, letter in enumerate(letters) if letter == "C"]
        return all(
            letters[:position].count("G") >= min(number // per_unit + 2, gathers)
            for number, position in enumerate(computations)
        )

    halves, serial = ("".join(events_of_a_step(name, **o)).split("|") for o in ({}, without))
    measured = f"with prefetch {'|'.join(halves)}, without {'|'.join(serial)} (G gather, C compute, R reduce)"
    condition = "a unit or more is prefetched; without, each gather waits for the computation in front of it"
    return measured, holds_when(condition, all(map(ahead, halves)), any(map(ahead, serial)))


def backward_prefetch() -> tuple[str, str]:
    """FSDP1's option, which the article names (its snippet only imports it): is the next unit gathered early enough?"""
    from torch.distributed.fsdp import BackwardPrefetch

    orders = {
        option: "".join(events_of_a_step("fsdp1", backward_prefetch=option)).split("|")[1]
        for option in (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None)
    }
    early = [letters[: letters.index("C")].count("G") > 1 for letters in orders.values()]
    names = ("BACKWARD_PRE", "BACKWARD_POST", "None")
    measured = "; ".join(f"{name}: {letters}" for name, letters in zip(names, orders.values()))
    return measured, holds_when("it is BACKWARD_PRE, the default", early[0], early[1] or early[2])


@functools.cache
def _around_the_update(name: str) -> tuple[list[str], list[str]]:
    """The collectives of a step before the optimizer's update, and from its beginning on."""
    with fake_ranks(8):
        model = chain()
        engine, (inputs, targets) = build(name, model, SGD), batch_for(model)
        before = []
        engine.optimizer.register_step_pre_hook(lambda *_: before.append(len(ledger.collectives)))
        with TrafficLedger() as ledger:
            loss_for(model)(engine(inputs), targets).backward()
            engine.step()
            engine.zero_grad()
        kinds = [collective.kind for collective in ledger.collectives]
        del engine
    return kinds[: before[0]], kinds[before[0] :]


def no_final_gather() -> tuple[str, str]:
    after = {name: len(_around_the_update(name)[1]) for name in ("zero1", "zero2", "zero3", "fsdp2")}
    measured = "collectives after the update: " + ", ".join(f"{NAMES[name]} {count}" for name, count in after.items())
    return measured, verdict(after["zero3"] == after["fsdp2"] == 0 < after["zero2"])


def sync_over_update() -> tuple[str, str]:
    late = {name: _around_the_update(name)[1].count(REDUCE) for name in ("zero2", "zero3", "fsdp2")}
    measured = "reduce-scatters still to come when the optimizer starts: " + ", ".join(
        f"{NAMES[name]} {count}" for name, count in late.items()
    )
    return measured, verdict(any(late.values()))


def overlap_in_ddp() -> tuple[str, str]:
    def before_the_last_gradient(**options) -> tuple[int, int]:
        with one_rank():
            model = chain()
            engine = build("ddp", model, SGD, **options)
            inputs, targets = batch_for(model)
            for _ in range(3):
                at_last = []
                hook = model[0].weight.register_hook(lambda _, at=at_last: at.append(len(ledger.collectives)))
                with TrafficLedger() as ledger:
                    loss_for(model)(engine(inputs), targets).backward()
                hook.remove()
            total = len(ledger.collectives)
            del engine
        return at_last[0], total

    (early, total), (one_early, one) = before_the_last_gradient(bucket_cap_mb=0.02), before_the_last_gradient()
    measured = (
        f"{early} of {total} all-reduces issued before the last gradient; with a single bucket {one_early} of {one}"
    )
    return measured, holds_when("the gradients fill more than one bucket (25 MiB each)", early > 0, one_early > 0)


CLAIMS = [
    Claim(MULTIPLE_GPUS, "ZeRO-3 needs no all-gather at the end of the step",
          "one step of every engine, collectives after the update counted", no_final_gather),
    Claim(MULTIPLE_GPUS, "the gather of layer N+1 can hide behind the forward of layer N",
          "order of events in our ZeRO-3", functools.partial(prefetch, prefetch=0)),
    Claim(SHARDING_STATE, "FSDP: gather, compute, free; in backward gather, compute, reduce-scatter",
          "order of events of one unit", fsdp_flow),
    Claim(SHARDING_STATE, "the next layer's gather goes on beside the computation",
          "order of events in our ZeRO-3", functools.partial(prefetch, prefetch=0)),
    Claim(FRAMEWORKS, "DDP overlaps the all-reduce with backward by itself",
          "real DDP, when its all-reduces are issued", overlap_in_ddp),
    Claim(FRAMEWORKS, "the gradient sync overlaps with the optimizer's step",
          "order of collectives and update", sync_over_update),
    Claim(SCALING, "BackwardPrefetch overlaps the next gather with the present gradients",
          "order of events in FSDP1", backward_prefetch),
]  # fmt: skip
