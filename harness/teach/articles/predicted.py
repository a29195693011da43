"""Claims about time, and which engine to take: what `./launch.sh plan` predicts, or what others have published.

None of it was measured here. docs/planner.md says what the planner assumes, and how far it is from published
measurements: 2% in the median, up to 9% for tokens per second.
"""

import functools
from dataclasses import replace
from functools import partial

from harness.plan.events import COMPUTE, Collective
from harness.plan.hardware import GPUS, Cluster
from harness.plan.one_rank import Setup
from harness.plan.predict import Prediction, predict
from harness.plan.published import OUT_OF_MEMORY, ROWS
from harness.run.model import GPTConfig, preset
from harness.teach.articles.claim import Claims, above, gb, listed
from harness.teach.articles.runs import GATHER, gpt, step

claims = Claims(tolerance=0.05)  # versions of torch differ a little in the events that are replayed
H100 = Cluster(GPUS["h100"])  # nodes of 8, InfiniBand with 400 GB/s each
EFA = replace(H100, network="efa")  # where a byte takes longer with every node, as published
ISLAND = replace(H100, per_node=128)  # all of 128 GPUs linked as those in a node are
PCIE = Cluster(replace(GPUS["h100"], nvlink=False, link_gbps=64))  # generation 5, no other link
GPU_BYTES = H100.gpu.memory_gb * 1e9
ASSUMED = "H100 in nodes of 8 with 400 GB/s of InfiniBand, bfloat16, 2,048 tokens per sequence"
LONG = {"micro_batch": 4, "recompute": "blocks"}  # 8,192 tokens per GPU: as much as large models have at a time
LARGE = {"micro_batch": 32, "recompute": "blocks"}
FEW_TOKENS = "a GPU has few tokens per gather"
HIDDEN, VITAL = 0.05, 1.2  # of a step exposed; a step so many times longer
PLANNER_ERRS = 0.1  # at most, beside published measurements


@functools.cache
def predicted(model="7b", ranks: int = 8, engine: str = "zero3", cluster: Cluster = H100, **options) -> Prediction:
    """`model`: a preset's name, or a shape. The same setup on another cluster costs no new recording."""
    return predict(Setup(preset(model) if isinstance(model, str) else model, engine, ranks, **options), cluster)


def ms(*predictions: Prediction) -> str:
    return " and ".join(f"{one.step * 1e3:,.0f} ms" for one in predictions)


# What a network hides.

# fmt: off
claims.frameworks("on NVLink overlap hides ZeRO-3's communication", ASSUMED, "units are prefetched", lambda: (
    f"predicted, 7B on 8 GPUs: {predicted().exposed:.0%} of the step exposed, without prefetch "
    f"{predicted(prefetch=0).exposed:.0%}", predicted().exposed < HIDDEN, predicted(prefetch=0).exposed < HIDDEN))
claims.sharding_state("bad setups serialize communication and compute", ASSUMED, "", lambda: (
    f"predicted, 7B on 8 GPUs: steps with and without prefetch of {ms(predicted(), predicted(prefetch=0))}; without, "
    f"the GPU waits {predicted(prefetch=0).exposed:.0%}",
    predicted(prefetch=0).step > VITAL * predicted().step and predicted(prefetch=0).exposed > HIDDEN))
# fmt: on


@claims.frameworks("on InfiniBand at scale ZeRO-3's communication matters", ASSUMED,
                   FEW_TOKENS)  # fmt: skip
def infiniband_matters():
    """By two ways to be large: in GPUs, and in what each has to compute while the network works."""
    small, large = (predicted("70b", ranks, **LONG).exposed for ranks in (64, 512))
    little, much = (predicted(ranks=128, **options).exposed for options in ({}, LONG))
    measured = f"predicted, exposed: 70B, 8,192 tokens per GPU, 64 GPUs {small:.0%}, 512 {large:.0%}; 7B on 128, 2,048 "
    measured += f"tokens {little:.0%}, 8,192 tokens {much:.0%}"
    return measured, little > HIDDEN, max(small, large, much) > HIDDEN


@claims.wordpress("on a slow interconnect GPUs wait more than they compute", ASSUMED,
                  "slow is 12.5 GB/s for a node (100 Gbit/s), and not 50")  # fmt: skip
