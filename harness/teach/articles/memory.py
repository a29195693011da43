"""Claims about the bytes of parameters, gradients, optimizer state and activations.

Most are dry runs of the real engines: one rank's training step on fake tensors (`measure/dry_run.py`). Its 7B is 34
blocks of width 4096 with 6.986e9 parameters, so a table for 7e9 is met to 0.5%. Ψ is the number of parameters: float32
weights are 4Ψ bytes.
"""

import atexit
import dataclasses
import functools
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint_sequential, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from harness.measure import dry_run
from harness.measure.host_update import nanoseconds
from harness.measure.memory import MemoryLedger, held_bytes
from harness.run.model import next_token_loss
from harness.run.recompute import checkpoint_blocks
from harness.teach.articles import runs
from harness.teach.articles.claim import Claims, about, gb, listed
from harness.teach.articles.runs import parameters_of, saved_bytes, step, toy

claims = Claims()
RANKS = 8


@functools.cache
def dry(engine: str, *options: str, preset: str = "7b", ranks: int = RANKS) -> dict:
    """A dry run of `engine`: its row of `./launch.sh memory`. Run once, whoever asks."""
    with runs.fake_ranks(ranks):
        return dry_run.measure(engine, dry_run.arguments(["--preset", preset, "--ranks", str(ranks), *options]))


def state(run: dict) -> int:
    return sum(run["held_bytes"].values())


def checkpointed() -> dict:
    """7B under ZeRO-3 in bfloat16 with every block recomputed, on an article's 4 x 2,048 tokens."""
    return dry("zero3", "--batch", "4", "--precision", "bf16", "--checkpoint-activations")


# The state of 7B.


def table_7b(engine: str, *claimed: float) -> tuple:
    """Against GB of each row and of the total of an article's table."""
    found = [*dry(engine)["held_bytes"].values(), state(dry(engine))]
    measured = f"{gb(found[-1])} = " + " + ".join(f"{nbytes / 1e9:.3g}" for nbytes in found[:-1])
    return measured, all(about(nbytes, row * 1e9) for nbytes, row in zip(found, (*claimed, sum(claimed))))


for article, words, name, engine, *claimed in (
    (claims.multiple_gpus, "7B in fp32 under DDP: 28 + 28 + 56 = 112 GB", "DDP", "ddp", 28, 28, 56),
    (claims.multiple_gpus, "under ZeRO-1: 28 + 28 + 7 = 63 GB", "ZeRO-1", "zero1", 28, 28, 7),
    (claims.multiple_gpus, "under ZeRO-2: 28 + 3.5 + 7 = 38.5 GB", "ZeRO-2", "zero2", 28, 3.5, 7),
    (claims.multiple_gpus, "under ZeRO-3: 3.5 + 3.5 + 7 = 14 GB", "ZeRO-3", "zero3", 3.5, 3.5, 7),
    (claims.wordpress, "7B with Adam in FP32: about 112 GB on every GPU", "DDP", "ddp", 28, 28, 56),
    (claims.wordpress, "ZeRO-1 still replicates parameters and gradients", "ZeRO-1", "zero1", 28, 28, 7),
):
    article(words, f"dry run of {name} at 7B on 8 ranks")(partial(table_7b, engine, *claimed))


@claims.multiple_gpus("ZeRO-3 on 8 GPUs: 8 times less memory", "dry run of DDP and ZeRO-3 at 7B on 8 ranks, state")
def eightfold():
    ddp, zero3 = state(dry("ddp")), state(dry("zero3"))
    return f"{gb(ddp)} / {gb(zero3)} = {ddp / zero3:.4g}", about(ddp / zero3, 8)


@claims.scaling("each of 8 GPUs stores 1/8 of the optimizer state (the share is blank in our copy)",
                "dry run of ZeRO-1 at 7B on 8 ranks")  # fmt: skip
def eighth_of_the_optimizer():
    share = dry("zero1")["held_bytes"]["optimizer"] / dry("ddp")["held_bytes"]["optimizer"]
    return f"{share:.4f} of DDP's, on each of 8 ranks", about(share, 1 / 8)


