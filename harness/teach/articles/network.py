"""Claims about links and networks: what hides communication, and where it cannot be hidden. Predicted."""

from dataclasses import replace

from harness.measure.gpus import flops_per_token
from harness.plan.events import COMPUTE, Collective, Operation
from harness.plan.hardware import GPUS
from harness.plan.published import ROWS
from harness.run.model import preset
from harness.teach.articles.claim import (
    FRAMEWORKS,
    SCALING,
    SHARDING_STATE,
    WORDPRESS,
    Claim,
    about,
    holds_when,
    verdict,
)
from harness.teach.articles.pipelines import one_forward_one_backward, replay
from harness.teach.articles.planned import ASSUMED, H100, ISLAND, PCIE, long, ms, predicted, setup

HIDDEN, VITAL = 0.05, 1.2  # of a step exposed; a step so many times longer


def nvlink_hides() -> tuple[str, str]:
    ahead, late = predicted(setup("7b", "zero3", 8)), predicted(setup("7b", "zero3", 8, prefetch=0))
    measured = f"predicted, 7B on 8 GPUs: {ahead.exposed:.0%} of the step exposed, without prefetch {late.exposed:.0%}"
    return measured, holds_when("units are prefetched", ahead.exposed < HIDDEN, late.exposed < HIDDEN)


def serialized() -> tuple[str, str]:
    ahead, late = predicted(setup("7b", "zero3", 8)), predicted(setup("7b", "zero3", 8, prefetch=0))
    measured = f"predicted, 7B on 8 GPUs: a step of {ms(ahead)}, without prefetch {ms(late)}, of which the GPU waits "
    return measured + f"{late.exposed:.0%}", verdict(late.step > VITAL * ahead.step and late.exposed > HIDDEN)


def infiniband_matters() -> tuple[str, str]:
    """By two ways to be large: in GPUs, and in what each has to compute while the network works."""
    small, large = predicted(long("70b", 64)), predicted(long("70b", 512))
    little, much = predicted(setup("7b", "zero3", 128)), predicted(long("7b", 128))
    measured = (
        f"predicted, exposed: 70B, 8,192 tokens per GPU, 64 GPUs {small.exposed:.0%}, 512 {large.exposed:.0%}; 7B on "
        f"128, 2,048 tokens {little.exposed:.0%}, 8,192 tokens {much.exposed:.0%}"
    )
    matters = [min(large.exposed, little.exposed) > HIDDEN, max(small.exposed, much.exposed) > HIDDEN]
    return measured, holds_when("there are hundreds of GPUs, or few tokens on each", *matters)


def waiting_more_than_computing() -> tuple[str, str]:
    """Down from the network of the table: at which is more than half of a step exposed?"""
    rates = (400, 200, 100, 50)
    found = [predicted(long("7b", 128), replace(H100, inter_gbps=rate)).exposed for rate in rates]
    measured = "predicted, ZeRO-3, 7B, 8,192 tokens on each of 128 GPUs, exposed: " + ", ".join(
        f"{exposed:.0%} at {rate} GB/s per node" for rate, exposed in zip(rates, found)
    )
    return measured, verdict(found[-1] > 0.5 > found[0])


def fast_links() -> tuple[str, str]:
    few, many = setup("7b", "zero3", 8), setup("7b", "zero3", 8, micro_batch=32, recompute="blocks")
    longer = [predicted(which, PCIE).step / predicted(which).step for which in (few, many)]
    measured = (
        f"predicted, 7B on 8 GPUs: over PCIe 5 a step takes {longer[0]:.1f} times as long with 2,048 tokens per GPU, "
        f"{longer[1]:.2f} times with 65,536"
    )
    return measured, holds_when("a GPU has few tokens per gather", *(ratio > VITAL for ratio in longer))