def waiting_more_than_computing():
    """Down from the network of the table: at which is more than half of a step exposed?"""
    rates = (400, 50, 12.5)
    exposed = {rate: predicted(ranks=128, cluster=replace(H100, inter_gbps=rate), **LONG).exposed for rate in rates}
    measured = listed({rate: f"{share:.0%}" for rate, share in exposed.items()}, "{1} at {0} GB/s per node")
    words = f"predicted, ZeRO-3, 7B, 8,192 tokens on each of 128 GPUs, exposed: {measured}"
    return words, exposed[12.5] > 0.5, exposed[50] > 0.5


# fmt: off
claims.scaling("fast interconnects like NVLink are vital for ZeRO-3", ASSUMED, FEW_TOKENS, lambda: {
    f"times as long over PCIe 5 is a step predicted, 7B on 8 GPUs, {words} tokens each":
    predicted(cluster=PCIE, **tokens).step / predicted(**tokens).step
    for words, tokens in (("2,048", {}), ("65,536", LARGE))}, says=above(VITAL))
# The same 128 GPUs and events; only how they are linked differs.
claims.sharding_state("network topology limits scaling", ASSUMED,
                      f"{FEW_TOKENS}, or a byte takes longer with every node, as on EFA", lambda: {
    f"times as long in nodes of 8 as in one is a step predicted, 7B on 128 GPUs, {words} tokens each":
    predicted(ranks=128, cluster=cluster, **tokens).step / predicted(ranks=128, cluster=ISLAND, **tokens).step
    for words, cluster, tokens in (("EFA, 2,048", EFA, {}), ("InfiniBand, 2,048", H100, {}),
                                   ("InfiniBand, 8,192", H100, LONG))}, says=above(VITAL))
# fmt: on


@claims.frameworks("a gradient sync above 15% of the step needs a better interconnect", ASSUMED,
                   "more than 15% is exposed; what backward hides costs nothing")  # fmt: skip
def fifteen_per_cent():
    """DDP's all-reduces are timed apart, on two networks, and then twice as fast."""
    found, needed = {}, []
    for where, cluster in (("EFA", EFA), ("InfiniBand", H100)):
        faster = replace(cluster, inter_gbps=2 * cluster.between.bus)
        slow, fast = (predicted("7b", 128, "ddp", network) for network in (cluster, faster))
        lasts, saves = slow.times.communication / slow.step, 1 - fast.step / slow.step
        found[where] = f"{lasts:.0%}", f"{slow.exposed:.0%}", f"{saves:.0%}"
        needed.append(lasts > 0.15 and saves > 0.05)
    form = "{}: all-reduces last {} of the step, {} exposed, twice the bandwidth saves {}"
    return f"predicted, DDP, 7B on 128 GPUs: {listed(found, form, '; ')}", *needed


@claims.scaling("layers from 10,000 parameters on are units of their own (min_num_params)",
                "one step of FSDP1 with its policy, gathers counted and priced", "layers are large")  # fmt: skip
def units_by_size():
    """Whether that costs time: gathers counted on a small GPT, and those of a block priced, by layers and as one."""
    model = partial(gpt, layers=4, width=64, tied=False)
    layers, blocks = (step(name, model).count[GATHER] for name in ("fsdp1_article", "fsdp1"))
    times = {}
    for width in (4_096, 768):
        sizes = [2 * parts * width**2 for parts in (3, 1, 4, 4)]  # bytes of its four matrices in bfloat16
        seconds = [H100.collective_seconds(Collective(COMPUTE, "all-gather", size, 8, 1, ""))
                   for size in (*sizes, sum(sizes))]  # fmt: skip
        times[width] = sum(seconds[:-1]) / seconds[-1]
    measured = f"all-gathers of a step: {layers}, with a unit per block {blocks}; predicted time of a block's gathers, "
    measured += "8 H100: " + listed(times, "width {} x{}")
    return measured, *(longer < 1.25 for longer in times.values())


# Which engine, batch and option to take.


def published_rows(model: str, engine: str) -> dict[tuple, float]:
    """{(GPUs, sequences per micro-batch): tokens per second and GPU}"""
    rows = [row for row in ROWS if (row.model, row.setup.engine, row.gpu) == (model, engine, "h100")]
    return {(row.setup.ranks, row.setup.micro_batch): row.tokens_per_s for row in rows}