@claims.sharding_state("real memory is above the ideal", "dry run of ZeRO-3 at 7B on 8 ranks")
def more_than_ideal():
    run = dry("zero3")
    large = {part: gb(nbytes) for part, nbytes in run["peak_parts"].items() if nbytes > 1e8}
    measured = f"peak {gb(run['peak_bytes'])} for {gb(state(run))} of state: {listed(large)}"
    return measured, run["peak_bytes"] > state(run)


@claims.wordpress("FSDP runs a 7B model on 14 GB", "dry run of ZeRO-3 at 7B on 8 ranks, 1 x 2048 tokens",
                  "N = 8 and only what is held between steps counts")  # fmt: skip
def runs_on_14():
    held, peak, least = state(dry("zero3")), dry("zero3")["peak_bytes"], checkpointed()["peak_bytes"]
    measured = {"state": gb(held), "peak of a step": gb(peak), "in bfloat16 with blocks recomputed": gb(least)}
    return measured, about(held, 14e9), about(least, 14e9, 0.02)


@claims.frameworks("7B under ZeRO-3 takes 16.25 GB", "dry run of ZeRO-3 at 7B on 8 ranks, bf16, batch 4 x 2048")
def zero3_in_mixed_precision():
    """Its sum has 2 bytes per parameter where float32 master weights are 4."""
    peak, held, lacking = checkpointed()["peak_bytes"], state(checkpointed()), 2 * parameters_of("7b") / RANKS
    measured = {"state": gb(held), "peak with blocks recomputed": gb(peak), "its float32 weights lack": gb(lacking)}
    return measured, any(about(found, 16.25e9, 0.02) for found in (peak, held + 4e9))


@claims.frameworks("7B under ZeRO-3 fits a 40 GB A100", "dry run of ZeRO-3 at 7B on 8 ranks, bf16, batch 4 x 2048",
                   "activations are recomputed")  # fmt: skip
def fits_40():
    """Recomputed: the peak of a step. Not recomputed: what is alive when forward is over, at the very least."""
    run = checkpointed()
    peak, least = run["peak_bytes"], state(run) - run["held_bytes"]["gradients"] + saved_bytes("7b", BATCH, SEQ)
    measured = f"peak {gb(peak)} with blocks recomputed; without, after forward {gb(least)} of state and activations"
    return measured, peak < 40e9, least < 40e9


@claims.wordpress("an 80 GB GPU is out of memory before the first micro-batch",
                  "real DDP, live bytes before its first batch, state after its first step",
                  "the first step is counted, in which AdamW makes its state")  # fmt: skip
def before_the_first_batch():
    # Without init_sync: gloo keeps what it broadcasts for a moment longer.
    with MemoryLedger() as memory, runs.running("ddp", optimizer_cls=runs.ADAMW, init_sync=False) as engine:
        before = memory.live
        runs.forward(engine).backward()
        engine.step()
        after = sum(held_bytes(engine).values())
        del engine
    before, after = (nbytes / step("ddp").parameters for nbytes in (before, after))
    measured = f"before the first batch {before:g}Ψ bytes (weights, DDP's buckets) = {gb(before * 7e9)} at 7B; after "
    measured += f"the first step {after:.3g}Ψ (AdamW's state is there) = {gb(after * 7e9)}"
    return measured, after * 7e9 > 80e9, before * 7e9 > 80e9


# How the state shrinks with N.


@claims.wordpress("under DDP no number of GPUs lowers the memory of each",
                  "dry run of DDP, a small GPT, on 2 and 64 ranks")  # fmt: skip
def more_gpus_under_ddp():
    held = {ranks: state(dry("ddp", preset="toy", ranks=ranks)) for ranks in (2, 64)}
    return listed(held, "{1} bytes on each of {0}"), held[2] == held[64]


@claims.frameworks("DDP keeps 4 redundant copies of the optimizer state", "AdamW's state, the same on every rank",
                   "N = 5")  # fmt: skip
