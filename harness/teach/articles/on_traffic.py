"""Claims about what is sent and when, what is gathered and freed: the collectives that the engines really issue.

Ψ is the number of parameters, and traffic is counted in elements, as in the ZeRO paper. "2Ψ" below is short for
2Ψ (N-1)/N elements, sent by one rank in one step: the factor in front of Ψ is the same for every N. The
articles' models are replaced by small ones: a ratio of counts does not depend on the size. Of time only order is seen
here: what is issued before a computation can hide behind it.
"""

import functools
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from harness.measure.ledger import storage_bytes
from harness.measure.memory_parts import GATHERED, PartsLedger
from harness.measure.traffic import TrafficLedger
from harness.teach.articles.claim import Claims, about, above, listed
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
)

claims = Claims()
STEP = "one step of {}, a fake group of 8, collectives counted"


# How much is sent.


def psi(name: str, *kinds: str, model=chain, **options) -> float:
    """Elements that a rank sends in a step by these collectives, or all, in Ψ."""
    return step(name, model, **options).sent(*kinds)


def sent(*names: str) -> str:
    return listed({name: psi(name) for name in names}, "{} {}Ψ")


@claims.multiple_gpus("ZeRO-2 costs what ZeRO-1 does, so nobody would use ZeRO-1",
                      "1 to 4 micro-batches per step, collectives counted",
                      "ZeRO-1 all-reduces, as this article's does, and at most 2 micro-batches are accumulated; or "
                      "under no_sync() with whole gradients")  # fmt: skip
def never_zero1():
    """ZeRO-2 under no_sync() is a ZeRO-1 that reduce-scatters: whole gradients, sent once."""
    found = {n: (psi("zero1", micro_batches=n), psi("zero2", micro_batches=n)) for n in (1, 2, 3, 4)}
    quiet = psi("zero2", micro_batches=4, no_sync=True)
    measured = "Ψ sent by ZeRO-1 and ZeRO-2 for K micro-batches: " + listed(found, "K={}: {} and {}")
    measured += f"; whole gradients reduce-scattered once (ZeRO-2 under no_sync()) {quiet:g} for any K"
    as_cheap = {n: zero2 <= zero1 for n, (zero1, zero2) in found.items()}
    return measured, as_cheap[1] and as_cheap[2] and quiet <= found[4][0], as_cheap[3]


def ring(ranks: int = 8, chunk: int = 3) -> tuple[float, bool]:
    """Run a ring all-reduce in one process: (what one rank sends, as a share of the buffer; are the sums right?)."""
    data = [torch.arange(rank, rank + ranks * chunk).view(ranks, chunk) for rank in range(ranks)]
    expected, sent = sum(data), 0
    for first in (0, 1):  # the turns that reduce, and those that gather
        for turn in range(ranks - 1):
            index = [(rank + first - turn) % ranks for rank in range(ranks)]
            messages = [data[rank][index[rank]].clone() for rank in range(ranks)]
            sent += messages[0].numel()
            for rank, message in enumerate(messages):
                target = data[(rank + 1) % ranks][index[rank]]
                target.copy_(message if first else message + target)
    return sent / expected.numel(), all(torch.equal(one, expected) for one in data)


# fmt: off
ALL_FREED = "every parameter is freed after forward; what stays gathered is gathered once and not twice"
SHARDED = "the parameters are sharded too (ZeRO-3)"
claims.frameworks("an all-reduce sends 2 (N-1)/N of the buffer", "a ring of 8 run in one process", "", lambda: (
    "{} of the buffer per rank; sums right: {}".format(*ring()), ring() == (2 * 7 / 8, True)))
claims.multiple_gpus("ZeRO-1's all-reduce sends more than its ranks can use", STEP.format("ZeRO-1 and -2"), "",
                     lambda: {"times what the reduce-scatter sends that suffices":
                              psi("zero1", ALL_REDUCE) / psi("zero2", REDUCE)}, says=2)
claims.multiple_gpus("ZeRO-2 saves bandwidth as well as memory", STEP.format("DDP, ZeRO-1 and -2"),
                     "compared with a ZeRO-1 that all-reduces, not with DDP",
                     lambda: (sent("zero1", "zero2", "ddp"), psi("zero2") < psi("zero1"), psi("zero2") < psi("ddp")))