@claims.frameworks("DDP for what fits on one GPU", "published rows of both (docs/planner.md)")
def ddp_for_what_fits():
    """The one published model that was run with both; ZeRO-1 is the paper's, of 2Ψ. 3% are noise."""
    ddp, zero1 = published_rows("1.34B", "ddp"), published_rows("1.34B", "zero1_2psi")
    faster = {place: ddp[place] / zero1[place] - 1 for place in sorted(ddp.keys() & zero1.keys())}
    rows = [f"{more:+.1%} on {ranks} GPUs with {each} per micro-batch" for (ranks, each), more in faster.items()]
    measured = "published, 1.34B, tokens/s of DDP beside ZeRO-1: " + ", ".join(rows)
    return measured, min(faster.values()) >= -0.03 and max(faster.values()) > 0.03


@claims.frameworks("FSDP or ZeRO-3 for anything larger than one GPU", "published rows (docs/planner.md)",
                   "ZeRO-1 and -2 do not fit either")  # fmt: skip
def fsdp_for_all_that_is_larger():
    """The published model that DDP could not hold: did it need its parameters sharded?"""
    (too_large,), fails = ([row.model for row in OUT_OF_MEMORY if row.setup.engine == name]
                           for name in ("ddp", "zero1_2psi"))  # fmt: skip
    trained = {ranks: rate for (ranks, each), rate in sorted(published_rows(too_large, "zero1_2psi").items())
               if each == 1}  # fmt: skip
    measured = f"published: DDP does not fit for {too_large}; ZeRO-1 trains it at "
    measured += listed(trained, "{1} tokens/s/GPU on {0}") + f", and fails for {', '.join(fails)}"
    return measured, bool(fails), not trained


@claims.wordpress("ZeRO-2 is the sweet spot for mid-sized models", ASSUMED,
                  "communication outweighs computation, as on EFA with few tokens, and buckets are large")  # fmt: skip
def sweet_spot():
    """It is one if it fits where DDP does not, and is faster than what saves more. On 128 GPUs in two networks.

    Its buckets are as large as ZeRO-3's units, blocks, here: each of many small ones pays a ring's latency.
    """
    (zero2, zero3), quick = (
        [predicted("7b", 128, "zero2", network, bucket_mb=800), predicted("7b", 128, cluster=network)]
        for network in (EFA, H100)
    )
    small = predicted("7b", 128, "zero2")
    needed = not predicted("7b", 128, "ddp").fits and zero2.fits
    measured = f"predicted, 7B, 2,048 tokens on each of 128 GPUs; DDP fits: {not needed}; ZeRO-2 has "
    measured += f"{gb(zero2.peak_bytes)}, ZeRO-3 {gb(zero3.peak_bytes)}; their steps, on EFA: {ms(zero2, zero3)}; on "
    measured += f"InfiniBand: {ms(*quick)}, and ZeRO-2 with buckets of 25 MiB {ms(small)}"
    return measured, *(needed and two.step < three.step for two, three in ((zero2, zero3), quick))


@claims.multiple_gpus("ZeRO is not worth it for small models such as BERT", ASSUMED.replace(
                      ", 2,048 tokens per sequence", ""),
                      "the GPU has the 18 GB that DDP needs, and a step that takes 8% less does not count: the planner "
                      "errs by more")  # fmt: skip
def bert():
    """ZeRO-3 is predicted to be smaller, and faster by less than the planner errs. Worth it: where DDP does not fit."""
    shape = GPTConfig(24, 1024, 16, 30_522, 512)  # as large as BERT-large; ours is causal
    ddp, zero3 = (predicted(shape, 8, engine, micro_batch=16) for engine in ("ddp", "zero3"))
    small = GPUS["t4"].memory_gb * 1e9
    measured = "predicted, a GPT of BERT-large's size, 16 x 512 tokens on each of 8 GPUs: DDP and ZeRO-3 take "
    measured += f"{ms(ddp, zero3)} and need {gb(ddp.needed_bytes)} and {gb(zero3.needed_bytes)}"
    no_faster = ddp.step < (1 + PLANNER_ERRS) * zero3.step
    small_needs_it = ddp.needed_bytes > small >= zero3.needed_bytes
    return measured, ddp.fits and ddp.needed_bytes < 18.5e9 and no_faster, not small_needs_it and no_faster


@claims.scaling("ZeRO-3 trains trillions of parameters if the GPUs' memory together is enough", ASSUMED,
                "its units are small enough to be gathered beside the shards")  # fmt: skip