def topology() -> tuple[str, str]:
    """The same 128 GPUs and events; only how they are linked differs."""
    cases = {"2,048": setup("7b", "zero3", 128), "8,192": long("7b", 128)}
    gains = {tokens: predicted(which).step / predicted(which, ISLAND).step for tokens, which in cases.items()}
    measured = "predicted, 7B on 128 GPUs: in nodes of 8 a step takes " + ", ".join(
        f"{gain:.2f} times as long with {tokens} tokens per GPU" for tokens, gain in gains.items()
    )
    return f"{measured}, as if one node linked all", holds_when(
        "a GPU has few tokens per gather", *(gain > VITAL for gain in gains.values())
    )


def tensor_parallel(width: int, tokens: int, stride: int) -> float:
    """Communication over computation of a block, forward and backward, cut among 8 GPUs: `stride` 1 in a node.

    Two all-reduces of (tokens, width) in bfloat16 each way; 12 width² parameters, 2 FLOPs forward and 4 backward.
    """
    reduce = Collective(COMPUTE, "all-reduce", 2 * tokens * width, 8, stride, "")
    product = Operation(COMPUTE, "mm", 6 * 12 * width**2 * tokens // 8, 0, "bf16", "")
    return 4 * H100.collective_seconds(reduce) / H100.seconds(product)


def tensor_parallel_between_nodes() -> tuple[str, str]:
    cases = [(width, tokens) for width in (4096, 8192, 16384) for tokens in (2048, 8192)]
    inside, outside = ([tensor_parallel(*case, stride) for case in cases] for stride in (1, 8))
    measured = (
        f"predicted, a block on 8 GPUs, width 4,096 to 16,384: all-reduces take {min(inside):.2f} to {max(inside):.2f} "
        f"times the computation in a node, {min(outside):.1f} to {max(outside):.1f} times between eight nodes"
    )
    return measured, verdict(sum(ratio > 1 for ratio in outside) > len(cases) / 2 and max(inside) < 1)


def layer_of_70b() -> tuple[str, str]:
    """Of a step that hides its communication: the computation per block, cut into 4 as in the article's plan."""
    found = predicted(long("70b", 64))
    tokens, blocks = 4 * 2048, preset("70b").layers
    whole = found.times.compute / blocks * 1e3
    measured = (
        f"predicted: {whole:.0f} ms per block of 70B for {tokens:,} tokens, forward twice and backward; "
        f"{whole / 4:.0f} ms on each of 4 GPUs of tensor parallelism, 100 ms for {100 / whole * 4 * tokens:,.0f} tokens"
    )
    return measured, holds_when("one GPU computes the layer, for about 8,000 tokens", *(
        about(time, 100, 0.25) for time in (whole, whole / 4)))  # fmt: skip


def only_three_dimensions() -> tuple[str, str]:
    """Sharded data parallelism alone: published for 64 GPUs, predicted for more."""
    (row,) = [row for row in ROWS if row.model == "MPT 70B"]
    config, peak = row.setup.config, row.cluster.gpu.flops("bf16")
    weights = 12 * config.layers * config.width**2 + config.vocab * config.width
    mfu = row.tokens_per_s * flops_per_token(config, weights, config.seq) / peak
    large = predicted(long("70b", 512))
    measured = (
        f"published: 70B on {row.setup.ranks} H100 with FSDP alone, {row.tokens_per_s:,} tokens/s/GPU, MFU {mfu:.0%}; "
        f"predicted: ZeRO-3 on 512 with 8,192 tokens each, MFU {large.mfu:.0%} ({ASSUMED})"
    )
    return measured, holds_when("there are hundreds of GPUs", large.mfu < 0.3, mfu < 0.3)


def lower_mfu_is_communication() -> tuple[str, str]:
    """Data parallelism from 16 to 128 GPUs; and a pipeline that grows from 2 to 16 stages and sends in no time."""
    few, many = predicted(setup("7b", "zero3", 16)), predicted(setup("7b", "zero3", 128))
    part = (many.times.exposed - few.times.exposed) / (many.step - few.step)
    busy = [1 - replay(one_forward_one_backward, stages, 16).idle for stages in (2, 16)]
    measured = (
        f"predicted, ZeRO-3, 7B: MFU {few.mfu:.0%} on 16 GPUs, {many.mfu:.0%} on 128: steps of {ms(few)} and "
        f"{ms(many)}, exposed {few.times.exposed * 1e3:.0f} and {many.times.exposed * 1e3:.0f} ms; a pipeline of 2 "
        f"and 16 stages, 16 micro-batches, free messages: busy {busy[0]:.0%}, {busy[1]:.0%}"
    )
    condition = "no pipeline stages were added, and all ranks have the same to do"
    return measured, holds_when(condition, part > 0.9, busy[1] > 0.9 * busy[0])


def fifteen_per_cent() -> tuple[str, str]:
    """DDP's all-reduces are timed apart, on two networks, and then twice as fast."""
    ddp = setup("7b", "ddp", 128)
    found = {}
    for where, cluster, faster in (
        ("nodes of 8", H100, replace(H100, inter_gbps=2 * H100.inter_gbps)),
        ("all linked", ISLAND, replace(ISLAND, intra_gbps=2 * ISLAND.gpu.link_gbps)),
    ):
        slow, fast = predicted(ddp, cluster), predicted(ddp, faster)
        found[where] = slow.times.communication / slow.step, slow.exposed, 1 - fast.step / slow.step
    measured = "predicted, DDP, 7B on 128 GPUs: " + "; ".join(
        f"{where}: all-reduces last {lasts:.0%} of the step, {exposed:.0%} exposed, "
        f"twice the bandwidth saves {saves:.0%}"
        for where, (lasts, exposed, saves) in found.items()
    )
    needed = [lasts > 0.15 and saves > 0.05 for lasts, _, saves in found.values()]
    return measured, holds_when("more than 15% is exposed; what backward hides costs nothing", *needed)


def nvlink_bandwidth() -> tuple[str, str]:
    both = {name: 2 * GPUS[name].link_gbps for name in ("a100", "h100")}
    measured = f"both directions: H100 (NVLink 4) {both['h100']} GB/s, A100 (NVLink 3) {both['a100']} GB/s"
    return measured, holds_when("the GPU is an A100", both["a100"] == 600, both["h100"] == 600)


CLAIMS = [
    Claim(SHARDING_STATE, "bad setups serialize communication and compute", ASSUMED, serialized),
    Claim(SHARDING_STATE, "network topology limits scaling", ASSUMED, topology),
    Claim(FRAMEWORKS, "on NVLink overlap hides ZeRO-3's communication", ASSUMED, nvlink_hides),
    Claim(FRAMEWORKS, "on InfiniBand at scale ZeRO-3's communication matters", ASSUMED, infiniband_matters),
    Claim(FRAMEWORKS, "tensor parallelism over InfiniBand is usually not worth it",
          "all-reduces and products of a block, priced by the planner", tensor_parallel_between_nodes),
    Claim(FRAMEWORKS, "a layer of 70B computes for 100 ms", ASSUMED, layer_of_70b),
    Claim(FRAMEWORKS, "70B and more train at production throughput with 3D parallelism only",
          "a published row, and a prediction", only_three_dimensions),
    Claim(FRAMEWORKS, "MFU that falls from 16 to 128 GPUs is communication, not compute",
          f"{ASSUMED}; a pipeline replayed", lower_mfu_is_communication),
    Claim(FRAMEWORKS, "a gradient sync above 15% of the step needs a better interconnect", ASSUMED, fifteen_per_cent),
    Claim(FRAMEWORKS, "NVLink 4.0 of an H100 has 600 GB/s in both directions", "the makers' numbers", nvlink_bandwidth),
    Claim(SCALING, "fast interconnects like NVLink are vital for ZeRO-3", ASSUMED, fast_links),
    Claim(WORDPRESS, "on a slow interconnect GPUs wait more than they compute", ASSUMED, waiting_more_than_computing),
]  # fmt: skip
