"""Claims about what is sent: the collectives that the engines really issue, counted and weighed.

Ψ is the number of parameters, and traffic is counted in elements, as in the ZeRO paper. "2Ψ" below is short for
2Ψ (N-1)/N elements, sent by one rank in one step: the factor in front of Ψ is the same for every N. The
articles' models are replaced by small ones: a ratio of counts does not depend on the size.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness.measure.traffic import TrafficLedger
from harness.teach.articles.claim import (
    FRAMEWORKS,
    MULTIPLE_GPUS,
    NAMES,
    SCALING,
    SHARDING_STATE,
    WORDPRESS,
    Claim,
    about,
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
    step,
    toy,
    units_of,
)

GATHER, REDUCE, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"


def psi(value: float) -> str:
    return f"{value:.4g}Ψ"


def overcommunicates() -> tuple[str, str]:
    whole, part = step("zero1").sent(ALL_REDUCE), step("zero2").sent(REDUCE)
    return f"all-reduce {psi(whole)}; the reduce-scatter that suffices {psi(part)}", verdict(about(whole, 2 * part))


def zero2_saves_bandwidth() -> tuple[str, str]:
    ddp, zero1, zero2 = (step(name).sent() for name in ("ddp", "zero1", "zero2"))
    measured = f"ZeRO-1 with an all-reduce {psi(zero1)}, ZeRO-2 {psi(zero2)}, DDP {psi(ddp)}"
    return measured, holds_when("compared with a ZeRO-1 that all-reduces, not with DDP", zero2 < zero1, zero2 < ddp)


def zero3_half_as_much_again() -> tuple[str, str]:
    ddp = step("ddp").sent()
    ratios = {
        "every parameter in a unit": step("zero3").sent() / ddp,
        "FSDP2": step("fsdp2").sent() / ddp,
        "a GPT, whose root stays gathered into backward": step("zero3", toy).sent() / step("ddp", toy).sent(),
        "units that stay gathered into backward": step("zero3", reshard_after_forward=False).sent() / ddp,
    }
    all_freed, fsdp2, with_root, kept = ratios.values()
    measured = ", ".join(f"{what} x{ratio:.3g}" for what, ratio in ratios.items())
    met = about(all_freed, 1.5) and about(fsdp2, 1.5) and with_root < 1.5
    condition = "every parameter is freed after forward; what stays gathered is gathered once and not twice"
    return measured, holds_when(condition, met, kept > 1.4)


def per_unit_and_pass() -> tuple[str, str]:
    counts = {}
    for name in ("zero3", "fsdp2"):
        with fake_ranks(8):
            model = chain()
            engine, (inputs, targets) = build(name, model, SGD), batch_for(model)
            with TrafficLedger() as forward:
                loss = loss_for(model)(engine(inputs), targets)
            with TrafficLedger() as backward:
                loss.backward()
            counts[name] = [
                tuple(
                    sum(c.kind == kind for c in ledger.collectives) / len(units_of(model)) for kind in (GATHER, REDUCE)
                )
                for ledger in (forward, backward)
            ]
            del engine
    claimed = [(3, 1), (3, 1)]
    (fg, fr), (bg, br) = counts["zero3"]
    same = "FSDP2 the same" if counts["fsdp2"] == counts["zero3"] else f"FSDP2 {counts['fsdp2']}"
    measured = f"forward {fg:g} all-gather, {fr:g} reduce-scatter; backward {bg:g} and {br:g}; {same}"
    return measured, verdict(claimed in counts.values())


def ring_all_reduce() -> tuple[str, str]:
    """Run a ring of 8 in one process, and count the elements that one rank sends."""
    ranks, chunk = 8, 3
    data = [torch.arange(rank, rank + ranks * chunk).view(ranks, chunk) for rank in range(ranks)]
    expected, sent = sum(data), 0
    for phase in ("reduce", "gather"):
        for turn in range(ranks - 1):
            first = 0 if phase == "reduce" else 1
            index = [(rank + first - turn) % ranks for rank in range(ranks)]
            messages = [data[rank][index[rank]].clone() for rank in range(ranks)]
            sent += messages[0].numel()
            for rank in range(ranks):
                target = data[(rank + 1) % ranks]
                target[index[rank]] = messages[rank] + (target[index[rank]] if phase == "reduce" else 0)
    right = all(torch.equal(one, expected) for one in data)
    claimed = 2 * (ranks - 1) / ranks
    measured = f"{sent / expected.numel():g} of the buffer per rank; 2 x 7/8 = {claimed:g}; sums right: {right}"
    return measured, verdict(right and sent == claimed * expected.numel())


def zero1_free_of_charge() -> tuple[str, str]:
    ddp, all_reduced, scattered = step("ddp").sent(), step("zero1").sent(), step("zero2").sent()
    measured = (
        f"DDP {psi(ddp)}; all-reduce + all-gather {psi(all_reduced)}; reduce-scatter + all-gather {psi(scattered)}"
    )
    condition = "gradients are reduce-scattered (the ZeRO paper), not all-reduced (another article's ZeRO-1)"
    return measured, holds_when(condition, about(scattered, ddp), about(all_reduced, ddp))


def low_medium_high() -> tuple[str, str]:
    ddp, zero1, zero2, zero3 = (step(name).sent() for name in ("ddp", "zero1", "zero2", "zero3"))
    measured = f"DDP {psi(ddp)}, ZeRO-1 {psi(zero1)} ({psi(zero2)} if it reduce-scatters), ZeRO-2 {psi(zero2)}, "
    measured += f"ZeRO-3 {psi(zero3)}"
    return measured, verdict(ddp < min(zero1, zero2) and max(zero1, zero2) < zero3)


def less_than_full_sharding() -> tuple[str, str]:
    zero1, zero2, zero3 = (step(name).sent() for name in ("zero1", "zero2", "zero3"))
    measured = f"ZeRO-1 with an all-reduce {psi(zero1)}, ZeRO-2 {psi(zero2)}, ZeRO-3 {psi(zero3)}"
    return measured, holds_when("gradients are reduce-scattered", zero2 < zero3, zero1 < zero3)


def memory_for_traffic() -> tuple[str, str]:
    ddp, zero2, zero3 = step("ddp"), step("zero2"), step("zero3")
    parts = (f"{n} {s.sent() / ddp.sent():.3g}x traffic for {s.state / ddp.state:.3g}x state" for n, s in
             (("ZeRO-2", zero2), ("ZeRO-3", zero3)))  # fmt: skip
    paid = [s.sent() > 1.01 * ddp.sent() for s in (zero3, zero2)]
    return ", ".join(parts) + " of DDP's", holds_when("the parameters are sharded too (ZeRO-3)", *paid)


def broadcasts() -> tuple[str, str]:
    with fake_ranks(8), TrafficLedger() as ledger:
        shard = torch.zeros(16)
        whole = torch.zeros(8 * 16)
        for owner in range(8):
            dist.broadcast(whole[owner * 16 : owner * 16 + 16] if owner else shard, owner)
        in_turns = ledger.sent_bytes
        dist.all_gather_single(whole, shard)
    at_once = ledger.sent_bytes - in_turns
    issued = step("zero3").count
    measured = f"8 broadcasts {in_turns} bytes, 1 all-gather {at_once}; a step has {issued['broadcast']} broadcasts"
    return measured, verdict(in_turns == at_once)


def own_part_only() -> tuple[str, str]:
    run = step("zero2")
    share = run.held["gradients"] / run.parameter_bytes
    counts = f"{run.count[REDUCE]} reduce-scatter, {run.count[ALL_REDUCE]} all-reduce"
    measured = f"on gradients {counts}; a rank keeps {share:g} of them"
    return measured, verdict(run.count[ALL_REDUCE] == 0 and about(share, 1 / 8))


def accumulation_in_ddp() -> tuple[str, str]:
    plain, quiet = (step("ddp", micro_batches=4, no_sync=no_sync).count[ALL_REDUCE] for no_sync in (False, True))
    one = step("ddp").count[ALL_REDUCE]
    measured = f"K = 4 under DDP: {plain} all-reduces as written, {quiet} with no_sync(), {one} without accumulation"
    return measured, holds_when("all but the last micro-batch run under no_sync()", quiet == one, plain == one)


def never_zero1() -> tuple[str, str]:
    zero1, zero2, quiet = (
        step(name, micro_batches=4, no_sync=no_sync)
        for name, no_sync in (("zero1", False), ("zero2", False), ("zero2", True))
    )
    one = [step(name, micro_batches=k).sent() for k in (1, 2, 3) for name in ("zero1", "zero2")]
    per_k = ", ".join(f"K={k}: {one[2 * k - 2]:g} and {one[2 * k - 1]:g}" for k in (1, 2, 3))
    measured = (
        f"Ψ sent by ZeRO-1 and ZeRO-2 for K micro-batches: {per_k}, K=4: {zero1.sent():g} and {zero2.sent():g}; with "
        f"no_sync() {quiet.sent():g}, at a peak of {quiet.peak / quiet.parameters:.3g}Ψ bytes against ZeRO-1's "
        f"{zero1.peak / zero1.parameters:.3g}Ψ"
    )
    condition = "at most 2 micro-batches are accumulated, or under no_sync() with whole gradients"
    few = one[1] <= one[0] and one[3] <= one[2]
    return measured, holds_when(condition, few and quiet.sent() <= zero1.sent(), one[5] <= one[4])


def sharded_replicas() -> tuple[str, str]:
    with fake_ranks(8):
        model = chain()
        engine = build("fsdp2", model, SGD, mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("copies", "shards")))
        inputs, targets = batch_for(model)
        with TrafficLedger() as ledger:
            loss_for(model)(engine(inputs), targets).backward()
        hybrid = sum(collective.kind == ALL_REDUCE for collective in ledger.collectives)
        del engine
    full = step("fsdp2").count[ALL_REDUCE]
    return f"all-reduces per step of 8 units: 2 copies x 4 shards {hybrid}, 8 shards {full}", verdict(
        hybrid > full == 0
    )


def tensor_parallel() -> tuple[str, str]:
    def all_reduces(plan: dict) -> int:
        with fake_ranks(8):
            model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            parallelize_module(model, init_device_mesh("cpu", (8,)), plan)
            with TrafficLedger() as ledger:
                _ = model(torch.ones(2, 64)) + 0  # waits for it, too
        return sum(collective.kind == ALL_REDUCE for collective in ledger.collectives)

    columns = all_reduces({"0": ColwiseParallel(output_layouts=Replicate())})
    pair = all_reduces({"0": ColwiseParallel(), "2": RowwiseParallel()})
    measured = f"all-reduces in forward: column-parallel layer {columns}, column- and row-parallel pair {pair}"
    return measured, holds_when(
        "a layer is a column-parallel matrix and the row-parallel one behind it", pair == 1, columns == 1
    )


def bad_wrapping() -> tuple[str, str]:
    def gathers(choose) -> tuple[int, float]:
        with fake_ranks(8):
            model = toy()
            engine, (inputs, targets) = build("zero3", model, SGD, units=choose(model)), batch_for(model)
            with TrafficLedger() as ledger:
                loss_for(model)(engine(inputs), targets).backward()
            kinds = [c for c in ledger.collectives if c.kind == GATHER]
            del engine
        return len(kinds), sum(c.whole_bytes for c in kinds) / step("zero3", toy).parameter_bytes

    def matrices(model):
        return [m for m in model.modules() if isinstance(m, (nn.Linear, nn.LayerNorm)) and m is not model.head]

    (small, small_psi), (block, block_psi) = gathers(matrices), gathers(lambda model: list(model.blocks))
    (one, one_psi) = gathers(lambda model: [model])
    measured = (
        f"all-gathers per step of a 2-block GPT: {small} with a unit per layer ({psi(small_psi)}), "
        f"{block} per block ({psi(block_psi)}), {one} with the model as one ({psi(one_psi)})"
    )
    return measured, verdict(small > 3 * block and about(small_psi, block_psi, 0.05))


def small_buckets() -> tuple[str, str]:
    sizes = (0, 0.02, 0.1, 25)
    runs = [step("zero2", toy, bucket_mb=size) for size in sizes]
    counts = [sum(run.count.values()) for run in runs]
    sent = [run.sent() for run in runs]
    measured = ", ".join(f"{size:g} MiB: {count}" for size, count in zip(sizes, counts))
    same = about(max(sent), min(sent), 0.01)
    return f"collectives per step by bucket size: {measured}; bytes the same: {same}", verdict(
        same and counts == sorted(counts, reverse=True) and counts[0] > counts[-1]
    )


def fsdp_is_zero3() -> tuple[str, str]:
    runs = {name: step(name, toy) for name in ("zero3", "fsdp1", "fsdp2")}
    measured = ", ".join(f"{NAMES[name]} {psi(run.sent())} and {run.state:,} bytes" for name, run in runs.items())
    ours = runs["zero3"]
    alike = all(about(r.sent(), ours.sent()) and about(r.state, ours.state) for r in runs.values())
    return f"sent and held: {measured}", verdict(alike)


_STEP = "one step of {}, a fake group of 8, collectives counted"
CLAIMS = [
    Claim(MULTIPLE_GPUS, "ZeRO-1's all-reduce sends more than its ranks can use",
          _STEP.format("ZeRO-1 and -2"), overcommunicates),
    Claim(MULTIPLE_GPUS, "ZeRO-2 saves bandwidth as well as memory",
          _STEP.format("DDP, ZeRO-1 and -2"), zero2_saves_bandwidth),
    Claim(MULTIPLE_GPUS, "ZeRO-2 costs what ZeRO-1 does, so nobody would use ZeRO-1",
          "1 to 4 micro-batches per step, collectives counted", never_zero1),
    Claim(MULTIPLE_GPUS, "ZeRO pays for memory with communication",
          _STEP.format("DDP, ZeRO-2 and -3"), memory_for_traffic),
    Claim(SHARDING_STATE, "sharding trades memory for communication",
          _STEP.format("DDP, ZeRO-2 and -3"), memory_for_traffic),
    Claim(SHARDING_STATE, "ZeRO-1 and -2 communicate less than full sharding",
          _STEP.format("the three stages"), less_than_full_sharding),
    Claim(SHARDING_STATE, "an all-reduce may be needed, depending on the strategy",
          "fully_shard over 8 and over 2 x 4 ranks", sharded_replicas),
    Claim(SHARDING_STATE, "too-small buckets increase overhead",
          "ZeRO-2 on a GPT, collectives by bucket size", small_buckets),
    Claim(SHARDING_STATE, "bad wrapping causes excessive all-gathers",
          "ZeRO-3 on a GPT, three choices of units", bad_wrapping),
    Claim(FRAMEWORKS, "an all-reduce sends 2 (N-1)/N of the buffer", "a ring of 8 run in one process", ring_all_reduce),
    Claim(FRAMEWORKS, "ZeRO-3's volume is about 1.5 times DDP's",
          _STEP.format("DDP, ZeRO-3, FSDP2"), zero3_half_as_much_again),
    Claim(FRAMEWORKS, "ZeRO-3 gathers a layer three times and reduces it once in forward, and again in backward",
          _STEP.format("ZeRO-3 and FSDP2"), per_unit_and_pass),
    Claim(FRAMEWORKS, "tensor parallelism all-reduces after every layer",
          "an MLP under torch's tensor parallelism on 8 ranks", tensor_parallel),
    Claim(FRAMEWORKS, "accumulating K micro-batches means K times fewer all-reduces",
          "real DDP, 4 micro-batches", accumulation_in_ddp),
    Claim(SCALING, "ZeRO-1 saves memory at no more communication",
          _STEP.format("DDP, ZeRO-1 and -2"), zero1_free_of_charge),
    Claim(SCALING, "communication: DDP low, ZeRO-1 and -2 medium, ZeRO-3 high",
          _STEP.format("every stage"), low_medium_high),
    Claim(SCALING, "an all-gather is every rank broadcasting its shard",
          "8 broadcasts and an all-gather, bytes counted", broadcasts),
    Claim(SCALING, "each rank receives only the gradients of what it owns", _STEP.format("ZeRO-2"), own_part_only),
    Claim(SCALING, "FSDP is ZeRO-3", "FSDP1, FSDP2 and our ZeRO-3 on one GPT", fsdp_is_zero3),
    Claim(WORDPRESS, "ZeRO-3 sends 50% more than DDP", _STEP.format("DDP, ZeRO-3, FSDP2"), zero3_half_as_much_again),
]  # fmt: skip