def redundant_copies():
    copies = step("ddp").held["optimizer"] / step("plain").held["optimizer"]
    extra = {ranks: ranks * copies - 1 for ranks in (2, 5, 8)}
    return listed(extra, "{1} of {0} ranks") + " are redundant: N-1", extra[5] == 4, 4 in (extra[2], extra[8])


@claims.scaling("no redundant optimizer state under ZeRO", "the states of all 8 ranks added up")
def no_redundancy():
    one = step("plain", toy).held["optimizer"]
    copies = {name: sum(step(name, toy, rank=rank).held["optimizer"] for rank in range(RANKS)) / one
              for name in ("zero1", "zero3")}  # fmt: skip
    return listed(copies, "{}: 8 ranks hold {} copies"), all(about(number, 1) for number in copies.values())


def times_smaller(*numbers: int) -> dict[int, float]:
    """{N: how many times smaller ZeRO-3's state is than all of it}."""
    return {ranks: step("plain").state / step("zero3", ranks=ranks).state for ranks in numbers}


@claims.sharding_state("sharding divides the sharded state by N (the divisor is blank in our copy)",
                       "ZeRO-3 at N = 2 to 32")  # fmt: skip
def ideal_sharding():
    ratios = times_smaller(2, 4, 8, 32)
    measured = "state without sharding over ZeRO-3's: " + listed(ratios, "N={} {}")
    return measured, all(about(ratio, ranks) for ranks, ratio in ratios.items())


@claims.frameworks("FSDP and ZeRO-3 train models 8 to 16 times larger", "state at N = 4, 8 and 16", "N is 8 to 16")
def larger_models():
    ratios = times_smaller(4, 8, 16)
    inside = about(ratios[8], 8) and about(ratios[16], 16, 0.01)
    return listed(ratios, "N={} x{}") + " (state; activations are not cut)", inside, 8 <= ratios[4] <= 16


@claims.frameworks("the stages reduce memory linearly with the number of GPUs", "state of each stage at N = 8 and 32",
                   "the stage is ZeRO-3")  # fmt: skip
def linear_in_ranks():
    ratios = {name: step(name, ranks=8).state / step(name, ranks=32).state for name in ("zero1", "zero2", "zero3")}
    zero1, zero2, zero3 = (about(ratio, 4, 0.02) for ratio in ratios.values())  # 4 if it falls with 1/N
    return "state at N = 8 over N = 32: " + listed(ratios), zero3, zero1 or zero2


@claims.scaling("largest model: by one GPU under DDP, more under ZeRO-1 and -2, by the cluster under ZeRO-3",
                "state per parameter at N = 512")  # fmt: skip
def largest_model():
    """Bytes of state per parameter as N grows: what caps the model on one GPU, and what does not."""
    floors = {"ddp": step("ddp").state / step("ddp").parameters}
    floors |= {name: step(name, ranks=512).state / step(name).parameters for name in ("zero1", "zero2", "zero3")}
    ddp, zero1, zero2, zero3 = floors.values()
    return "bytes per parameter at N = 512: " + listed(floors), ddp > zero1 > zero2 > 10 * zero3


@claims.sharding_state("a layer too large for a GPU needs model parallelism as well",
                       "ZeRO-3, peak over state at N = 8 and 32")  # fmt: skip
def one_layer_too_large():
    """What ZeRO-3 has gathered does not shrink with N: a unit at work must fit."""
    layer = step("zero3").parameter_bytes / 8
    over = {n: (step("zero3", ranks=n).peak - step("zero3", ranks=n).state) / layer for n in (8, 32)}
    return "peak over the state, in layers: " + listed(over, "N={} {}"), min(over.values()) > 2


# Mixed precision.

WEIGHED = "bfloat16 training with AdamW, tensors weighed"


