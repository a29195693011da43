"""Claims about what is sent and when, what is gathered and freed: the collectives that the engines really issue.

Ψ is the number of parameters, and traffic is counted in elements, as in the ZeRO paper. "2Ψ" below is short for
2Ψ (N-1)/N elements, sent by one rank in one step: the factor in front of Ψ is the same for every N. The
articles' models are replaced by small ones: a ratio of counts does not depend on the size. Of time only order is seen
here: what is issued before a computation can hide behind it.
"""

import functools
from functools import partial

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from harness.measure.held import storage_bytes
from harness.measure.memory_parts import GATHERED
from harness.measure.traffic import TrafficLedger
from harness.teach import by_hand
from harness.teach.articles.claim import about
from harness.teach.articles.runs import (
    ALL_REDUCE,
    GATHER,
    REDUCE,
    STAGES,
    batch_for,
    chain,
    fake_ranks,
    forward,
    running,
    small_gpt,
    step,
    toy,
    update,
    worst_moment,
)

# How much is sent.


def psi(name: str, *kinds: str, model=chain, **options) -> float:
    """Elements that a rank sends in a step by these collectives, or all, in Ψ."""
    return step(name, model, **options).sent(*kinds)


def never_zero1():
    """For 1 to 4 micro-batches. ZeRO-2 under no_sync() is a ZeRO-1 that reduce-scatters: whole gradients, sent once."""
    zero1, zero2 = ([psi(name, micro_batches=n) for n in (1, 2, 3, 4)] for name in ("zero1", "zero2"))
    quiet = psi("zero2", micro_batches=4, no_sync=True, find_unused=False)  # an option of the engine's: no chapter
    as_cheap = [two <= one for one, two in zip(zero1, zero2)]
    return [*zero1, *zero2, quiet], as_cheap[0] and as_cheap[1] and quiet <= zero1[3], as_cheap[2]


def ring_all_reduce():
    """A ring all-reduce of 8 ranks, run in one process: the share of the buffer that one sends, and whether it sums."""
    buffers = [[shard + rank for shard in range(8)] for rank in range(8)]
    expected = [sum(column) for column in zip(*buffers)]
    sent = by_hand.ring(buffers, by_hand.reduce_round) + by_hand.ring(buffers, by_hand.gather_round)
    share, right = sent / 8, buffers == [expected] * 8
    return [share, right], share == 2 * 7 / 8 and right


def sends_more_than_it_can_use():
    return [psi("zero1", ALL_REDUCE) / psi("zero2", REDUCE)]


def sent(engines: list[str]) -> list[float]:
    return [psi(name) for name in engines]


def over_ddp(engines: list[str]) -> list[float]:
    return [psi(name) / psi("ddp") for name in engines]


def sent_and_state(engines: list[str]) -> list[float]:
    """What each sends, in Ψ, and then the bytes of state that each holds per parameter."""
    states = [step(name).state / step(name).parameters for name in engines]
    return [*sent(engines), *states]


def half_more_than_ddp():
    """Of units alone; a GPT, whose root stays gathered into backward; units that stay gathered, too."""
    zero3, fsdp2 = over_ddp(["zero3", "fsdp2"])
    of_a_gpt = psi("zero3", model=toy) / psi("ddp", model=toy)
    kept = psi("zero3", reshard_after_forward=False) / psi("ddp")
    return [zero3, fsdp2, of_a_gpt, kept], about(zero3, 1.5) and about(fsdp2, 1.5) and of_a_gpt < 1.5, about(kept, 1.5)


def gradients_of_what_it_owns():
    run = step("zero2")
    share = run.held["gradients"] / run.parameter_bytes
    return [run.count[REDUCE], run.count[ALL_REDUCE], share], run.count[ALL_REDUCE] == 0 and about(share, 1 / 8)


def fsdp_is_zero3():
    names = "zero3", "fsdp1", "fsdp2"
    sent, states = [psi(name, model=toy) for name in names], [step(name, toy).state for name in names]
    alike = [about(found, sent[0]) for found in sent] + [about(found, states[0]) for found in states]
    return [*sent, *states], all(alike)


def all_reduces_by_replicas():
    return [step("fsdp2", replicas=copies).count[ALL_REDUCE] for copies in (1, 2)]