for article, words in ((claims.multiple_gpus, "ZeRO pays for memory with communication"),
                       (claims.sharding_state, "sharding trades memory for communication")):
    article(words, STEP.format("DDP, ZeRO-2 and -3"), SHARDED, lambda: (
        listed({n: (psi(n) / psi("ddp"), step(n).state / step("ddp").state) for n in ("zero2", "zero3")},
               "{} {}x traffic for {}x state") + " of DDP's",
        psi("zero3") > 1.01 * psi("ddp"), psi("zero2") > 1.01 * psi("ddp")))
claims.sharding_state("ZeRO-1 and -2 communicate less than full sharding", STEP.format("the three stages"),
                      "gradients are reduce-scattered", lambda: (
    sent("zero1", "zero2", "zero3"), psi("zero2") < psi("zero3"), psi("zero1") < psi("zero3")))
# ZeRO-2 sends what a ZeRO-1 does that reduce-scatters.
claims.scaling("ZeRO-1 saves memory at no more communication", STEP.format("DDP, ZeRO-1 and -2"),
               "gradients are reduce-scattered, which has the volume that the ZeRO paper gives, and not all-reduced "
               "(another article's ZeRO-1)", lambda: {
    "times DDP's with reduce-scatter + all-gather": psi("zero2") / psi("ddp"),
    "with all-reduce + all-gather": psi("zero1") / psi("ddp")}, says=1)
claims.scaling("communication: DDP low, ZeRO-1 and -2 medium, ZeRO-3 high", STEP.format("every stage"), "", lambda: (
    sent("ddp", "zero1", "zero2", "zero3"),
    psi("ddp") < min(psi("zero1"), psi("zero2")) and max(psi("zero1"), psi("zero2")) < psi("zero3")))
for article, words in ((claims.frameworks, "ZeRO-3's volume is about 1.5 times DDP's"),
                       (claims.wordpress, "ZeRO-3 sends 50% more than DDP")):
    article(words, STEP.format("DDP, ZeRO-3, FSDP2"), ALL_FREED, lambda: (
        "times DDP's: " + listed({
            "zero3": psi("zero3") / psi("ddp"), "fsdp2": psi("fsdp2") / psi("ddp"),
            "a GPT, whose root stays gathered into backward": psi("zero3", model=toy) / psi("ddp", model=toy),
            "units that stay gathered into backward": psi("zero3", reshard_after_forward=False) / psi("ddp")}),
        all(about(psi(n), 1.5 * psi("ddp")) for n in ("zero3", "fsdp2")) and psi("zero3", model=toy) < 3,
        about(psi("zero3", reshard_after_forward=False), 1.5 * psi("ddp"))))
claims.scaling("each rank receives only the gradients of what it owns", STEP.format("ZeRO-2"), "", lambda: (
    {REDUCE: step("zero2").count[REDUCE], ALL_REDUCE: step("zero2").count[ALL_REDUCE],
     "share of the gradients that a rank keeps": step("zero2").held["gradients"] / step("zero2").parameter_bytes},
    step("zero2").count[ALL_REDUCE] == 0
    and about(step("zero2").held["gradients"], step("zero2").parameter_bytes / 8)))
claims.scaling("FSDP is ZeRO-3", "FSDP1, FSDP2 and our ZeRO-3 on one GPT", "", lambda: (
    listed({n: (psi(n, model=toy), step(n, toy).state) for n in ("zero3", "fsdp1", "fsdp2")}, "{} sends {}Ψ, has {} B"),
    all(about(psi(n, model=toy), psi("zero3", model=toy)) and about(step(n, toy).state, step("zero3", toy).state)
        for n in ("fsdp1", "fsdp2"))))
claims.sharding_state("an all-reduce may be needed, depending on the strategy",
                      "fully_shard over 8 and over 2 x 4 ranks", "", lambda: (
    {f"{copies} x {8 // copies}": step("fsdp2", replicas=copies).count[ALL_REDUCE] for copies in (1, 2)},
    step("fsdp2", replicas=2).count[ALL_REDUCE] > step("fsdp2", replicas=1).count[ALL_REDUCE] == 0))
claims.frameworks("accumulating K micro-batches means K times fewer all-reduces", "real DDP, 4 micro-batches",
                  "all but the last micro-batch run under no_sync()", lambda: {
    f"times those of one micro-batch {words} no_sync()":
    step("ddp", micro_batches=4, no_sync=words == "with").count[ALL_REDUCE] / step("ddp").count[ALL_REDUCE]
    for words in ("with", "without")}, says=1)
# fmt: on