@functools.cache
def mixed_precision(gradient_dtype: torch.dtype) -> dict[str, float]:
    """Bytes per parameter alive after a backward, of bfloat16 weights updated through float32 ones by AdamW."""
    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    (weight,) = layer.parameters()
    master = weight.detach().float().requires_grad_()
    optimizer = torch.optim.AdamW([master])
    layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
    gradient = weight.grad.to(gradient_dtype)
    master.grad = gradient.float()  # for the update only
    optimizer.step()
    moments = [tensor for tensor in optimizer.state[master].values() if tensor.shape == master.shape]
    rows = {"weights": [weight], "gradients": [gradient], "float32 weights": [master], "moments": moments}
    return {name: sum(tensor.nbytes for tensor in tensors) / weight.numel() for name, tensors in rows.items()}


def added_up(held: dict[str, float]) -> str:
    return listed(held, "{1} {0}", " + ") + f" = {sum(held.values()):g} bytes"


def ddp_in_bf16() -> float:
    """Bytes per parameter that DDP holds when it trains in bfloat16 through autograd's casts."""
    run = dry("ddp", "--precision", "bf16", preset="toy")
    return state(run) / (run["held_bytes"]["parameters"] / 4)


@claims.sharding_state("BF16 with Adam: about 16 bytes per parameter", WEIGHED)
@claims.scaling("FP16 with Adam: 2 + 2 + 12 bytes (blank in our copy), 112 GB for 7B", WEIGHED)
def sixteen_bytes():
    total = sum(mixed_precision(torch.bfloat16).values())
    measured = f"{added_up(mixed_precision(torch.bfloat16))}; {gb(total * parameters_of('7b'))} for the 7b preset"
    return measured, total == 16


@claims.scaling("the optimizer state is the largest part", WEIGHED)
def largest_part():
    held = mixed_precision(torch.bfloat16)
    optimizer, total = held["float32 weights"] + held["moments"], sum(held.values())
    return f"{optimizer:g} of {total:g} bytes per parameter", optimizer > total / 2


@claims.frameworks("mixed precision takes 14 bytes per parameter, 98 GB for 7B (its table)", WEIGHED,
                   "no float32 master weights are kept")  # fmt: skip
def fourteen_bytes():
    held = mixed_precision(torch.float32)
    total, without = sum(held.values()), sum(held.values()) - held["float32 weights"]
    return f"{added_up(held)}, without the float32 weights {without:g}", without == 14, total == 14


@claims.frameworks("mixed precision takes 16 bytes per parameter, 112 GB for 7B (its text)",
                   "three kinds of it, tensors weighed",
                   "gradients are bfloat16, or bfloat16 weights exist only in forward and backward")  # fmt: skip
def sixteen_in_mixed_precision():
    cast, low, high = ddp_in_bf16(), *(sum(mixed_precision(t).values()) for t in (torch.bfloat16, torch.float32))
    measured = {"bfloat16 weights made for each forward": cast, "kept, with gradients in bfloat16": low}
    return measured | {"in float32 (its table)": high}, about(cast, 16) and low == 16, high == 16


@claims.frameworks("7B under DDP, ~112 GB, does not fit an H100", "dry run of DDP in bf16, bytes per parameter")
def ddp_does_not_fit():
    whole = ddp_in_bf16() * parameters_of("7b")
    return f"{ddp_in_bf16():.4g} bytes per parameter: {gb(whole)}, H100 80 GB", about(whole, 112e9) and whole > 80e9


@claims.frameworks("Adam's states cost 12 bytes per parameter and not 4", "AdamW's state",
                   "float32 master weights are counted with Adam's two moments")  # fmt: skip
def twelve_bytes_of_adam():
    moments = step("plain").held["optimizer"] / step("plain").parameters
    measured = {"bytes of the moments": moments, "with float32 master weights": moments + 4}
    return measured, about(moments + 4, 12), about(moments, 12)


@claims.frameworks("bytes per parameter: 2 + 4 + 8/N, 2 + 12/N, 14/N under the stages (its figure 2)",
                   "each stage in mixed precision at N = 8", "no float32 master weights are kept")  # fmt: skip
