"""Claims that say little about ZeRO: pipelines, tensor parallelism, slow ranks, checkpoints, failures, number formats.

Most are sums of an article's own numbers, one expression each.
"""

import json
import math
import tempfile
import warnings
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint_sequential

from harness.engine import checkpoint
from harness.measure.traffic import TrafficLedger
from harness.plan.hardware import GPUS, NETWORKS
from harness.teach.articles import runs
from harness.teach.articles.claim import Claims, about, above, listed
from harness.teach.articles.predicted import ASSUMED, LONG, ms, predicted, published_rows
from harness.teach.articles.printed import TORCH, attempt
from harness.teach.articles.runs import chain, parameters_of
from zero3 import ZeRO3

claims = Claims()
says = claims.frameworks  # nearly all of these are of one article
RESULTS = Path(__file__).parents[3] / "results"
P7, P70 = parameters_of("7b") / 1e9, parameters_of("70b") / 1e9  # so 2 * P7 are GB of bfloat16 weights
LINK = 200 / 8  # GB/s of an InfiniBand link of 200 Gbit/s
TIMES = 100, 100, 140, 100  # milliseconds of an article's four ranks

# Sums of one article's numbers.

# fmt: off
SUM = "its own numbers, recomputed"
STATE = "16 bytes x the {} preset"
COUNTED = "parameters of the 70b preset counted (86 blocks of width 8192)"
claims.sharding_state("the state of 70B (its size is blank in our copy) cannot be replicated on a GPU",
                      STATE.format("70b"), "", {"GB; an H200 has 141": 16 * P70}, says=above(141))
says("params x 2 + params x 12 make 16 bytes per parameter", SUM, "",
     {"bytes: the float32 master weights are missing": 2 + 12}, says=16)
says("its mixed-precision table gives the 112 GB that the text names", "its rows added up", "",
     {"GB of 2 + 4 + 4 + 4 bytes": 14 * P7}, says=112)
says("DDP in its figure 2: 16 bytes per parameter", "the boxes of the figure added up",
     "its 2 bytes of activations are counted in",
     {"with its '~2 bytes' of activations": 2 + 4 + 4 + 4 + 2, "without": 2 + 4 + 4 + 4}, says=16)
says("70B in bfloat16 is 140 GB and no H100 holds it", COUNTED, "", {"GB; an H100 has 80": 2 * P70}, says=140)
# Whether two are enough the article does not say: that depends on the stage.
says("7B needs at least two H100", "16 bytes x the 7b preset, on one and on two", "", lambda: (
    {"GB of state on one": 16 * P7, "on each of two DDP": 16 * P7, "zero1": (8 + 8 / 2) * P7,
     "zero2": (4 + 12 / 2) * P7, "zero3": 16 / 2 * P7, "an H100 has": 80}, 16 * P7 > 80))
says("7B is always more than one GPU can hold", STATE.format("7b"), "the GPU has less than 112 GB",
     {"of an H100's 80 GB": 16 * P7 / 80, "of an H200's 141 GB": 16 * P7 / 141}, says=above(1))
says("70B on 8 GPUs of 40 GB needs offloading", STATE.format("70b") + " / 8", "",
     {"GB of state for each GPU of 40": 16 * P70 / 8}, says=above(40))
says("140 GB over 64 ranks are writes of 2.2 GB", COUNTED, "", {"GB, 2 bytes x 70B / 64": 2 * P70 / 64},
     says=2.2, off=0.02)
says("140 GB over 256 GPUs are 0.55 GB each", COUNTED, "", {"GB, 2 bytes x 70B / 256": 2 * P70 / 256},
     says=0.55, off=0.02)
says("model and optimizer over 64 ranks: 2.2 GB each", "float32 weights and moments, 12 bytes each",
     "only bfloat16 weights are saved, not the optimizer of its snippet",
     {"GB a rank for 70B's bfloat16 weights": 2 * 70 / 64, "with the optimizer": 12 * 70 / 64}, says=2.2, off=0.02)
