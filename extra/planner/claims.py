"""The articles' claims about time, and about the choice of an engine: predicted by the planner, or published by others.

    python -m extra.planner.claims [--only TEXT ...] [--json FILE]

None of it was measured here. README.md describes what the planner assumes, and its error against published
measurements. Except where a claim names another machine, a prediction is for H100 in nodes of 8 with 400 GB/s of
InfiniBand, in bfloat16, with 2,048 tokens per sequence. A GPU has one sequence, if nothing else is mentioned.
"""

import functools
import sys
from dataclasses import replace

from extra.planner.hardware import GPUS, Cluster
from extra.planner.one_rank import Setup
from extra.planner.predict import Prediction, predict
from extra.planner.published import OUT_OF_MEMORY, ROWS
from zerolab.run.model import GPTConfig, preset
from zerolab.teach.articles.__main__ import main
from zerolab.teach.articles.claim import (
    FRAMEWORKS,
    MULTIPLE_GPUS,
    SCALING,
    SHARDING_STATE,
    WORDPRESS,
    Outcome,
    claim,
    depends_on,
    holds_if,
)

H100 = Cluster(GPUS["h100"])  # nodes of 8, InfiniBand with 400 GB/s each
EFA = replace(H100, network="efa")  # where a byte takes longer with every node, as published
ISLAND = replace(H100, per_node=128)  # all of 128 GPUs linked as those in a node are
PCIE = Cluster(replace(GPUS["h100"], nvlink=False, link_gbps=64))  # generation 5, no other link
LONG = {"micro_batch": 4, "recompute": "blocks"}  # 8,192 tokens per GPU: as much as large models have at a time
LARGE = {"micro_batch": 32, "recompute": "blocks"}
HIDDEN = 0.05  # at most this share of the step is exposed
VITAL = 1.2  # a step takes at least this many times as long
PLANNER_ERRS = 0.1  # at most, against published measurements
GB = 1e9


@functools.cache
def predicted(model="7b", ranks: int = 8, engine: str = "zero3", cluster: Cluster = H100, **options) -> Prediction:
    """`model`: a preset's name, or a shape. The same setup on another cluster costs no new recording."""
    return predict(Setup(preset(model) if isinstance(model, str) else model, engine, ranks, **options), cluster)


# Communication that a network hides.


@claim((FRAMEWORKS, "Concrete Memory Math for ZeRO-3 on 7B"))
def nvlink_hides() -> Outcome:
    """On NVLink ZeRO-3's communication is hidden by overlap."""
    ahead, serial = predicted().exposed, predicted(prefetch=0).exposed
    return depends_on(
        "It holds if units are prefetched.",
        holds_with=ahead < HIDDEN,
        holds_without=serial < HIDDEN,
        found=f"predicted, 7B on 8 GPUs: {ahead:.4g} of the step exposed, without prefetch {serial:.4g}",
    )


@claim((SHARDING_STATE, "4. Communication Tradeoff"))
def bad_setups_serialize() -> Outcome:
    """Bad setups serialize communication and compute, so GPUs wait."""
    ahead, serial = predicted(), predicted(prefetch=0)
    return holds_if(
        serial.step > VITAL * ahead.step and serial.exposed > HIDDEN,
        f"predicted, 7B on 8 GPUs: steps of {ahead.step * 1e3:.4g} ms with prefetch and {serial.step * 1e3:.4g} ms "
        f"without; without, {serial.exposed:.4g} of the step is exposed",
    )


@claim((FRAMEWORKS, "Concrete Memory Math for ZeRO-3 on 7B"))
def infiniband_matters() -> Outcome:
    """On InfiniBand at scale ZeRO-3's communication matters.

    There are two ways to be large: in GPUs, and in what each has to compute while the network works.
    """
    small, large = predicted("70b", 64, **LONG).exposed, predicted("70b", 512, **LONG).exposed
    little, much = predicted(ranks=128).exposed, predicted(ranks=128, **LONG).exposed
    return depends_on(
        "It matters if a GPU has few tokens per gather.",
        holds_with=little > HIDDEN,
        holds_without=max(small, large, much) > HIDDEN,
        found=f"predicted, exposed: 70B, 8,192 tokens per GPU, 64 GPUs {small:.4g}, 512 {large:.4g}; "
        f"7B on 128, 2,048 tokens {little:.4g}, 8,192 tokens {much:.4g}",
    )


@claim((WORDPRESS, "The Trade-off: Latency vs. Memory"))
def waiting_more_than_computing() -> Outcome:
    """On a slow interconnect GPUs wait for parameter shards longer than they compute."""
    shares = {}
    for rate in (400, 50, 12.5):
        shares[rate] = predicted(ranks=128, cluster=replace(H100, inter_gbps=rate), **LONG).exposed
    return depends_on(
        "It holds if slow is 12.5 GB/s for a node (100 Gbit/s), and not 50 GB/s.",
        holds_with=shares[12.5] > 0.5,
        holds_without=shares[50] > 0.5,
        found="predicted, 7B, 8,192 tokens on each of 128 GPUs, exposed: "
        + ", ".join(f"{share:.4g} at {rate} GB/s per node" for rate, share in shares.items()),
    )