def boxes_of_figure_two():
    """Against engines with bfloat16 weights and float32 gradients."""
    mixed = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    # The float32 copy: beside bfloat16 weights 4/N; in ZeRO-3 the only one, where the figure has 2/N.
    boxes = {"zero1": (2 + 4 + 8 / RANKS, 4), "zero2": (2 + 12 / RANKS, 4), "zero3": (14 / RANKS, 2)}
    rows, met, kept = {}, True, True
    for name, (box, copy) in boxes.items():
        held = step(name, **mixed).state / step(name, **mixed).parameters
        rows[name] = held, box
        met, kept = met and about(held - copy / RANKS, box, 0.02), kept and about(held, box, 0.02)
    measured = listed(rows, "{} {} and not {}")
    return f"bytes per parameter at N = 8, with float32 master weights: {measured}", met, kept


# Activations: what forward keeps for backward.

BATCH, SEQ = 4, 2048  # the article's
FORWARD = {
    "7b": "forward of a GPT of 34 blocks of width 4096 (7b) on fake tensors",
    "70b": "forward of a GPT of 86 blocks of width 8192 (70b) on fake tensors",  # Llama-3 70B has 80, and other ones
}
NOT_RECOMPUTED, RECOMPUTED = "activations are not recomputed", "every block is recomputed"


def kept(name: str, **shape) -> tuple[int, int]:
    """(bytes kept for backward, the most at once with every block recomputed: their inputs, and one's activations)."""
    whole, inputs = (saved_bytes(name, BATCH, SEQ, recompute=again, **shape) for again in (False, True))
    two, one = (saved_bytes(name, BATCH, SEQ, **{**shape, "layers": layers}) for layers in (2, 1))
    return whole, inputs + two - one


def activations(name: str, when: str, true) -> tuple:
    """Whether it is `true` of the bytes that are kept, on both sides of the condition."""
    whole, recomputed = kept(name)
    measured = f"bfloat16, fused attention: {gb(whole)} kept, {gb(recomputed)} with every block recomputed; "
    sides = (recomputed, whole) if when == RECOMPUTED else (whole, recomputed)
    return f"{measured}weights {gb(2 * parameters_of(name))}", *map(true, sides)


for words, name, when, true in (
    ("of 7B, 4 x 2048 tokens: ~20-40 GB, checkpointed or not", "7b", NOT_RECOMPUTED, lambda kept: 20e9 <= kept <= 40e9),
    ("of 7B, 4 x 2048 tokens: ~4 GB", "7b", RECOMPUTED, lambda kept: about(kept, 4e9, 0.1)),
    ("of 70B, 4 x 2048 tokens: ~30-50 GB", "70b", NOT_RECOMPUTED, lambda kept: 30e9 <= kept <= 50e9),
    ("of 70B often exceed its weights", "70b", NOT_RECOMPUTED, lambda kept: kept > 2 * parameters_of("70b")),
):
    claims.frameworks(f"activations {words}", FORWARD[name], when)(partial(activations, name, when, true))


@claims.frameworks("activations are ~2 bytes per parameter (its figure 2)", "forward of the 7b preset, two batch sizes",
                   "a rank has about 3,000 tokens at work")  # fmt: skip
def two_bytes_per_parameter():
    per = {batch * seq: saved_bytes("7b", batch, seq) / parameters_of("7b")
           for batch, seq in ((1, 1024), (3, 1024), (BATCH, SEQ))}  # fmt: skip
    few, right, many = (about(nbytes, 2, 0.1) for nbytes in per.values())
    return listed(per, "{1} for {0} tokens") + " on the rank", right, few or many


def in_segments(model, tokens):
    """The forward through `checkpoint_sequential` in 8 segments: of the last one everything is kept."""
    x = model.tokens(tokens) + model.positions(torch.arange(SEQ))
    return model.head(model.norm(checkpoint_sequential(list(model.blocks), 8, x, use_reentrant=False)))