def all_reduces_of_micro_batches():
    """Of four micro-batches with no_sync() and without, over those of one."""
    found = [step("ddp", micro_batches=4, no_sync=quiet).count[ALL_REDUCE] for quiet in (True, False)]
    return [number / step("ddp").count[ALL_REDUCE] for number in found]


def adapted_gpt():
    """All frozen but the last matrix of each block's MLP, as fine-tuning freezes."""
    model = small_gpt()
    for name, param in model.named_parameters():
        param.requires_grad = "down.weight" in name
    return model


def fsdp2_over_fsdp1():
    """Its peak and its traffic, of a model with frozen parameters and of one without."""
    found = []
    for model in (adapted_gpt, small_gpt):
        old, new = step("fsdp1", model), step("fsdp2", model)
        found += [new.peak / old.peak, new.sent() / old.sent()]
    return found, min(found[:2]) < 0.95, min(found[2:]) < 0.95


# Accumulation, buckets and units.

long_chain = partial(chain, 16)


def collectives_by_bucket(sizes: list[float]) -> list[int]:
    return [len(step("zero2", toy, bucket_mb=size).collectives) for size in sizes]


def peak_by_bucket(sizes: list[float]) -> list[float]:
    """The peak of ZeRO-2's step in bytes per parameter, by the size of its buckets (MiB)."""
    runs = [step("zero2", long_chain, bucket_mb=size) for size in sizes]
    return [run.peak / run.parameters for run in runs]


def frees_gradients():
    """Peaks over what is held, which is 4Ψ of weights and 12Ψ/N. Whole gradients are 4Ψ."""
    return [peak - 4 - 12 / 8 for peak in peak_by_bucket([0, 25])]


def matrices(model) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (nn.Linear, nn.LayerNorm)) and m is not model.head]


def bad_wrapping():
    """A unit per layer, one per block, the model as one."""
    choices = matrices, None, lambda model: [model]
    runs = [step("zero3", toy, units=units) for units in choices]
    layers, blocks, _ = gathers = [run.count[GATHER] for run in runs]
    volume, least, _ = volumes = [run.sent(GATHER) for run in runs]
    return [*gathers, *volumes], layers > 3 * blocks and about(volume, least, 0.05)


def wrapped(units) -> tuple[float, float]:
    """Shares of a GPT with fully_shard on these modules: of the largest all-gather, and of what stays unsharded."""
    with fake_ranks(8), TrafficLedger() as ledger:
        model = toy()
        for module in units(model):
            fully_shard(module, mesh=init_device_mesh("cpu", (8,)))
        model(batch_for(model)[0]).sum().backward()
        whole = sum(param.nbytes for param in model.parameters() if not isinstance(param, DTensor))
    largest = max(c.whole_bytes for c in ledger.collectives if c.kind == GATHER)
    total = step("zero3", toy).parameter_bytes
    return largest / total, whole / total


def root_wrapped_too():
    both, _ = wrapped(lambda gpt: [*gpt.blocks, gpt])
    only_root, _ = wrapped(lambda gpt: [gpt])
    _, unsharded = wrapped(lambda gpt: gpt.blocks)
    return [both, only_root, unsharded], both < only_root and unsharded > 0, only_root == 0


def per_parameter_dtensor():
    whole = step("fsdp2").parameter_bytes
    with running("fsdp2") as engine:
        params = list(engine.model.parameters())
        share = storage_bytes(params) / whole
        shapes = [tuple(shape) for shape in (params[0].shape, params[0].to_local().shape)]
    values = [type(params[0]).__name__, *shapes, share]
    return values, all(isinstance(param, DTensor) for param in params) and about(share, 1 / 8)


def equal_chunks():
    held = [step("zero3", toy, rank=rank).held["parameters"] for rank in range(8)]
    return [nbytes / step("zero3", toy).parameter_bytes for nbytes in (min(held), max(held))]


# What is gathered at once.


def most_gathered(model_of, **options) -> float:
    """The largest share of the parameters that ZeRO-3 has gathered at once in a step."""
    gathered = worst_moment(model_of, of=lambda moment: moment.parts[GATHERED], **options)
    return gathered / step("zero3", model_of).parameter_bytes


def layers_at_once():
    """One is at work, and one is prefetched."""
    return [layers * most_gathered(partial(chain, layers)) for layers in (4, 8, 16)]


