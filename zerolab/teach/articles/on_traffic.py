"""Claims about what is sent, how often and when: the collectives that the engines really issue.

Of time only order is measured here: what is issued before a computation can hide behind it.
"""

import functools

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from zerolab.measure.fake_ranks import fake_ranks
from zerolab.measure.timeline import Listener, Timeline
from zerolab.measure.traffic import TrafficLedger
from zerolab.teach.articles.claim import (
    FRAMEWORKS,
    MULTIPLE_GPUS,
    SCALING,
    SHARDING_STATE,
    WORDPRESS,
    Outcome,
    claim,
    close,
    depends_on,
    holds_if,
)
from zerolab.teach.articles.runs import (
    ALL_REDUCE,
    GATHER,
    REDUCE,
    batch_for,
    chain,
    forward,
    gpt,
    running,
    size_of,
    small_gpt,
    step,
    whole_model,
)

# How much is sent.


def sent_by(*names: str) -> str:
    """For each engine what a rank sends in a step."""
    return ", ".join(f"{name} {step(name).sent:.4g}Ψ" for name in names)


@claim((MULTIPLE_GPUS, "ZeRO-2: Gradient Partitioning"))
def zero2_saves_bandwidth() -> Outcome:
    """ZeRO-2 reduce-scatters where ZeRO-1 all-reduces, which saves communication bandwidth as well as memory."""
    zero1, zero2, ddp = step("zero1"), step("zero2"), step("ddp")
    kinds = zero1.count(ALL_REDUCE) and not zero1.count(REDUCE) and zero2.count(REDUCE) and not zero2.count(ALL_REDUCE)
    return depends_on(
        "It holds compared with a ZeRO-1 that uses an all-reduce, like this article's. ZeRO-2 sends as much as DDP.",
        holds_with=bool(kinds) and zero2.sent < zero1.sent,
        holds_without=zero2.sent < ddp.sent,
        found=f"sent per step: {sent_by('zero1', 'zero2', 'ddp')}",
    )


@claim((MULTIPLE_GPUS, "ZeRO-1: Optimizer State Partitioning"))
def zero2_costs_what_zero1_does() -> Outcome:
    """Nobody would use ZeRO-1, because ZeRO-2 saves more memory at essentially the same cost."""
    ratios = []
    for micro_batches in (1, 2, 3, 4):
        zero1 = step("zero1", micro_batches=micro_batches)
        ratios.append(step("zero2", micro_batches=micro_batches).sent / zero1.sent)
    whole = step("zero2", micro_batches=4, no_sync=True, find_unused=False).sent / zero1.sent
    return depends_on(
        "It holds for up to 2 micro-batches per step, because ZeRO-2 reduces gradients after each "
        "micro-batch, and ZeRO-1 only once. Under no_sync() ZeRO-2 also reduces only once, but until then "
        "it keeps whole gradients.",
        holds_with=max(ratios[0], ratios[1], whole) < 1.005,
        holds_without=max(ratios) < 1.005,
        found="ZeRO-2 sends {:.4g}, {:.4g}, {:.4g} and {:.4g} times what ZeRO-1 sends ".format(*ratios)
        + f"for 1, 2, 3 and 4 micro-batches, {whole:.4g} times for 4 under no_sync()",
    )


@claim((SCALING, "ZeRO-1: Optimizer State Sharding"))
def zero1_adds_no_communication() -> Outcome:
    """On 8 GPUs each stores 1/8 of the optimizer state, without more communication than DDP."""
    share = step("zero1").held["optimizer"] / step("ddp").held["optimizer"]
    return depends_on(
        "It holds if gradients are reduce-scattered, as ZeRO-2 does. With an all-reduce ZeRO-1 sends 3Ψ.",
        holds_with=close(share, 1 / 8) and close(step("zero2").sent, step("ddp").sent),
        holds_without=close(step("zero1").sent, step("ddp").sent),
        found=f"{share:.4g} of DDP's optimizer state; sent per step: {sent_by('ddp', 'zero2', 'zero1')}",
    )