@claims.frameworks("activation checkpointing needs about 8 times less",
                   "kept bytes of the 7b preset with and without",
                   "the model is deep and every layer a segment")  # fmt: skip
def checkpointing_eightfold():
    (whole, recomputed), (few, few_recomputed) = kept("7b"), kept("7b", layers=4)
    times = {"34 layers of 4096, each recomputed": whole / recomputed, "4 layers": few / few_recomputed}
    times["checkpoint_sequential in 8 segments, 34 layers"] = whole / saved_bytes("7b", BATCH, SEQ, run=in_segments)
    deep, shallow, segments = (about(factor, 8, 0.25) for factor in times.values())
    return listed(times, "{} {}x less"), deep, shallow or segments


def flops(early_stop: bool | None) -> int:
    """FLOPs of forward and backward of one sequence, on fake tensors; None: nothing is recomputed."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(bool(early_stop)):
        model = runs.gpt("7b", layers=8)
        if early_stop is not None:
            checkpoint_blocks(model, casts=False)
        tokens, targets = (torch.zeros(1, SEQ, dtype=torch.int64) for _ in range(2))
        next_token_loss(model(tokens), targets).backward()
    return counter.get_total_flops()


@claims.frameworks("activation checkpointing costs a third more compute", "FLOPs counted with and without",
                   "every block runs again to its end; torch's checkpoint stops earlier and costs less")  # fmt: skip
def third_more_compute():
    """torch stops recomputing when all that was saved is there again: a block's last product is not repeated."""
    whole, early = (flops(early_stop) / flops(None) - 1 for early_stop in (False, True))
    measured = f"8 layers of 4096: {whole:.1%} more FLOPs if blocks run again to their end, {early:.1%} as torch does "
    return measured + "it, without their last product", about(whole, 1 / 3, 0.1), about(early, 1 / 3, 0.1)


def recomputed_gpt():
    model = runs.small_gpt()
    checkpoint_blocks(model, casts=False)
    return model


def kept_under(name: str, model_of=runs.small_gpt, **options) -> int:
    """Bytes that forward leaves for backward under an engine, without the parameters it has gathered."""
    with MemoryLedger() as memory, runs.running(name, model_of, **options) as engine:
        flats = [bucket.flat.untyped_storage() for bucket in getattr(engine, "buckets", ())]
        before = memory.live - sum(flat.nbytes() for flat in flats)
        loss = runs.forward(engine)
        after = memory.live - sum(flat.nbytes() for flat in flats)
        del loss
    return after - before


@claims.multiple_gpus("ZeRO leaves activations as they are", "live bytes after forward under each stage")
@claims.sharding_state("sharding does not solve activation memory", "live bytes after forward under each stage")
def untouched():
    found = {name: kept_under(name) for name in ("plain", "zero1", "zero2", "zero3")}
    measured = f"kept by forward for backward, gathered weights apart: {listed(found)} bytes"
    return measured, all(about(each, found["plain"], 0.01) for each in found.values())


@claims.frameworks("FSDP checkpoints activations by use_orig_params",
                   "FSDP1 with and without, live bytes after forward")  # fmt: skip
def use_orig_params():
    with_it, without = (kept_under("fsdp1", use_orig_params=value) for value in (True, False))
    found = {"with it": with_it, "without": without, "with checkpoint() per block": kept_under("fsdp1", recomputed_gpt)}
    return "bytes that FSDP1 keeps: " + listed(found), with_it < 0.9 * without


def growth(kernel=None, **doubled) -> float:
    """How many times more bytes are kept if one of the sizes is doubled."""
    usual, rest = {"batch": 2, "seq": 128, "width": 64}, {"layers": 4, "heads": 4, "vocab": 16, "kernel": kernel}
    small, large = (saved_bytes("small", dtype=torch.float32, **sizes, **rest) for sizes in (usual, usual | doubled))
    return large / small


@claims.multiple_gpus("activations grow with batch, sequence and width", "each doubled, kept bytes weighed",
                      "attention does not keep its seq x seq scores")  # fmt: skip