@claim((SCALING, "Pro Tip: Communication vs. Computation"))
def nvlink_is_vital() -> Outcome:
    """Fast interconnects such as NVLink are vital for ZeRO-3."""
    few = predicted(cluster=PCIE).step / predicted().step
    many = predicted(cluster=PCIE, **LARGE).step / predicted(**LARGE).step
    return depends_on(
        "It holds if a GPU has few tokens per gather.",
        holds_with=few >= VITAL,
        holds_without=many >= VITAL,
        found=f"predicted, a step over PCIe 5, 7B on 8 GPUs: {few:.4g} times as long with 2,048 tokens each, "
        f"{many:.4g} times with 65,536",
    )


def times_as_long_in_nodes(cluster: Cluster, **options) -> float:
    """A step of 128 GPUs in nodes of 8, over a step in one node of 128."""
    return predicted(ranks=128, cluster=cluster, **options).step / predicted(ranks=128, cluster=ISLAND, **options).step


@claim((SHARDING_STATE, "7. Production Debugging"))
def topology_limits_scaling() -> Outcome:
    """Network topology limits scaling."""
    efa, few, many = times_as_long_in_nodes(EFA), times_as_long_in_nodes(H100), times_as_long_in_nodes(H100, **LONG)
    return depends_on(
        "It holds if a GPU has few tokens per gather, or if a byte takes longer with every node, as on EFA.",
        holds_with=min(efa, few) >= VITAL,
        holds_without=many >= VITAL,
        found=f"predicted, 7B on 128 GPUs, a step in nodes of 8 over a step in one node: EFA {efa:.4g} with 2,048 "
        f"tokens each, InfiniBand {few:.4g} with 2,048, {many:.4g} with 8,192",
    )


@claim((FRAMEWORKS, "Your 128-GPU job shows 85% MFU at 16 GPUs but 40% MFU at 128"))
def sync_above_15_per_cent() -> Outcome:
    """If the gradient sync takes more than 15% of a step, a better interconnect is needed.

    DDP's all-reduces are timed apart, on two networks, and then with twice the bandwidth.
    """
    found, needed = [], []
    for name, cluster in (("EFA", EFA), ("InfiniBand", H100)):
        faster = replace(cluster, inter_gbps=2 * cluster.between.bus)
        slow, fast = predicted("7b", 128, "ddp", cluster), predicted("7b", 128, "ddp", faster)
        lasts, saves = slow.times.communication / slow.step, 1 - fast.step / slow.step
        found.append(
            f"{name}: all-reduces take {lasts:.4g} of the step, {slow.exposed:.4g} exposed, twice the bandwidth saves "
            f"{saves:.4g}"
        )
        needed.append(lasts > 0.15 and saves > 0.05)
    return depends_on(
        "It holds if more than 15% is exposed. A sync that backward hides costs nothing.",
        holds_with=needed[0],
        holds_without=needed[1],
        found=f"predicted, DDP, 7B on 128 GPUs: {'; '.join(found)}",
    )


# The choice of an engine.


@claim((FRAMEWORKS, "Key Takeaways"))
def zero3_for_anything_larger() -> Outcome:
    """FSDP or ZeRO-3 for any model that does not fit one GPU.

    The published model that DDP could not hold: did it need its parameters sharded? ZeRO-1 is the paper's, of 2Ψ.
    """
    (model,) = [row.model for row in OUT_OF_MEMORY if row.setup.engine == "ddp"]
    fails = [row.model for row in OUT_OF_MEMORY if row.setup.engine == "zero1_2psi"]
    trained = {}
    for row in ROWS:
        if (row.model, row.setup.engine, row.gpu) == (model, "zero1_2psi", "h100") and row.setup.micro_batch == 1:
            trained[row.setup.ranks] = row.tokens_per_s
    rates = ", ".join(f"{trained[ranks]:,.0f} on {ranks}" for ranks in sorted(trained))
    return depends_on(
        "It holds if ZeRO-1 and ZeRO-2 do not fit either.",
        holds_with=bool(fails),
        holds_without=not trained,
        found=f"published: DDP does not fit for {model}; ZeRO-1 trains it at {rates} GPUs, in tokens/s/GPU, and fails "
        f"for {', '.join(fails)}",
    )