@functools.cache
def gathered_of_a_gpt() -> list[float]:
    """Shares of an 8-block GPT that are gathered at once: by units, units kept after forward, all as one unit."""
    choices = {}, {"reshard_after_forward": False}, {"units": lambda model: [model]}
    return [most_gathered(small_gpt, **options) for options in choices]


def never_the_entire_model():
    units, *_ = found = gathered_of_a_gpt()
    return found, units < 0.9, min(found) == 1


def the_model_in_full():
    units, *others = found = gathered_of_a_gpt()
    return found, min(others) > 0.9, units > 0.9


def flops_of_a_rank(name: str) -> int:
    with running(name, small_gpt) as engine, FlopCounterMode(display=False) as counter:
        forward(engine).backward()
        return counter.get_total_flops()


def same_computation():
    return [flops_of_a_rank(name) / flops_of_a_rank("single") for name in ("zero3", "fsdp2")]


# In which order.


class Events(TrafficLedger):
    """The order of all-gathers (G), matrix products (C) and reductions (R)."""

    LETTERS = {GATHER: "G", REDUCE: "R", ALL_REDUCE: "R", "aten::mm": "C", "aten::addmm": "C"}

    def __init__(self):
        super().__init__(on_event=lambda what, *_: self.note(self.LETTERS.get(what, "")))
        self.letters = ""

    def note(self, letter: str) -> None:
        self.letters += letter

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.note(self.LETTERS.get(func._schema.name, ""))
        return super().__torch_dispatch__(func, types, args, kwargs)


@functools.cache
def order(name: str, layers: int = 4, **options) -> list[str]:
    """The events of an engine over `layers` layers in [forward, backward, before the update, after its beginning].

    Of the third step: after two it knows the order of its units.
    """
    with running(name, partial(chain, layers), **options) as engine:
        engine.optimizer.register_step_pre_hook(lambda *_: events.note("|"))
        for _ in range(3):
            with Events() as events:
                loss = forward(engine)
                events.note("|")
                loss.backward()
                events.note("|")
                update(engine)
        del engine, loss
    return events.letters.split("|")


def both_passes(name: str, **options) -> str:
    return "|".join(order(name, **options)[:2])


def after_update(letter: str) -> list[int]:
    """How many events of this kind come after the beginning of the update, of FSDP2 and the stages."""
    return [order(name)[3].count(letter) for name in ("fsdp2", *STAGES)]


def no_gather_in_the_end():
    fsdp2, _, zero2, zero3 = found = after_update("G")
    return found, zero3 == fsdp2 == 0 < zero2


def reduced_in_the_update():
    return after_update("R")


def before_the_last_gradient(**options) -> float:
    """The share of its all-reduces that DDP has issued before the last gradient is computed."""
    backward = order("ddp", **options)[1]
    return backward[: backward.rindex("C")].count("R") / backward.count("R")


def overlap_of_ddp():
    return [before_the_last_gradient(bucket_mb=0.02), before_the_last_gradient()]


def per_unit_and_pass():
    """All-gathers and reduce-scatters of a unit in forward and in backward, of ZeRO-3 and FSDP2."""
    found = []
    for name in ("zero3", "fsdp2"):
        for events in order(name)[:2]:
            found += [events.count("G") / 4, events.count("R") / 4]
    return found, [3, 1, 3, 1] in (found[:4], found[4:])


def order_of_one_unit():
    found = [both_passes(name, layers=1) for name in ("zero3", "fsdp2")]
    return found, set(found) == {"GC|GCR"}


def is_ahead(letters: str) -> bool:
    """Whether the gather of the next unit is always issued before the computation of the present one."""
    gathers = letters.count("G")
    per_unit = round(letters.count("C") / gathers)  # 1 in forward, 2 in backward
    before = [letters[:place].count("G") for place, letter in enumerate(letters) if letter == "C"]
    return all(issued >= min(number // per_unit + 2, gathers) for number, issued in enumerate(before))


def prefetch():
    ahead, serial = found = [both_passes("zero3"), both_passes("zero3", prefetch=0)]
    return found, all(map(is_ahead, ahead.split("|"))), any(map(is_ahead, serial.split("|")))


def backward_prefetch():
    """The article names the option (its snippet only imports it): is the next unit gathered early enough?"""
    choices = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None
    orders = [order("fsdp1", backward_prefetch=choice)[1] for choice in choices]
    pre, post, none = (letters.partition("C")[0].count("G") > 1 for letters in orders)
    return orders, pre, post or none