@claims.scaling("an all-gather is every rank broadcasting its shard", "8 broadcasts and an all-gather, bytes counted")
def broadcasts():
    with fake_ranks(8), TrafficLedger() as ledger:
        whole, shard = torch.zeros(8, 16), torch.zeros(16)
        for owner in range(8):
            dist.broadcast(whole[owner] if owner else shard, owner)
        in_turns = ledger.sent_bytes
        dist.all_gather_single(whole.view(-1), shard)
    at_once = ledger.sent_bytes - in_turns
    return f"8 broadcasts {in_turns} bytes, 1 all-gather {at_once}", in_turns == at_once


def adapted_gpt():
    """All frozen but the last matrix of each block's MLP, as fine-tuning freezes."""
    model = small_gpt()
    for name, param in model.named_parameters():
        param.requires_grad = "down.weight" in name
    return model


@claims.multiple_gpus("FSDP1 is less optimized than FSDP2",
                      "one step of each, a fake group of 8, bytes counted; no time was measured",
                      "a unit has frozen parameters: FSDP1 reduces gradients for its whole flat parameter")  # fmt: skip
def fsdp1_beside_fsdp2():
    found = {}
    for what, model in (("two thirds frozen", adapted_gpt), ("all trained", small_gpt)):
        old, new = step("fsdp1", model), step("fsdp2", model)
        found[what] = new.peak / old.peak, new.sent() / old.sent()
    measured = "FSDP2's peak and traffic over FSDP1's, " + listed(found, "{}: {} and {}", "; ")
    return measured, *(min(ratios) < 0.95 for ratios in found.values())


# Accumulation, buckets and units.


long_chain = partial(chain, 16)


def peaks(*sizes: float) -> dict[float, float]:
    """The peak of ZeRO-2's step in bytes per parameter, by the size of its buckets (MiB)."""
    runs = {size: step("zero2", long_chain, bucket_mb=size) for size in sizes}
    return {size: run.peak / run.parameters for size, run in runs.items()}


def counts(*sizes: float) -> dict[float, int]:
    """How many collectives ZeRO-2's step has, by the size of its buckets (MiB)."""
    return {size: len(step("zero2", toy, bucket_mb=size).collectives) for size in sizes}


# fmt: off
BUCKET_SIZES = (0, 0.0625, 0.25, 25)
claims.sharding_state("too-small buckets increase overhead", "ZeRO-2 on a GPT, collectives by bucket size", "",
                      lambda: (
    "collectives per step by bucket size: " + listed(found := counts(0, 0.02, 0.1, 25), "{} MiB: {}"),
    list(found.values()) == sorted(found.values(), reverse=True) and found[0] > found[25]))
claims.sharding_state("too-large buckets spike memory", "ZeRO-2, peak by bucket size", "", lambda: (
    "peak of ZeRO-2 by bucket size: " + listed(found := peaks(*BUCKET_SIZES), "{} MiB {}Ψ") + " bytes",
    list(found.values()) == sorted(found.values()) and found[25] > found[0] + 2))
# Over what is held: 4Ψ of weights and 12Ψ/N. Whole gradients are 4Ψ.
claims.multiple_gpus("ZeRO-2 frees gradients as backward goes", "peak of ZeRO-2 over 16 layers",
                     "the model has several buckets", lambda: {
    f"Ψ bytes of peak over the held state with {words}": peaks(size)[size] - 4 - 12 / 8
    for size, words in ((0, "a bucket per parameter"), (25, "one bucket of all"))}, says=lambda extra: extra < 2)
# fmt: on


def matrices(model) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, (nn.Linear, nn.LayerNorm)) and m is not model.head]


@claims.sharding_state("bad wrapping causes excessive all-gathers", "ZeRO-3 on a GPT, three choices of units")
def bad_wrapping():
    choices = {"a unit per layer": matrices, "one per block": None, "the model as one": lambda model: [model]}
    runs = {what: step("zero3", toy, units=units) for what, units in choices.items()}
    found = {what: (run.count[GATHER], run.sent(GATHER)) for what, run in runs.items()}
    (layers, volume), (blocks, least), _ = found.values()
    measured = "all-gathers per step of a 2-block GPT: " + listed(found, "{1} with {0} ({2}Ψ)")
    return measured, layers > 3 * blocks and about(volume, least, 0.05)


def wrapped(units) -> tuple[int, int]:
    """(bytes of the largest all-gather, bytes that stay unsharded) with fully_shard on these modules of a GPT."""
    with fake_ranks(8), TrafficLedger() as ledger:
        model = toy()
        for module in units(model):
            fully_shard(module, mesh=init_device_mesh("cpu", (8,)))
        model(batch_for(model)[0]).sum().backward()
        whole = sum(param.nbytes for param in model.parameters() if not isinstance(param, DTensor))
    return max(c.whole_bytes for c in ledger.collectives if c.kind == GATHER), whole