@claim((WORDPRESS, "ZeRO Stages: Sharding the Infrastructure"))
def zero2_is_the_sweet_spot() -> Outcome:
    """ZeRO-2 is the sweet spot for most mid-sized training runs.

    It is one if it fits where DDP does not, and is faster than ZeRO-3, which saves more. Its buckets are as large as
    ZeRO-3's units here: each of many small ones pays a ring's latency.
    """
    found, faster = [], []
    for name, network in (("EFA", EFA), ("InfiniBand", H100)):
        zero2, zero3 = predicted("7b", 128, "zero2", network, bucket_mb=800), predicted("7b", 128, cluster=network)
        found.append(f"steps on {name} {zero2.step * 1e3:.4g} ms and {zero3.step * 1e3:.4g} ms")
        faster.append(zero2.step < zero3.step)
    small = predicted("7b", 128, "zero2")
    needed = not predicted("7b", 128, "ddp").fits and zero2.fits
    return depends_on(
        "It holds if communication takes longer than computation, as on EFA with few tokens, and buckets are large.",
        holds_with=needed and faster[0],
        holds_without=needed and faster[1],
        found=f"predicted, 7B, 2,048 tokens on each of 128 GPUs, where DDP {'does not fit' if needed else 'fits'}: "
        f"ZeRO-2 has {zero2.peak_bytes / GB:.4g} GB and ZeRO-3 {zero3.peak_bytes / GB:.4g} GB; {'; '.join(found)}; "
        f"ZeRO-2 with buckets of 25 MiB on InfiniBand {small.step * 1e3:.4g} ms",
    )


@claim((MULTIPLE_GPUS, "Conclusion"))
def zero_is_not_for_bert() -> Outcome:
    """ZeRO is not worth it for smaller models such as BERT."""
    shape = GPTConfig(24, 1024, 16, 30_522, 512)  # as large as BERT-large; ours is causal
    ddp, zero3 = predicted(shape, 8, "ddp", micro_batch=16), predicted(shape, 8, micro_batch=16)
    # Both predictions may err, in different directions.
    no_faster = (1 - PLANNER_ERRS) * ddp.step < (1 + PLANNER_ERRS) * zero3.step
    t4_needs_it = ddp.needed_bytes > GPUS["t4"].memory_gb * GB >= zero3.needed_bytes
    return depends_on(
        "It holds if the GPU has the 18 GB that DDP needs. A step that takes 9% less does not count, because each "
        "of the two predictions may err by 10%.",
        holds_with=ddp.fits and ddp.needed_bytes < 18.5 * GB and no_faster,
        holds_without=not t4_needs_it and no_faster,
        found="predicted, a GPT of BERT-large's size, 16 x 512 tokens on each of 8 GPUs: DDP and ZeRO-3 take "
        f"{ddp.step * 1e3:.4g} ms and {zero3.step * 1e3:.4g} ms, and need {ddp.needed_bytes / GB:.4g} GB and "
        f"{zero3.needed_bytes / GB:.4g} GB",
    )


@claim((SCALING, "ZeRO-3: Parameter Sharding"))
def trillions_of_parameters() -> Outcome:
    """ZeRO-3 trains trillions of parameters, provided the cluster's memory together is enough."""
    deep = predicted(GPTConfig(552, 12_288, 96, 51_200, 2048), 512, recompute="blocks")
    wide = predicted(GPTConfig(128, 25_600, 160, 51_200, 2048), 512, recompute="blocks")
    return depends_on(
        "It holds if units are small enough to be gathered next to the shards.",
        holds_with=deep.fits,
        holds_without=wide.fits,
        found="predicted, 10^12 parameters on 512 GPUs with 41 TB, of which the state takes 16 TB: a GPU needs "
        f"{deep.needed_bytes / GB:.4g} GB for 552 blocks of width 12,288, {wide.needed_bytes / GB:.4g} GB for 128 "
        "blocks of width 25,600",
    )


@claim((FRAMEWORKS, "Gradient Checkpointing (Activation Recomputation)"))
def recomputing_is_worth_the_larger_batch() -> Outcome:
    """A third more compute is worth the larger batch that recomputed activations allow.

    Tokens per second of 32 sequences, over 4 with all activations kept: about as many as fit.
    """
    ratios = []
    for cluster in (replace(H100, intra_gbps=25), H100):
        large, small = predicted(cluster=cluster, **LARGE), predicted(cluster=cluster, micro_batch=4)
        ratios.append(large.tokens_per_s / small.tokens_per_s)
    return depends_on(
        "It holds if communication is exposed, and the larger batch hides it.",
        holds_with=ratios[0] > 1,
        holds_without=ratios[1] > 1,
        found="predicted, ZeRO-3, 7B on 8 GPUs: 32 recomputed sequences have "
        f"{ratios[0]:.4g} times the tokens/s of 4 kept ones with 25 GB/s, {ratios[1]:.4g} times with NVLink",
    )


CLAIMS = [
    nvlink_hides,
    bad_setups_serialize,
    infiniband_matters,
    waiting_more_than_computing,
    nvlink_is_vital,
    topology_limits_scaling,
    sync_above_15_per_cent,
    zero3_for_anything_larger,
    zero2_is_the_sweet_spot,
    zero_is_not_for_bert,
    trillions_of_parameters,
    recomputing_is_worth_the_larger_batch,
]

if __name__ == "__main__":
    sys.exit(main(claims=CLAIMS))