@claim((SCALING, "Comparison Table: DDP vs. ZeRO vs. FSDP"))
def each_stage_sends_more() -> Outcome:
    """DDP communicates least, ZeRO-1 and ZeRO-2 more, and ZeRO-3 most."""
    ddp, zero1, zero2, zero3 = (step(name).sent for name in ("ddp", "zero1", "zero2", "zero3"))
    return holds_if(
        ddp < min(zero1, zero2) and max(zero1, zero2) < zero3,
        sent_by("ddp", "zero1", "zero2", "zero3"),
        why="An all-reduce is a reduce-scatter and an all-gather, so ZeRO-2 sends as much as DDP. A ZeRO-1 "
        "that uses an all-reduce sends as much as ZeRO-3.",
    )


@claim((FRAMEWORKS, "Concrete Memory Math for ZeRO-3 on 7B"), (WORDPRESS, "The Trade-off: Latency vs. Memory"))
def zero3_sends_half_more_than_ddp() -> Outcome:
    """ZeRO-3 sends 1.5 times what DDP sends."""
    zero3, fsdp2 = (step(name).sent / step("ddp").sent for name in ("zero3", "fsdp2"))
    of_gpt = step("zero3", gpt).sent / step("ddp", gpt).sent
    kept = step("zero3", reshard_after_forward=False).sent / step("ddp").sent
    return depends_on(
        "It holds if every parameter is freed after forward. A unit that stays gathered until backward is "
        "gathered only once.",
        holds_with=close(zero3, 1.5) and close(fsdp2, 1.5),
        holds_without=close(of_gpt, 1.5) and close(kept, 1.5),
        found=f"times DDP's: ZeRO-3 {zero3:.4g}, FSDP2 {fsdp2:.4g}; a GPT whose root stays gathered {of_gpt:.4g}; "
        f"all units stay gathered {kept:.4g}",
    )


@claim((SCALING, "PyTorch FSDP: The Industry Standard"))
def fsdp_is_zero3() -> Outcome:
    """FSDP is PyTorch's implementation of ZeRO-3: it shards parameters, gradients and optimizer state."""
    ours, found, true = step("zero3", gpt), [], True
    for name in ("fsdp1", "fsdp2"):
        fsdp = step(name, gpt)
        sent, held = fsdp.sent / ours.sent, fsdp.state / ours.state
        true = true and close(sent, 1) and close(held, 1)
        found.append(f"{name} sends {sent:.4g} and holds {held:.4g}")
    return holds_if(true, f"of what our ZeRO-3 has, a GPT on 8 ranks: {'; '.join(found)}")


# How many collectives.


@claim((FRAMEWORKS, "Explain gradient accumulation and when to use it"))
def accumulation_saves_all_reduces() -> Outcome:
    """Accumulating gradients over K micro-batches means K times fewer all-reduces (its loop is plain backward())."""
    once = step("ddp").count(ALL_REDUCE)
    quiet = step("ddp", micro_batches=4, no_sync=True).count(ALL_REDUCE) / once
    plain = step("ddp", micro_batches=4).count(ALL_REDUCE) / once
    return depends_on(
        "It holds if all micro-batches except the last run under no_sync(), which its loop does not use.",
        holds_with=quiet == 1,
        holds_without=plain == 1,
        found=f"4 micro-batches with DDP: {quiet:.4g} times the all-reduces of one with no_sync(), {plain:.4g} without",
    )


@claim((FRAMEWORKS, "Concrete Memory Math for ZeRO-3 on 7B"))
def zero3_gathers_a_layer_three_times() -> Outcome:
    """ZeRO-3 does 3 all-gathers and 1 reduce-scatter per layer in forward, and the same in backward."""
    found, counts = [], set()
    for name in ("zero3", "fsdp2"):
        passes = events_of_a_step(name)[:2]
        count = [passes[0].count("G"), passes[0].count("R"), passes[1].count("G"), passes[1].count("R")]
        counts.add(tuple(count))
        found.append("{} {} and {} in forward, {} and {} in backward".format(name, *count))
    return holds_if(
        counts == {(12, 4, 12, 4)},
        f"all-gathers and reduce-scatters of 4 layers: {'; '.join(found)}",
        why="A layer is gathered once in forward and once in backward, and its gradient is reduced once, in backward.",
    )