@claims.multiple_gpus("fully_shard must go on every layer and then on the model",
                      "a GPT wrapped in three ways, all-gathers counted",
                      "the model must never be gathered as one, and parameters outside the layers must be sharded "
                      "too")  # fmt: skip
def root_wrapped_too():
    total = step("zero3", toy).parameter_bytes
    (both, _), (only_root, _), (_, unsharded) = (
        wrapped(units) for units in (lambda gpt: [*gpt.blocks, gpt], lambda gpt: [gpt], lambda gpt: gpt.blocks)
    )
    measured = f"largest all-gather {both / total:.0%} of the model; only the model wrapped {only_root / total:.0%}; "
    measured += f"only the layers wrapped: {unsharded / total:.0%} of the parameters stay unsharded"
    return measured, both < only_root and unsharded > 0, only_root == 0


@claims.sharding_state("FSDP2 shards each parameter by itself, as a DTensor", "fully_shard on 8 ranks")
def per_parameter_dtensor():
    whole = step("fsdp2").parameter_bytes
    with running("fsdp2") as engine:
        params = list(engine.model.parameters())
        share = storage_bytes(params) / whole
        kept = {str(tuple(param.shape)): str(tuple(param.to_local().shape)) for param in params}
    measured = f"{type(params[0]).__name__} parameters, {listed(kept, '{0} kept as {1}')}; {share:g} of the bytes"
    return measured, all(isinstance(param, DTensor) for param in params) and about(share, 1 / 8)


@claims.scaling("the parameters are cut into N chunks (N is blank in our copy), equal ones",
                "ZeRO-3's shards on each of 8 ranks, of all parameters", says=1 / 8)  # fmt: skip
def equal_chunks():
    held = [step("zero3", toy, rank=rank).held["parameters"] for rank in range(8)]
    whole = step("zero3", toy).parameter_bytes
    return {"on the rank with the least": min(held) / whole, "on the one with the most": max(held) / whole}


# What is gathered at once.


AT_ONCE = "gathered bytes through a step of ZeRO-3"


def most_gathered(model_of, **options) -> float:
    """The largest share of the parameters that ZeRO-3 has gathered at once in a step."""
    with running("zero3", model_of, **options) as engine, PartsLedger(engine) as memory:
        for _ in range(2):
            forward(engine).backward()
            update(engine)
    worst = memory.peak_moment(of=lambda moment: moment.parts[GATHERED])
    return worst.parts[GATHERED] / step("zero3", model_of).parameter_bytes


@claims.multiple_gpus("ZeRO-3 frees a layer's parameters right after use", AT_ONCE, says=lambda most: most <= 2.01)
@claims.sharding_state("full parameters exist only around the computation that needs them", AT_ONCE,
                       says=lambda most: most <= 2.01)  # fmt: skip
def freed_right_away():
    """One is at work, and one is prefetched."""
    return {f"of {n} layers at once": n * most_gathered(partial(chain, n)) for n in (4, 8, 16)}


@functools.cache
def gathered_of_a_gpt() -> dict[str, float]:
    """Shares of an 8-block GPT that are gathered at once."""
    return {
        "by units": most_gathered(small_gpt),
        "with reshard_after_forward=False": most_gathered(small_gpt, reshard_after_forward=False),
        "as one unit": most_gathered(small_gpt, units=lambda model: [model]),
    }


# fmt: off
IN_WORDS = "most of an 8-block GPT that is gathered at once: "
claims.scaling("no GPU ever holds the entire model, but for the transient window", AT_ONCE,
               "the model has several units, freed after forward", lambda: (
    IN_WORDS + listed(gathered_of_a_gpt()),
    gathered_of_a_gpt()["by units"] < 0.9, min(gathered_of_a_gpt().values()) == 1))
claims.wordpress("under ZeRO-3 the model exists in full during forward and backward", AT_ONCE,
                 "units are kept after forward, or there is only one", lambda: (
    IN_WORDS + listed(gathered_of_a_gpt()),
    sorted(gathered_of_a_gpt().values())[1] > 0.9, gathered_of_a_gpt()["by units"] > 0.9))
# fmt: on


def flops(name: str) -> int:
    with running(name, small_gpt) as engine, FlopCounterMode(display=False) as counter:
        forward(engine).backward()
        return counter.get_total_flops()