def trillions():
    """Two shapes of 10^12 parameters on GPUs whose memory together is enough: what of it does one GPU need?"""
    shapes = {"552 blocks of 12,288": GPTConfig(552, 12_288, 96, 51_200, 2048),
              "128 blocks of 25,600": GPTConfig(128, 25_600, 160, 51_200, 2048)}  # fmt: skip
    deep, wide = (predicted(shape, 512, recompute="blocks") for shape in shapes.values())
    rows = {name: (f"{one.parameters / 1e12:.2f}e12", f"{16 * one.parameters / 1e12:.0f}", gb(one.needed_bytes))
            for name, one in zip(shapes, (deep, wide))}  # fmt: skip
    measured = listed(rows, "{}: {} parameters, state {} TB, a GPU needs {}", "; ")
    return f"predicted, 512 GPUs with {512 * GPU_BYTES / 1e12:.0f} TB: {measured}", deep.fits, wide.fits


# fmt: off
# Tokens per second with 32 sequences, and with 4 and all activations kept: about as many as fit.
claims.frameworks("a third more compute is worth the larger batch", ASSUMED,
                  "communication is exposed, and the larger batch hides it", lambda: {
    f"times the tokens/s of 4 sequences kept are predicted for 32 recomputed, ZeRO-3, 7B on 8 GPUs, {words}":
    predicted(cluster=cluster, **LARGE).tokens_per_s / predicted(cluster=cluster, micro_batch=4).tokens_per_s
    for words, cluster in (("25 GB/s", replace(H100, intra_gbps=25)), ("NVLink", H100))}, says=above(1))
WITH_8, WITH_4 = {"micro_batch": 8}, {"micro_batch": 4, "accumulate": 2}  # sequences
ON_8 = f"predicted, ZeRO-3, 7B on 8 GPUs of {gb(GPU_BYTES)}: "
claims.frameworks("DDP breaks when the model exceeds the GPU's memory", ASSUMED,
                  "the model counts with its gradients, optimizer state and activations", lambda: (
    f"predicted: DDP needs {gb((ddp := predicted('7b', 128, 'ddp')).needed_bytes)} for 7B: weights "
    f"{gb(2 * ddp.parameters)} in bfloat16, state {gb(16 * ddp.parameters)}, 2,048 tokens; a GPU has {gb(GPU_BYTES)}",
    not ddp.fits and 16 * ddp.parameters > GPU_BYTES, not ddp.fits and 2 * ddp.parameters > GPU_BYTES))
# What is left if the state were cut into ever more shards: does it fit then?
claims.sharding_state("under sharding activations still run out of memory", ASSUMED,
                      "activations are not recomputed", lambda: (
    {f"GB of 80 does a GPU need beside its {gb(2 * predicted().parameters)} of state, predicted for {words}":
     (predicted(**one).needed_bytes - 1.05 * 2 * predicted().parameters) / 1e9
     for words, one in (("8 x 2,048 tokens", WITH_8), ("32 x 2,048 with blocks recomputed", LARGE))}), says=above(80))
claims.frameworks("activation checkpointing allows larger batches", ASSUMED, "", lambda: (
    f"{ON_8}8 sequences need {gb(predicted(**WITH_8).needed_bytes)}, with blocks recomputed 32 need "
    f"{gb(predicted(**LARGE).needed_bytes)}", predicted(**LARGE).fits and not predicted(**WITH_8).fits))
# The same 8 sequences in one piece and in two; and where not the batch but the state is too large.
claims.frameworks("accumulation is for batches that do not fit", ASSUMED, "it is the activations that do not fit",
                  lambda: (
    f"{ON_8}8 sequences need {gb(predicted(**WITH_8).needed_bytes)} at once, {gb(predicted(**WITH_4).needed_bytes)} as "
    f"2 x 4; DDP's state alone is {gb(16 * predicted().parameters)}",
    predicted(**WITH_4).fits and not predicted(**WITH_8).fits, 16 * predicted().parameters < GPU_BYTES))
claims.frameworks("forward in bfloat16 is for speed", ASSUMED, "the GPU has units for it", lambda: (
    f"predicted, ZeRO-3, 7B on 8 H100: {ms(predicted(), predicted(precision='fp32'))} in bfloat16 and float32 (TF32 "
    f"off); a T4 has units for bfloat16: {GPUS['t4'].bf16 is not None}",
    predicted().step < predicted(precision="fp32").step, GPUS["t4"].bf16 is not None))
# fmt: on