says("an all-reduce of 14 GB over 8 ranks at 25 GB/s takes 9.8 s", "its own formula", "",
     {"s": 2 * 7 / 8 * 14 / 25, "s with the float32 gradients of its table": 2 * 7 / 8 * 28 / 25}, says=9.8, off=0.05)
says("InfiniBand's 200 Gbps (25 GB/s) in one place are its ~200 GB/s in another", "the units converted",
     "200 GB/s is a node with 8 links", {"GB/s by 8 links of 200 Gbit/s": 8 * LINK, "by one": LINK}, says=200)
says("17.5 GB over 200 Gbps take 700 ms", SUM, "", {"ms at 25 GB/s": 17.5 / LINK * 1e3}, says=700)
says("syncing 140 GB of gradients over 8 replicas sends 140 GB / 8", "reduce-scatter's (N-1)/N", "",
     {"GB per rank": 7 / 8 * 140, "cut by 4-way TP x 8-way PP first": 7 / 8 * 140 / 32}, says=140 / 8)
says("a tensor-parallel all-reduce takes ~200 ns on NVLink", "its own formula, bytes and bandwidth", "",
     {"ns by its formula for its 20 MB, 4 GPUs and 600 GB/s": 2 * 3 / 4 * 20e6 / 600}, says=200, off=1)
says("NVLink 4.0 of an H100 has 600 GB/s in both directions", "the makers' numbers", "the GPU is an A100",
     {"GB/s of an A100 (NVLink 3)": 2 * GPUS["a100"].link_gbps, "of an H100 (NVLink 4)": 2 * GPUS["h100"].link_gbps},
     says=600)
says("pipeline stages of 70B pass ~20 MB on per micro-batch", "tokens x width x 2 bytes",
     "a micro-batch has about 1,200 tokens", {f"MB with {n} tokens": n * 8192 * 2 / 1e6 for n in (1200, 2048)},
     says=20, off=0.05)
says("1,000 GPUs failing at 0.01% a day: a failure every 10 hours", SUM, "",
     {"hours; every 10 would take 0.24% a day": 24 / (1000 * 0.0001)}, says=10)
says("one rank at 140 ms instead of 100 makes every step 140 ms", "the slowest of its four ranks", "",
     {"ms are a step; the others wait": max(TIMES)}, says=140)
says("one rank at 140 ms instead of 100 loses 40% of the throughput", SUM, "",
     {"% less throughput, for steps that take 40% more time": 100 * (1 - 100 / 140)}, says=40)