claims.multiple_gpus("under ZeRO every rank runs the same forward and backward", "FLOPs of a rank counted", "",
                     lambda: {f"of one process's in {name}": flops(name) / flops("single")
                              for name in ("zero3", "fsdp2")}, says=1)  # fmt: skip


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


def after_update(letter: str) -> dict[str, int]:
    """How many events of this kind come after the beginning of the update, of every engine."""
    return {name: order(name)[3].count(letter) for name in ("fsdp2", *STAGES)}


def before_the_last_gradient(**options) -> float:
    """The share of its all-reduces that DDP has issued before the last gradient is computed."""
    backward = order("ddp", **options)[1]
    return backward[: backward.rindex("C")].count("R") / backward.count("R")


def per_unit_and_pass() -> tuple:
    counts = {name: tuple(events.count(letter) / 4 for events in order(name)[:2] for letter in "GR")
              for name in ("zero3", "fsdp2")}  # fmt: skip
    form = "{}: forward {} all-gather, {} reduce-scatter; backward {} and {}"
    return listed(counts, form, "; "), (3, 1, 3, 1) in counts.values()


def is_ahead(letters: str) -> bool:
    """Whether the gather of the next unit is always issued before the computation of the present one."""
    gathers = letters.count("G")
    per_unit = round(letters.count("C") / gathers)  # 1 in forward, 2 in backward
    before = [letters[:place].count("G") for place, letter in enumerate(letters) if letter == "C"]
    return all(issued >= min(number // per_unit + 2, gathers) for number, issued in enumerate(before))


def prefetch() -> tuple:
    ahead, serial = order("zero3")[:2], order("zero3", prefetch=0)[:2]
    measured = f"with prefetch {'|'.join(ahead)}, without {'|'.join(serial)} (G gather, C compute, R reduce)"
    return measured, all(map(is_ahead, ahead)), any(map(is_ahead, serial))


def backward_prefetch() -> tuple:
    """The article names the option (its snippet only imports it): is the next unit gathered early enough?"""
    options = {"BACKWARD_PRE": BackwardPrefetch.BACKWARD_PRE, "BACKWARD_POST": BackwardPrefetch.BACKWARD_POST,
               "None": None}  # fmt: skip
    orders = {name: order("fsdp1", backward_prefetch=one)[1] for name, one in options.items()}
    pre, post, none = (letters.partition("C")[0].count("G") > 1 for letters in orders.values())
    return listed(orders, "{}: {}", "; "), pre, post or none


# fmt: off
claims.frameworks("ZeRO-3 gathers a layer three times and reduces it once in forward, and again in backward",
                  STEP.format("ZeRO-3 and FSDP2"), "", per_unit_and_pass)
claims.sharding_state("FSDP: gather, compute, free; in backward gather, compute, reduce-scatter",
                      "order of events of one unit", "",
                      lambda: {name: "|".join(order(name, layers=1)[:2]) for name in ("zero3", "fsdp2")},
                      says=lambda letters: letters == "GC|GCR")
for article, words in ((claims.multiple_gpus, "the gather of layer N+1 can hide behind the forward of layer N"),
                       (claims.sharding_state, "the next layer's gather goes on beside the computation")):
    article(words, "order of events in our ZeRO-3",
            "a unit or more is prefetched; without, each gather waits for the computation in front of it", prefetch)
claims.scaling("BackwardPrefetch overlaps the next gather with the present gradients", "order of events in FSDP1",
               "it is BACKWARD_PRE, the default", backward_prefetch)
claims.multiple_gpus("ZeRO-3 needs no all-gather at the end of the step",
                     "one step of every engine, collectives after the update counted", "", lambda: (
    "all-gathers after the update: " + listed(after := after_update("G")),
    after["zero3"] == after["fsdp2"] == 0 < after["zero2"]))
claims.frameworks("the gradient sync overlaps with the optimizer's step", "order of collectives and update", "",
                  lambda: {f"reductions are still to come when the optimizer starts, {name}": number
                           for name, number in after_update("R").items()}, says=above(0))
claims.frameworks("DDP overlaps the all-reduce with backward by itself", "real DDP, when its all-reduces are issued",
                  "the gradients fill more than one bucket (25 MiB each)", lambda: {
    "of the all-reduces issued before the last gradient": before_the_last_gradient(bucket_mb=0.02),
    "with a single bucket": before_the_last_gradient()}, says=above(0))
# fmt: on
