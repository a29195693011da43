"""The articles' claims about time, and which engine to take: what the planner predicts, or what others have published.

`python -m extra.planner.claims` runs them; the options are those of `./launch.sh articles`. None of it was measured
here. README.md says what the planner assumes, and how far it is from published measurements. The words are in
claims.toml, as those of zerolab/teach/articles are in theirs.
"""

import functools
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from extra.planner.events import COMPUTE, Collective
from extra.planner.hardware import GPUS, Cluster
from extra.planner.one_rank import Setup
from extra.planner.predict import Prediction, predict
from extra.planner.published import OUT_OF_MEMORY, ROWS
from zerolab.run.model import GPTConfig, preset
from zerolab.teach.articles.__main__ import main
from zerolab.teach.articles.claim import Claim, claims_beside
from zerolab.teach.articles.runs import gpt, step

H100 = Cluster(GPUS["h100"])  # nodes of 8, InfiniBand with 400 GB/s each
EFA = replace(H100, network="efa")  # where a byte takes longer with every node, as published
ISLAND = replace(H100, per_node=128)  # all of 128 GPUs linked as those in a node are
PCIE = Cluster(replace(GPUS["h100"], nvlink=False, link_gbps=64))  # generation 5, no other link
LONG = {"micro_batch": 4, "recompute": "blocks"}  # 8,192 tokens per GPU: as much as large models have at a time
LARGE = {"micro_batch": 32, "recompute": "blocks"}
HIDDEN, VITAL = 0.05, 1.2  # of a step exposed; a step so many times longer
PLANNER_ERRS = 0.1  # at most, beside published measurements


@functools.cache
def predicted(model="7b", ranks: int = 8, engine: str = "zero3", cluster: Cluster = H100, **options) -> Prediction:
    """`model`: a preset's name, or a shape. The same setup on another cluster costs no new recording."""
    return predict(Setup(preset(model) if isinstance(model, str) else model, engine, ranks, **options), cluster)


def gigabytes(sizes: Iterable[float]) -> list[float]:
    """In GB of 10^9 bytes."""
    return [nbytes / 1e9 for nbytes in sizes]


def milliseconds(*predictions: Prediction) -> list[float]:
    return [one.step * 1e3 for one in predictions]


# Communication that a network hides.


def nvlink_hides():
    ahead, serial = found = [predicted().exposed, predicted(prefetch=0).exposed]
    return found, ahead < HIDDEN, serial < HIDDEN


def serialized():
    ahead, serial = predicted(), predicted(prefetch=0)
    true = serial.step > VITAL * ahead.step and serial.exposed > HIDDEN
    return [*milliseconds(ahead, serial), serial.exposed], true


def infiniband_matters():
    """By two ways to be large: in GPUs, and in what each has to compute while the network works."""
    found = [
        predicted("70b", 64, **LONG).exposed,
        predicted("70b", 512, **LONG).exposed,
        predicted(ranks=128).exposed,
        predicted(ranks=128, **LONG).exposed,
    ]
    small, large, little, much = found
    return found, little > HIDDEN, max(small, large, much) > HIDDEN


def waiting_more_than_computing():
    """Down from the network of the table: at which is more than half of a step exposed?"""
    found = []
    for rate in (400, 50, 12.5):
        found.append(predicted(ranks=128, cluster=replace(H100, inter_gbps=rate), **LONG).exposed)
    _, medium, slow = found
    return found, slow > 0.5, medium > 0.5


def without_nvlink():
    """Times as long over PCIe, with few tokens and with many."""
    return [predicted(cluster=PCIE, **tokens).step / predicted(**tokens).step for tokens in ({}, LARGE)]


def topology():
    """Times as long in nodes as in one: the same 128 GPUs and events; only how they are linked differs."""
    found = []
    for cluster, tokens in ((EFA, {}), (H100, {}), (H100, LONG)):
        in_nodes, in_one = (predicted(ranks=128, cluster=one, **tokens).step for one in (cluster, ISLAND))
        found.append(in_nodes / in_one)
    return found


def fifteen_per_cent():
    """DDP's all-reduces are timed apart, on two networks, and then twice as fast."""
    found, needed = [], []
    for cluster in (EFA, H100):
        faster = replace(cluster, inter_gbps=2 * cluster.between.bus)
        slow, fast = (predicted("7b", 128, "ddp", network) for network in (cluster, faster))
        lasts, saves = slow.times.communication / slow.step, 1 - fast.step / slow.step
        found += [lasts, slow.exposed, saves]
        needed.append(lasts > 0.15 and saves > 0.05)
    return found, *needed