def shares_with_fully_shard(units) -> tuple[float, float]:
    """fully_shard on these modules of a GPT: shares of the largest all-gather, and of what is not sharded."""
    with fake_ranks(8), TrafficLedger() as ledger:
        model = gpt()
        for module in units(model):
            fully_shard(module, mesh=init_device_mesh("cpu", (8,)))
        model(batch_for(model)[0]).sum().backward()
        whole = sum(param.nbytes for param in model.parameters() if not isinstance(param, DTensor))
    largest = max(one.whole_bytes for one in ledger.collectives if one.kind == GATHER)
    return largest / size_of(gpt), whole / size_of(gpt)


def blocks_and_model(model) -> list:
    return [*model.blocks, model]


def blocks_only(model) -> list:
    return list(model.blocks)


@claim((MULTIPLE_GPUS, "Using ZeRO in PyTorch"))
def fully_shard_goes_on_layers_and_model() -> Outcome:
    """fully_shard must be applied to every layer, and then to the whole model."""
    both, _ = shares_with_fully_shard(blocks_and_model)
    one, _ = shares_with_fully_shard(whole_model)
    _, unsharded = shares_with_fully_shard(blocks_only)
    return depends_on(
        "All three ways train. You must apply it to every layer if the model must never be gathered at "
        "once, and to the whole model if the parameters outside of the layers must be sharded as well.",
        holds_with=both < 0.99 and one == 1 and unsharded > 0.01,
        holds_without=False,
        found=f"largest all-gather, of the model: {both:.4g}; on the model only: {one:.4g}; on the layers only: "
        f"{unsharded:.4g} of the parameters are not sharded",
    )


@claim((MULTIPLE_GPUS, "Introduction"))
def ranks_compute_what_one_process_does() -> Outcome:
    """Under ZeRO all GPUs run the same forward and backward passes: it is no parallelism technique."""
    flops = {}
    for name in ("single", "zero3", "fsdp2"):
        with running(name, small_gpt) as engine, FlopCounterMode(display=False) as counter:
            forward(engine).backward()
            flops[name] = counter.get_total_flops()
    zero3, fsdp2 = flops["zero3"] / flops["single"], flops["fsdp2"] / flops["single"]
    return holds_if(zero3 == fsdp2 == 1, f"FLOPs of a rank, over one process's: ZeRO-3 {zero3:.4g}, FSDP2 {fsdp2:.4g}")


# In which order.

LETTERS = {GATHER: "G", REDUCE: "R", ALL_REDUCE: "R"}


class Events(Listener):
    """The order of all-gathers (G), matrix products (C) and reductions (R), as one text of letters."""

    def __init__(self):
        self.letters = ""

    def mark(self, *_) -> None:
        self.letters += "|"

    def issues(self, collective, tensors) -> None:
        self.letters += LETTERS.get(collective.name, "")

    def multiplies(self) -> None:
        self.letters += "C"


def chain_of_4():
    return chain(4)


def chain_of_1():
    return chain(1)


@functools.cache
def events_of_a_step(name: str, make_model=chain_of_4, **options) -> list[str]:
    """The events of an engine in [forward, backward, before the update, after its beginning], in the third step."""
    with running(name, make_model, **options) as engine:
        for _ in range(3):
            events = Events()
            with Timeline(engine, listener=events):
                handle = engine.optimizer.register_step_pre_hook(events.mark)
                loss = forward(engine)
                events.mark()
                loss.backward()
                events.mark()
                engine.step()
                engine.zero_grad()
                handle.remove()
        del engine, loss
    return events.letters.split("|")


def passes(name: str, make_model=chain_of_4, **options) -> str:
    """The events of forward and backward."""
    return " ".join(events_of_a_step(name, make_model, **options)[:2])