def scaling():
    ratios = {"batch": growth(batch=4), "sequence": growth(seq=256), "width": growth(width=128)}
    scores = growth(SDPBackend.MATH, seq=256)
    measured = f"doubled {listed(ratios, '{} x{}')}; sequence with attention scores kept x{scores:.4g}"
    return measured, all(about(ratio, 2, 0.05) for ratio in ratios.values()), about(scores, 2, 0.05)


# Offload: what leaves the GPU, and what it costs. Dry runs on a fake GPU, and a real AdamW.

FLOPS = 989e12  # of an H100 in bfloat16, as published: no step computes quicker
PCIE = 64e9  # bytes/s to the host and as many back, generation 5 with 16 lanes: no copy is quicker


@functools.cache
def _process() -> ProcessPoolExecutor:
    """The fake GPU stays in its process for good: see `fake_gpu.register`."""
    process = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    atexit.register(process.shutdown)
    return process


@functools.cache
def offloaded(engine: str) -> dict:
    options = dry_run.arguments(["--preset", "tiny", "--ranks", str(RANKS), "--offload"])
    return _process().submit(dry_run.measure_alone, engine, options).result()


@claims.sharding_state("CPU offload saves GPU memory but kills throughput",
                       "ZeRO-3 with and without, dry; AdamW on this host; published rates",
                       "a step has few tokens per GPU", tolerance=None)  # fmt: skip
def saves_memory_and_kills_throughput():
    """What offload adds to a step does not depend on the batch; what it can hide behind, and is measured by, does."""
    usual, less = dry("zero3", preset="tiny")["peak_bytes"], offloaded("zero3")["peak_bytes"]
    own = parameters_of("7b") / RANKS
    copies = 3 * 4 * own / PCIE  # up twice, as the shard is gathered twice, and its gradient down
    update = own * 1e-9 * nanoseconds(2_000_000, [{"fused": True}])[0]
    few, many = ((copies + update) / (6 * parameters_of("7b") * tokens / FLOPS) for tokens in (2_048, 1_048_576))
    measured = f"peak on the device {usual / 1e6:.2f} MB without, {less / 1e6:.2f} MB with; 7B on 8 H100: copies at 64 "
    measured += f"GB/s {copies:.2f} s and AdamW on one thread of this host {update:.2g} s per step, {few:.2g}x the "
    measured += f"computation for 2,048 tokens per GPU, {many:.2g}x for 1,048,576"
    return measured, less < usual and few > 1, less < usual and many > 1


@claims.wordpress("FSDP2's CPU offloading can move optimizer states to RAM", "dry run of FSDP2 with its policy")
def optimizer_states_to_ram():
    device, host = offloaded("fsdp2")["held_bytes"], offloaded("fsdp2")["host"]["held_bytes"]
    measured = f"MB on the device: {listed({part: nbytes / 1e6 for part, nbytes in device.items()})}; in RAM: "
    measured += listed({part: nbytes / 1e6 for part, nbytes in host.items()})
    return measured, device["optimizer"] == 0 and host["optimizer"] >= 8 * parameters_of("tiny") / RANKS


@claims.frameworks("CPU offload: limited in FSDP, excellent in DeepSpeed", "FSDP2's policy, and a dry run with it",
                   "one wants to choose what goes, or a disk")  # fmt: skip
def fsdp_is_limited():
    """Of two ways to be limited: in what can be left on the GPU, and in how much leaves it. DeepSpeed is not run."""
    stays, goes = state(offloaded("fsdp2")), sum(offloaded("fsdp2")["host"]["held_bytes"].values())
    choices = [field.name for field in dataclasses.fields(CPUOffloadPolicy)]
    measured = f"FSDP2's policy has the choice(s) {', '.join(choices)}: not which of the three, and no disk; of the "
    measured += f"state {stays / 1e6:.4g} MB stay on the device, {goes / 1e6:.4g} MB go (DeepSpeed was not run)"
    return measured, choices == ["pin_memory"], stays > 0