def units_by_size():
    """Whether that costs time: gathers counted on a small GPT, and those of a block priced, by layers and as one."""
    model = partial(gpt, layers=4, width=64, tied=False)
    layers, blocks = (step(name, model)["all-gathers"] for name in ("fsdp1_article", "fsdp1"))
    times = []
    for width in (4_096, 768):
        sizes = [2 * parts * width**2 for parts in (3, 1, 4, 4)]  # bytes of its four matrices in bfloat16
        *each, whole = (seconds_of_a_gather(size) for size in (*sizes, sum(sizes)))
        times.append(sum(each) / whole)
    return [layers, blocks, *times], *(longer < 1.25 for longer in times)


def seconds_of_a_gather(nbytes: int) -> float:
    return H100.collective_seconds(Collective(COMPUTE, "all-gather", nbytes, 8, 1, ""))


# Which engine, batch and option to take.


def published_rows(model: str, engine: str) -> dict[tuple, float]:
    """{(GPUs, sequences per micro-batch): tokens per second and GPU}"""
    rows = [row for row in ROWS if (row.model, row.setup.engine, row.gpu) == (model, engine, "h100")]
    return {(row.setup.ranks, row.setup.micro_batch): row.tokens_per_s for row in rows}


def ddp_for_what_fits():
    """The one published model that was run with both; ZeRO-1 is the paper's, of 2Ψ. 3% are noise."""
    ddp, zero1 = published_rows("1.34B", "ddp"), published_rows("1.34B", "zero1_2psi")
    faster = [ddp[place] / zero1[place] for place in sorted(ddp.keys() & zero1.keys())]
    return [min(faster), max(faster)], min(faster) >= 0.97 and max(faster) > 1.03


def fsdp_for_all_that_is_larger():
    """The published model that DDP could not hold: did it need its parameters sharded?"""
    too_large = [row.model for row in OUT_OF_MEMORY if row.setup.engine == "ddp"]
    fails = [row.model for row in OUT_OF_MEMORY if row.setup.engine == "zero1_2psi"]
    (model,) = too_large
    trained = [rate for (_, each), rate in sorted(published_rows(model, "zero1_2psi").items()) if each == 1]
    return [model, *trained, ", ".join(fails)], bool(fails), not trained


def sweet_spot():
    """It is one if it fits where DDP does not, and is faster than what saves more. On 128 GPUs in two networks.

    Its buckets are as large as ZeRO-3's units, blocks, here: each of many small ones pays a ring's latency.
    """
    found, faster = [], []
    for network in (EFA, H100):
        zero2, zero3 = predicted("7b", 128, "zero2", network, bucket_mb=800), predicted("7b", 128, cluster=network)
        found += milliseconds(zero2, zero3)
        faster.append(zero2.step < zero3.step)
    ddp, small = predicted("7b", 128, "ddp"), predicted("7b", 128, "zero2")
    needed = not ddp.fits and zero2.fits
    sizes = gigabytes([zero2.peak_bytes, zero3.peak_bytes])
    return [not needed, *sizes, *found, *milliseconds(small)], *(needed and one for one in faster)


def bert():
    """ZeRO-3 is predicted to be smaller, and faster by less than the planner errs. Worth it: where DDP does not fit."""
    shape = GPTConfig(24, 1024, 16, 30_522, 512)  # as large as BERT-large; ours is causal
    ddp, zero3 = (predicted(shape, 8, engine, micro_batch=16) for engine in ("ddp", "zero3"))
    small = GPUS["t4"].memory_gb * 1e9
    no_faster = ddp.step < (1 + PLANNER_ERRS) * zero3.step
    small_needs_it = ddp.needed_bytes > small >= zero3.needed_bytes
    values = [*milliseconds(ddp, zero3), *gigabytes([ddp.needed_bytes, zero3.needed_bytes])]
    return values, ddp.fits and ddp.needed_bytes < 18.5e9 and no_faster, not small_needs_it and no_faster


def trillions():
    """Two shapes of 10^12 parameters on GPUs whose memory together is enough: what of it does one GPU need?"""
    shapes = GPTConfig(552, 12_288, 96, 51_200, 2048), GPTConfig(128, 25_600, 160, 51_200, 2048)
    found = [predicted(shape, 512, recompute="blocks") for shape in shapes]
    return gigabytes(one.needed_bytes for one in found), *(one.fits for one in found)


def worth_the_larger_batch():
    """Tokens per second with 32 sequences, and with 4 and all activations kept: about as many as fit."""
    found = []
    for cluster in (replace(H100, intra_gbps=25), H100):
        large, small = predicted(cluster=cluster, **LARGE), predicted(cluster=cluster, micro_batch=4)
        found.append(large.tokens_per_s / small.tokens_per_s)
    return found


def bfloat16_for_speed():
    half, single = predicted(), predicted(precision="fp32")
    there = GPUS["t4"].bf16 is not None
    return [*milliseconds(half, single), there], half.step < single.step, there


CLAIMS: list[Claim] = claims_beside(__file__, __name__)

if __name__ == "__main__":
    sys.exit(main(claims=CLAIMS))