@claim((SHARDING_STATE, "3. FSDP"))
def flow_of_fsdp() -> Outcome:
    """FSDP gathers, computes and frees a layer; in backward it gathers, computes gradients and reduce-scatters them."""
    zero3, fsdp2 = passes("zero3", chain_of_1), passes("fsdp2", chain_of_1)
    return holds_if(zero3 == fsdp2 == "GC GCR", f"one unit, forward and backward: {zero3} in ZeRO-3, {fsdp2} in FSDP2")


@claim((MULTIPLE_GPUS, "ZeRO-3: Parameter Partitioning"), (SHARDING_STATE, "4. Communication Tradeoff"))
def next_gather_hides_behind_forward() -> Outcome:
    """The all-gather of layer N+1 overlaps with the forward of layer N."""
    ahead, serial = passes("zero3"), passes("zero3", prefetch=0)
    return depends_on(
        "It holds if a unit is prefetched. Without prefetch, each gather waits for the computation before it.",
        holds_with=ahead.startswith("GGCGCGCC"),
        holds_without=serial.startswith("GGCGCGCC"),
        found=f"ZeRO-3 with prefetch {ahead}, without {serial}",
    )


@claim((SCALING, "Pro Tip: Communication vs. Computation"))
def backward_prefetch_overlaps() -> Outcome:
    """BackwardPrefetch overlaps the next layer's gather with the current layer's gradient computation."""
    pre = events_of_a_step("fsdp1", backward_prefetch=BackwardPrefetch.BACKWARD_PRE)[1]
    post = events_of_a_step("fsdp1", backward_prefetch=BackwardPrefetch.BACKWARD_POST)[1]
    none = events_of_a_step("fsdp1", backward_prefetch=None)[1]
    return depends_on(
        "It holds for BACKWARD_PRE, the default. BACKWARD_POST gathers after the computation.",
        holds_with=pre.startswith("GGCC"),
        holds_without=post.startswith("GGCC"),
        found=f"backward of FSDP1: BACKWARD_PRE {pre}, BACKWARD_POST {post}, None {none}",
    )


@claim((MULTIPLE_GPUS, "ZeRO-3: Parameter Partitioning"))
def zero3_needs_no_last_all_gather() -> Outcome:
    """ZeRO-3 needs no all-gather at the end of a step, because forward gathers layer by layer."""
    count = {name: events_of_a_step(name)[3].count("G") for name in ("zero1", "zero2", "zero3", "fsdp2")}
    return holds_if(
        count["zero3"] == count["fsdp2"] == 0 < min(count["zero1"], count["zero2"]),
        "all-gathers after the update: " + ", ".join(f"{name} {number}" for name, number in count.items()),
    )


@claim((FRAMEWORKS, "Design the training infrastructure for a 70B model on 256 H100s"))
def reduction_overlaps_with_the_update() -> Outcome:
    """The gradient sync overlaps with the optimizer's step."""
    count = {name: events_of_a_step(name)[3].count("R") for name in ("zero1", "zero2", "zero3", "fsdp2")}
    return holds_if(
        min(count.values()) > 0,
        "reductions after the optimizer starts: " + ", ".join(f"{name} {number}" for name, number in count.items()),
        why="The optimizer needs the reduced gradients. Reductions overlap with backward.",
    )


@claim((FRAMEWORKS, "Data Parallelism (DDP)"))
def ddp_overlaps_by_itself() -> Outcome:
    """DDP overlaps gradient communication with the backward pass automatically."""
    shares = []
    for options in ({"bucket_mb": 0.02}, {}):
        backward = events_of_a_step("ddp", **options)[1]
        shares.append(backward[: backward.rindex("C")].count("R") / backward.count("R"))
    return depends_on(
        "It holds if the gradients fill more than one bucket (25 MiB each).",
        holds_with=shares[0] > 0,
        holds_without=shares[1] > 0,
        found=f"all-reduces issued before the last gradient: {shares[0]:.4g} of them with small buckets, "
        f"{shares[1]:.4g} with one bucket",
    )