says("asynchronous SGD lets fast GPUs run ahead", "gradients of its four ranks in 7 s", "", lambda: (
    {"gradients": sum(7_000 // time for time in TIMES), "if they wait": 4 * (7_000 // 140)},
    sum(7_000 // time for time in TIMES) > 1.1 * 4 * (7_000 // 140)))
says("two weeks of hourly saves of 10-20 minutes waste about 5 hours", SUM, "",
     {"hours idle with 10 minutes each": 14 * 24 * 10 / 60, "with 20": 14 * 24 * 20 / 60}, says=5, off=0.5)
says("a save every 1,000 steps is one every ~4 hours", SUM, "a step takes about 14 s",
     {"minutes at 14.4 s a step": 14.4 * 1000 / 60, "at its 100 ms + 700 ms": 0.8 * 1000 / 60}, says=240)
says("140 GB by 64 ranks: 5 seconds instead of 20 minutes", f"{SUM}; {COUNTED}",
     "the storage takes 28 GB/s in all, faster than 64 of its single writers, and weights alone are saved",
     {"s at 28 GB/s in all": 2 * P70 / 28, "with AdamW's state": 12 * P70 / 28,
      "with 64 writers, each as fast as one that takes 10 minutes": 600 / 64}, says=5, off=0.01)
says("saving takes ~30 seconds every ~4 hours", "set against its 5 seconds",
     "the optimizer's state is saved as well, and training waits",
     {"s for float32 weights and moments (12 bytes, not 2)": 12 / 2 * 5, "for its own save": 5}, says=30)
says("synchronous saves kill throughput", SUM, "one rank writes everything",
     {"% of the time for 10 minutes every hour, one file": 100 * 600 / 3600, "for 5 s, by ranks": 100 * 5 / 3600},
     says=above(10))
says("8 DP x 4 PP x 8 TP = 256 GPUs = 32 nodes of 8", SUM, "", {"= 8 x 4 x 8": 8 * 4 * 8}, says=256)
says("4-way TP x 8-way PP x 8-way DP = 256 GPUs", SUM, "", {"= 4 x 8 x 8": 4 * 8 * 8}, says=256)
says("its figure 3 shows 8-way tensor parallelism", "GPUs drawn per stage, counted", "",
     {"= 256 / (8 replicas x 4 stages); drawn are 4 per stage": 256 // (8 * 4)}, says=4)
says("its accumulation loop uses every micro-batch", "steps after each 4th of 8 and of 10 micro-batches",
     "K divides their number", {f"of {n} reaches a step": n // 4 * 4 / n for n in (8, 10)}, says=1)
# fmt: on

# Pipelines and tensor parallelism.


def idle(stages: int, micro_batches: int) -> float:
    """The share of all time in which stages wait, of GPipe as of 1F1B that is emptied after each batch.

    arXiv 1811.06965, 1806.03377; messages take no time.
    """
    return (stages - 1) / (stages - 1 + micro_batches)


def forward_all_reduces(plan: dict) -> int:
    with runs.fake_ranks(8), TrafficLedger() as ledger:
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        parallelize_module(model, init_device_mesh("cpu", (8,)), plan)
        _ = model(torch.ones(2, 64)) + 0  # waits for it, too
    return [collective.kind for collective in ledger.collectives].count(runs.ALL_REDUCE)


# Bytes per second that leave each of eight GPUs of a node, and FLOPs per second, as the planner has them.
BETWEEN_NODES, PRODUCTS = NETWORKS["infiniband"].bus / 8 * 1e9, GPUS["h100"].flops("bf16") * GPUS["h100"].efficiency

# fmt: off
# A block's four all-reduces of `width` numbers in bfloat16 for a token, over 6 FLOPs for each of 12 width² parameters.
says("tensor parallelism over InfiniBand is usually not worth it",
     "a block's all-reduces over its products, 8 H100 in 8 nodes; in one node they are eleven times as fast", "",
     {f"times as long at width {width:,}":
      (4 * 2 * 7 / 8 * 2 * width / BETWEEN_NODES) / (6 * 12 * width**2 / 8 / PRODUCTS)
      for width in (4096, 8192, 16384)}, says=above(1))
says("tensor parallelism all-reduces after every layer", "an MLP under torch's, on 8 ranks",
     "a layer is a column-parallel matrix and the row-parallel one behind it", lambda: (
     {"all-reduces in forward for such a pair": forward_all_reduces({"0": ColwiseParallel(), "2": RowwiseParallel()}),
      "for a column-parallel layer": forward_all_reduces({"0": ColwiseParallel(output_layouts=Replicate())})}), says=1)
FORMULA = "(stages - 1) / (stages - 1 + micro-batches), messages take no time"
for words in ("GPipe's micro-batches reduce the bubble", "more micro-batches shrink the bubble"):
    says(words, FORMULA, "", lambda: (
        "4 stages, idle: " + listed({n: f"{idle(4, n):.1%}" for n in (1, 4, 8, 16, 64)}, "{1} with {0}"),
        idle(4, 1) > idle(4, 4) > idle(4, 8) > idle(4, 16) > idle(4, 64)))
# 1F1B that is emptied idles as GPipe does: it saves activations.
says("PipeDream's schedule reduces the bubble further", FORMULA,
     "the pipeline is never emptied, so that weights are old; emptied, it saves activations and no time", lambda: (
    f"idle: GPipe and 1F1B {idle(4, 8):.1%} if emptied after each batch, {idle(4, 80):.1%} if never in 10; "
    "micro-batches kept by the first of 4 stages: 8 and 4", idle(4, 80) < idle(4, 8), idle(4, 8) < idle(4, 8)))
says("4 stages, 8 micro-batches: 37.5% of the compute wasted", FORMULA, "",
     {"% of the compute wasted; set against busy time it is 37.5%": 100 * idle(4, 8)}, says=37.5, off=0.02)
says("8 stages, 16 micro-batches: a bubble of 44%", FORMULA, "idle time is set against busy time, not all time",
     {"% idle to busy": 100 * (8 - 1) / 16, "of the compute": 100 * idle(8, 16)}, says=44, off=0.02)
says("interleaving halves the pipeline's bubble", "how late the last of 4 stages begins", "",
     {"of the idle slots, if each rank has two halves of a stage in turn": (4 - 1) / 2 / (4 - 1)}, says=1 / 2)
says("the price of interleaving is twice the communication, in all-reduces",
     "messages between 4 stages, and between 8 pieces of them", "",
     {"times as many messages, and none is an all-reduce": (8 - 1) / (4 - 1)}, says=2, off=0.02)
# Of a step that hides its communication.
says("a layer of 70B computes for 100 ms", ASSUMED, "one GPU computes the layer, for about 8,000 tokens", lambda: (
    {"ms predicted per block, 8,192 tokens, forward twice and backward": (each := predicted(
        "70b", 64, **LONG).times.compute / 86 * 1e3), "on each of 4 GPUs": each / 4}), says=100, off=0.25)
# Sharded data parallelism alone.
says("70B and more train at production throughput with 3D parallelism only",
     "6 FLOPs x 70e9 parameters x tokens/s of a GPU, published for MPT 70B with FSDP alone (docs/planner.md)", "",
     {f"% of an H100's peak on {gpus} of them": 100 * 6 * 70e9 * rate / 989e12
      for (gpus, _), rate in published_rows("MPT 70B", "fsdp2").items() if gpus in (64, 512)},
     says=lambda mfu: mfu < 30)
# fmt: on


@says("MFU that falls from 16 to 128 GPUs is communication, not compute", f"{ASSUMED}; {FORMULA}",
      "no pipeline stages were added, and all ranks have the same to do", says=above(0.7))  # fmt: skip
def exposed_of_what_is_longer():
    """The rest is computation beside a collective, which slows it down."""
    few, many = predicted(ranks=16), predicted(ranks=128)
    exposed = (many.times.exposed - few.times.exposed) / (many.step - few.step)
    return {f"of what a step takes longer is exposed communication, predicted, ZeRO-3, 7B: {ms(few, many)}": exposed,
            f"in a pipeline of 2 and 16 stages, busy {1 - idle(2, 16):.0%} and {1 - idle(16, 16):.0%}": 0}  # fmt: skip


# Slow ranks.


@says("step times logged per rank show the straggler, 20% or more higher",
      "a recorded run with one rank delayed (./launch.sh compare --slow-rank)",
      "a rank's own work is timed, without its waiting for the others", says=above(1.2))  # fmt: skip
def per_rank_step_times():
    """The recorded run delayed rank 1 in every step: who looks slow by the step, and who by its own work?"""
    recorded = json.loads((RESULTS / "step-time-slow-rank-cpu-2ranks.json").read_text())["runs"]
    ranks = [run["step_time"]["ranks"] for name, run in recorded.items() if name != "single"]
    own, steps = (min(slow[key] / fast[key] for fast, slow in ranks) for key in ("own_ms", "step_ms"))
    return {"times the other's is the least own work of the delayed of 2 ranks": own, "its steps": steps}


def largest_rate(momentum: float, old: int, together: int) -> float:
    """Up to which learning rate SGD minimises x²/2, if it adds `together` gradients at the x before `old` updates."""

    def distance(rate: float) -> float:
        seen, speed = [1.0] * (old + 1), 0.0
        for _ in range(2_000 // together):
            speed = momentum * speed + together * seen[-1 - old]
            seen.append(seen[-1] - rate * speed)
        return abs(seen[-1])

    return max(rate / 100 for rate in range(1, 101) if distance(rate / 100) < 1e-3)


# fmt: off
# Momentum repeats an old gradient's mistake.
says("stale gradients make convergence sensitive",
     "x²/2 minimised by four ranks in turn, each gradient three updates old, and all at once",
     "there is momentum, as in AdamW", lambda: (
     {f"of the learning rate that converges if they wait, with momentum {momentum}":
      largest_rate(momentum, 3, 1) / largest_rate(momentum, 0, 4) for momentum in (0.9, 0.0)}),
     says=lambda times: times < 0.5)
# Eight ranks, eight steps, and eight documents of each length: the longest in a step decides.
LENGTHS = [32 * 2**power for power in range(8)]
EIGHT = "a sum: 8 ranks, 8 steps, 8 sequences of each of 32, 64 ... 4,096 tokens; the longest of a step decides"
says("uneven sequence lengths make stragglers", EIGHT, "",
     {"% of the time ranks wait with one of each length in a step": 100 - 100 * sum(LENGTHS) / 8 / max(LENGTHS)},
     says=above(20))
says("bucketing or padding evens out uneven lengths", EIGHT,
     "it is bucketing; padding turns waiting into work for nothing, and is no faster",
     {"of the time of steps with all lengths, in steps of one length": sum(LENGTHS) / 8 / max(LENGTHS), "padded": 1},
     says=lambda time: time < 0.95)
says("gradient accumulation mitigates stragglers", "a sum: 8 ranks, in turn or always the same takes 40% longer",
     "the slow rank is another one each time",
     {"of a micro-batch's time, 8 per step, if each rank is slow in one": (7 + 1.4) / (8 * 1.4),
      "if it is always one": 1.4 / 1.4}, says=lambda time: time < 0.95)

# Checkpoints.

# fmt: on


def dealt() -> list[float]:
    """Of a state that all of 4 ranks have, what torch has each of them write. It raises if together they miss some."""
    planner, plans = dcp.DefaultSavePlanner(), []
    for rank in range(4):
        with runs.running("single", partial(chain, 3), ranks=4, rank=rank, optimizer_cls=runs.ADAMW) as engine:
            runs.forward(engine).backward()
            engine.step()
            state = dict(zip(("model", "optim"), get_state_dict(engine.model, engine.optimizer)))
            planner.set_up_planner(state, is_coordinator=rank == 0)
            plans.append(planner.create_local_plan())
    final = planner.create_global_plan(plans)[0]
    each = [sum(item.tensor_storage_size() or 0 for item in plan.items) for plan in final]
    return [nbytes / sum(each) for nbytes in each]


@says("each GPU writes total / N of a distributed checkpoint",
      "the shards of 4 ranks under ZeRO-3, and what torch has 4 ranks write of a state that all have",
      "the state is sharded, or is in many tensors: what all ranks have is divided by whole tensors",
      says=1 / 4, off=0.1)  # fmt: skip
def share_of_each_rank():
    mine = [runs.step("zero3", ranks=4, rank=rank).held for rank in range(4)]
    shards = [held["parameters"] + held["optimizer"] for held in mine]
    return {"of ZeRO-3's state is the largest shard": max(shards) / sum(shards),
            "of 3 layers under DDP falls to one rank": max(dealt())}  # fmt: skip


@claims.sharding_state("checkpointing becomes fragile", "a bit flipped in two checkpoints, both loaded",
                       "nothing checks what was written", tolerance=None)  # fmt: skip
def fragile():
    """torch's, and that of zero3.py, which has a sum for each file."""
    layer, twos = nn.Linear(8, 1, bias=False), torch.full((8,), 2.0).numpy().tobytes()
    nn.init.constant_(layer.weight, 2.0)
    found = {}
    with runs.one_rank(), tempfile.TemporaryDirectory() as folder:
        theirs, ours, state = Path(folder, "a"), Path(folder, "b"), {"weight": layer.weight.detach().clone()}
        dcp.save(state, checkpoint_id=theirs)
        engine = ZeRO3(layer, runs.SGD, units=[layer])
        checkpoint.save(engine, ours)
        for file in Path(folder).rglob("*.distcp"):
            file.write_bytes(file.read_bytes().replace(twos, b"\1" + twos[1:]))
        found["torch's"] = attempt(lambda: dcp.load(state, checkpoint_id=theirs)) or f"loads {state['weight'].tolist()}"
        found["with a sum for each file"] = attempt(lambda: checkpoint.load(engine, ours)).partition(":")[0] or "loads"
        engine.close()
    theirs, ours = (said.startswith("loads") for said in found.values())
    return listed(found, "{}: {}", "; "), theirs and (state["weight"] != 2).any(), ours


@says("TorchElastic removes a failed rank and rebalances the shards",
      "a recorded run under torchrun that lost a machine and got it back",
      "all ranks may start again, and the checkpoint is one that another number of ranks can load")  # fmt: skip
def remove_a_rank():
    """Of the recorded run (docs/restarts.md): how many ranks after each start, how many steps had to be made again?"""
    lines = [json.loads(line) for line in (RESULTS / "train-zero2-cpu.jsonl").read_text().splitlines()]
    ranks = [line["ranks"] for line in lines if line.get("event") == "start"]
    again = [line["repeated"] for line in lines if line.get("event") == "restart"]
    smaller = min(ranks) < ranks[0] and lines[-1].get("why") == "done"
    starts, repeated = (", then ".join(map(str, numbers)) for numbers in (ranks, again))
    measured = f"it had {starts} ranks; {repeated} steps were made again, from a checkpoint, which gave the shards"
    return measured, smaller, smaller and not any(again)


def saved(save=dcp.save) -> tuple[object, bool]:
    """Save a model and its optimizer: (what the call returned, was it written by then)."""
    model = nn.Linear(8, 8)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"), runs.one_rank():
        returned = save(state, storage_writer=dcp.FileSystemWriter(folder))  # warns that this is one process
        written = Path(folder, ".metadata").exists()
        if isinstance(returned, Future):
            returned.result()
    return returned, written


@says("its snippet saves without blocking", "what save() returns, and when", "async_save() is called, not save()")
def save_blocks():
    (returned, written), (later, _) = saved(), saved(dcp.async_save)
    measured = f"save() returned {type(returned).__name__}, all written by then: {written}; async_save() a "
    return measured + type(later).__name__, isinstance(later, Future), not written or isinstance(returned, Future)


# fmt: off
says("save() takes the model and the optimizer themselves", "a save of both", "",
     lambda: (f"{TORCH}: {attempt(saved) or 'works'}", not attempt(saved)), tolerance=None)
says("its sharded saves go to a folder per step", "two names of its kind", "the string gets its f-prefix",
     {"folders of two saves with the f-prefix": len({f"step_{step}" for step in (1000, 2000)}),
      "without it": len({"step_{step}" for step in (1000, 2000)})}, says=2)
# fmt: on


# The training loop, and numbers.


def gradient(batches: torch.Tensor, divide_by: int) -> torch.Tensor:
    """What a loop over micro-batches accumulates for a linear model's squared outputs."""
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    for batch in batches:
        ((batch @ weight).square().mean() / divide_by).backward()
    return weight.grad


def random_batches(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@says("accumulation sums gradients and does not average", "its loop over 3 micro-batches",
      "the loss is not divided by K, as its code does", says=3)  # fmt: skip
def sums_not_averages():
    batches = random_batches(3, 4, 5)
    mean = torch.stack([gradient(one[None], 1) for one in batches]).mean(0)
    found = {divide_by: gradient(batches, divide_by) / mean for divide_by in (1, 3)}
    return {"times the mean of the micro-batches' gradients": found[1].mean().item(),
            "as its code divides the loss by 3": found[3].mean().item()}  # fmt: skip


@says("effective batch = batch x K x world size", "gradients of 2 x 3 x 4 samples in parts and at once")
def effective_batch():
    data = random_batches(2, 3, 4, 5)
    in_parts, at_once = sum(gradient(rank, 3) for rank in data) / 2, gradient(data.view(1, 24, 5), 1)
    equal = torch.allclose(in_parts, at_once, rtol=0, atol=1e-12)
    return f"4 x 3 x 2 = 24 samples; gradients equal to 1e-12: {equal}", equal


@says("BatchNorm's statistics and dropout's masks change per micro-batch", "both over two micro-batches", says=2)
def two_micro_batches():
    norm = nn.BatchNorm1d(4)
    with torch.random.fork_rng():
        masks = {str(nn.functional.dropout(norm(torch.ones(64, 4)) + 1) > 0) for _ in range(2)}
    return {"updates of the running statistics": norm.num_batches_tracked.item(), "masks": len(masks)}


def layers_trained(needs_gradient: bool, **options) -> int:
    """How many of 8 layers get a gradient, if the input needs one or not."""
    layers, inputs = chain(), torch.ones(2, 64, requires_grad=needs_gradient)
    with warnings.catch_warnings(action="ignore"):  # that use_reentrant was not given
        checkpoint_sequential(layers, segments=8, input=inputs, **options).sum().backward()
    return sum(layer.weight.grad is not None for layer in layers)


def scaler_of_old(warned: str) -> str:
    return attempt(lambda: torch.cuda.amp.GradScaler(enabled=False), warned)


def cast(value: float, dtype: torch.dtype = torch.float16) -> float:
    return torch.tensor(value, dtype=torch.float32).to(dtype).item()


# fmt: off
says("checkpoint_sequential(layers, segments=8, input=x) is all it takes", "the call on 8 layers",
     "the input needs a gradient, or with use_reentrant=False", lambda: {
     "layers of 8 that get a gradient": layers_trained(True),
     "with use_reentrant=False": layers_trained(False, use_reentrant=False),
     "if the input needs none": layers_trained(False)}, says=8)
says("the loss scaler is torch.cuda.amp.GradScaler", "the name and its warnings", "a deprecated name will do", lambda: (
    {f"{TORCH}, where a warning is an error": scaler_of_old("error"), "else": scaler_of_old("ignore") or "works"},
    not scaler_of_old("ignore"), not scaler_of_old("error")), tolerance=None)
HALF, BRAIN, SINGLE = (torch.finfo(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32))
says("bfloat16 has the range of float32", "torch.finfo", "", lambda: (
    listed({kind.dtype: (kind.tiny, kind.max) for kind in (BRAIN, SINGLE, HALF)}, "{} {} to {}"),
    BRAIN.tiny == SINGLE.tiny and about(BRAIN.max, SINGLE.max, 0.01) and HALF.max < BRAIN.max / 1e30))
says("bfloat16 never overflows", "large numbers cast",
     "the same run stays below 3.39e38, about where float32 ends too",
     {f"from {value:.5g}": cast(value, torch.bfloat16) for value in (1e30, SINGLE.max)}, says=math.isfinite)
says("float16 overflows easily", "a number above 65,504 cast", "", {"from 70,000": cast(70_000.0)}, says=math.isinf)
# The scaler multiplies the loss: good for gradients that are too small, no help for values that are too large.
says("a loss scaler is for float16's overflow", "a small and a large number, with and without a scale", "", lambda: (
    {"1e-8 in float16": cast(1e-8), "through a scaled loss": cast(1e-8 * 2**16) / 2**16, "70,000": cast(70_000.0),
     "70,000 scaled": cast(70_000.0 * 2**16)}, cast(70_000.0 * 2**16) < math.inf))
# fmt: on
