"""Claims about the bytes of parameters, gradients, optimizer state and activations.

Most are dry runs of the real engines: one rank's training step on fake tensors (`measure/memory.py`). Its 7B is 34
blocks of width 4096 with 6.986e9 parameters, so a table for 7e9 is met to 0.5%. Ψ is the number of parameters: float32
weights are 4Ψ bytes.
"""

import dataclasses
import functools
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from harness.measure import memory
from harness.measure.ledger import MemoryLedger, held_bytes
from harness.run.model import next_token_loss
from harness.run.recompute import checkpoint_blocks
from harness.teach.articles import runs
from harness.teach.articles.claim import Claims, about, above, gb, listed
from harness.teach.articles.runs import parameters_of, saved_bytes, step, toy

claims = Claims()
P7, P70 = parameters_of("7b"), parameters_of("70b")
H100 = 80e9  # bytes


@functools.cache
def dry(engine: str, *options: str, preset: str = "7b", ranks: int = 8) -> dict:
    """A dry run of `engine`: its row of `./launch.sh memory`. Run once, whoever asks."""
    measured = memory.measure_apart if "--offload" in options else memory.measure_alone
    return measured(engine, memory.arguments(["--preset", preset, "--ranks", str(ranks), *options]))


# An article's 7B under ZeRO-3: bfloat16, every block recomputed, 4 x 2,048 tokens.
checkpointed = partial(dry, "zero3", "--batch", "4", "--precision", "bf16", "--checkpoint-activations")


def state(run: dict) -> int:
    return sum(run["held_bytes"].values())


# What a rank holds of 7B.


def table_7b(engine: str, *claimed: float) -> tuple:
    """Against GB of each row and of the total of an article's table."""
    found = [*dry(engine)["held_bytes"].values(), state(dry(engine))]
    measured = f"{gb(found[-1])} = " + " + ".join(f"{nbytes / 1e9:.3g}" for nbytes in found[:-1])
    return measured, all(about(nbytes, row * 1e9) for nbytes, row in zip(found, (*claimed, sum(claimed))))


def before_the_first_batch() -> dict:
    """Of real DDP with AdamW. Without init_sync, as gloo keeps what it broadcasts for a moment longer."""
    with MemoryLedger() as memory, runs.running("ddp", optimizer_cls=runs.ADAMW, init_sync=False) as engine:
        before = memory.live
        runs.forward(engine).backward()
        engine.step()
        after = sum(held_bytes(engine).values())
        del engine
    found = {"GB at 7B after the first step": after, "before the first batch (weights, DDP's buckets)": before}
    return {words: 7 * nbytes / step("ddp").parameters for words, nbytes in found.items()}


# fmt: off
DRY = "dry run of {} at 7B on 8 ranks"
BF16 = DRY.format("ZeRO-3") + ", bf16, batch 4 x 2048"
for article, words, name, engine, *claimed in (
    (claims.multiple_gpus, "7B in fp32 under DDP: 28 + 28 + 56 = 112 GB", "DDP", "ddp", 28, 28, 56),
    (claims.multiple_gpus, "under ZeRO-1: 28 + 28 + 7 = 63 GB", "ZeRO-1", "zero1", 28, 28, 7),
    (claims.multiple_gpus, "under ZeRO-2: 28 + 3.5 + 7 = 38.5 GB", "ZeRO-2", "zero2", 28, 3.5, 7),
    (claims.multiple_gpus, "under ZeRO-3: 3.5 + 3.5 + 7 = 14 GB", "ZeRO-3", "zero3", 3.5, 3.5, 7),
    (claims.wordpress, "7B with Adam in FP32: about 112 GB on every GPU", "DDP", "ddp", 28, 28, 56),
    (claims.wordpress, "ZeRO-1 still replicates parameters and gradients", "ZeRO-1", "zero1", 28, 28, 7),
):
    article(words, DRY.format(name), "", partial(table_7b, engine, *claimed))
claims.multiple_gpus("ZeRO-3 on 8 GPUs: 8 times less memory", DRY.format("DDP and ZeRO-3") + ", state", "",
                     lambda: {"times less than DDP's": state(dry("ddp")) / state(dry("zero3"))}, says=8)
claims.scaling("each of 8 GPUs stores 1/8 of the optimizer state (the share is blank in our copy)",
               DRY.format("ZeRO-1"), "", lambda: {
    "of DDP's": dry("zero1")["held_bytes"]["optimizer"] / dry("ddp")["held_bytes"]["optimizer"]}, says=1 / 8)
claims.sharding_state("real memory is above the ideal", DRY.format("ZeRO-3"), "", lambda: (
    f"peak {gb(dry('zero3')['peak_bytes'])} for {gb(state(dry('zero3')))} of state: "
    + listed({part: gb(nbytes) for part, nbytes in dry("zero3")["peak_parts"].items() if nbytes > 1e8}),
    dry("zero3")["peak_bytes"] > state(dry("zero3"))))
claims.wordpress("FSDP runs a 7B model on 14 GB", DRY.format("ZeRO-3") + ", 1 x 2048 tokens",
                 "N = 8 and only what is held between steps counts", lambda: {
    "GB of state": state(dry("zero3")) / 1e9, "at the peak of a step": dry("zero3")["peak_bytes"] / 1e9,
    "in bfloat16 with blocks recomputed": checkpointed()["peak_bytes"] / 1e9}, says=14)
claims.frameworks("7B under ZeRO-3 takes 16.25 GB", BF16, "", lambda: (
    {"state": gb(state(checkpointed())), "peak with blocks recomputed": gb(checkpointed()["peak_bytes"]),
     "its 2 bytes for float32 weights lack": gb(2 * P7 / 8)},
    about(checkpointed()["peak_bytes"], 16.25e9, 0.02) or about(state(checkpointed()) + 4e9, 16.25e9, 0.02)))
# Not recomputed: what is alive when forward is over, at the very least.
claims.frameworks("7B under ZeRO-3 fits a 40 GB A100", BF16, "activations are recomputed", lambda: {
    "GB at the peak with blocks recomputed": checkpointed()["peak_bytes"] / 1e9, "state and activations after forward, "
    "without": (state(checkpointed()) * 3 / 4 + saved_bytes("7b", 4, 2048)) / 1e9}, says=lambda size: size < 40)
claims.wordpress("an 80 GB GPU is out of memory before the first micro-batch",
                 "real DDP, live bytes before its first batch, state after its first step",
                 "the first step is counted, in which AdamW makes its state", before_the_first_batch, says=above(80))
# fmt: on

# How that shrinks with N.


def times_smaller(name: str, ranks: int, than: int = 1) -> float:
    """How many times smaller an engine's state is on so many ranks than on `than` ranks. On one it is all of it."""
    return (step("single") if than == 1 else step(name, ranks=than)).state / step(name, ranks=ranks).state


def per_parameter(name: str, **options) -> float:
    return step(name, **options).state / step(name, **options).parameters


def layers_over_the_state(ranks: int) -> float:
    """What ZeRO-3 has gathered does not shrink with N."""
    run = step("zero3", ranks=ranks)
    return (run.peak - run.state) / (run.parameter_bytes / 8)


@functools.cache
def copies(name: str) -> float:
    """Optimizer state on all 8 ranks together, over what one copy is."""
    together = sum(step(name, toy, rank=rank).held["optimizer"] for rank in range(8))
    return together / step("single", toy).held["optimizer"]


# fmt: off
claims.wordpress("under DDP no number of GPUs lowers the memory of each",
                 "dry run of DDP, a small GPT, on 2 and 64 ranks", "", lambda: {
    "bytes more on each of 64": state(dry("ddp", preset="toy", ranks=64)) - state(dry("ddp", preset="toy", ranks=2))},
    says=0)
claims.frameworks("DDP keeps 4 redundant copies of the optimizer state", "AdamW's state, the same on every rank",
                  "N = 5", lambda: {f"on {n} ranks": n * copies("ddp") / 8 - 1 for n in (5, 2, 8)}, says=4)
claims.scaling("no redundant optimizer state under ZeRO", "the states of all 8 ranks added up", "",
               lambda: {f"copy that 8 ranks hold in {name}": copies(name) for name in ("zero1", "zero3")}, says=1)
claims.sharding_state("sharding divides the sharded state by N (the divisor is blank in our copy)",
                      "ZeRO-3 at N = 2 to 32", "", lambda: {
    f"of all state / {n} on each of {n}": n / times_smaller("zero3", n) for n in (2, 4, 8, 32)}, says=1)
claims.frameworks("FSDP and ZeRO-3 train models 8 to 16 times larger", "state at N = 4, 8 and 16", "N is 8 to 16",
                  lambda: (
    listed({n: times_smaller("zero3", n) for n in (4, 8, 16)}, "N={} x{}") + " (state; activations are not cut)",
    all(about(times_smaller("zero3", n), n) for n in (8, 16)), 8 <= times_smaller("zero3", 4) <= 16))
claims.frameworks("the stages reduce memory linearly with the number of GPUs", "state of each stage at N = 8 and 32",
                  "the stage is ZeRO-3", lambda: (
    "state at N = 8 over N = 32: " + listed({name: times_smaller(name, 32, 8) for name in runs.STAGES}),
    about(times_smaller("zero3", 32, 8), 4, 0.02),
    about(times_smaller("zero1", 32, 8), 4, 0.02) or about(times_smaller("zero2", 32, 8), 4, 0.02)))
claims.scaling("largest model: by one GPU under DDP, more under ZeRO-1 and -2, by the cluster under ZeRO-3",
               "state per parameter at N = 512", "", lambda: (
    "bytes per parameter at N = 512: " + listed({n: per_parameter(n, ranks=512) for n in ("ddp", *runs.STAGES)}),
    per_parameter("ddp") > per_parameter("zero1", ranks=512) > per_parameter("zero2", ranks=512)
    > 10 * per_parameter("zero3", ranks=512)))
claims.sharding_state("a layer too large for a GPU needs model parallelism as well",
                      "ZeRO-3, peak over state at N = 8 and 32", "", lambda: {
    f"layers is the peak above the state on {n}": layers_over_the_state(n) for n in (8, 32)}, says=above(2))
# fmt: on

# Mixed precision.


@functools.cache
def weighed(gradient_dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """Bytes per parameter alive after a step, of bfloat16 weights updated through float32 ones by AdamW."""
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
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


def added_up(dtype: torch.dtype, *without: str) -> float:
    return sum(nbytes for name, nbytes in weighed(dtype).items() if name not in without)


def in_words(dtype: torch.dtype) -> str:
    return listed(weighed(dtype), "{1} {0}", " + ")


def ddp_in_bf16() -> float:
    """Bytes per parameter that DDP holds when it trains in bfloat16 through autograd's casts."""
    run = dry("ddp", "--precision", "bf16", preset="toy")
    return state(run) / (run["held_bytes"]["parameters"] / 4)


def boxes_of_figure_two() -> tuple:
    """Against engines with bfloat16 weights and float32 gradients at N = 8."""
    # The float32 copy: beside bfloat16 weights 4/N; in ZeRO-3 the only one, where the figure has 2/N.
    boxes = {"zero1": (2 + 4 + 8 / 8, 4 / 8), "zero2": (2 + 12 / 8, 4 / 8), "zero3": (14 / 8, 2 / 8)}
    held = {name: per_parameter(name, dtype=torch.bfloat16) for name in boxes}
    measured = listed({name: (held[name], box) for name, (box, _) in boxes.items()}, "{} {} and not {}")
    without = all(about(held[name] - copy, box, 0.02) for name, (box, copy) in boxes.items())
    with_them = all(about(held[name], box, 0.02) for name, (box, _) in boxes.items())
    return f"bytes per parameter at N = 8, with float32 master weights: {measured}", without, with_them


# fmt: off
WEIGHED = "bfloat16 training with AdamW, tensors weighed"
HALF, SINGLE = torch.bfloat16, torch.float32
for article, words in ((claims.sharding_state, "BF16 with Adam: about 16 bytes per parameter"),
                       (claims.scaling, "FP16 with Adam: 2 + 2 + 12 bytes (blank in our copy), 112 GB for 7B")):
    article(words, WEIGHED, "", lambda: {
        f"bytes = {in_words(HALF)}; {gb(added_up(HALF) * P7)} for the 7b preset": added_up(HALF)}, says=16)
claims.frameworks("mixed precision takes 14 bytes per parameter, 98 GB for 7B (its table)", WEIGHED,
                  "no float32 master weights are kept", lambda: {
    "bytes without them": added_up(SINGLE, "float32 weights"), f"= {in_words(SINGLE)}": added_up(SINGLE)}, says=14)
claims.frameworks("mixed precision takes 16 bytes per parameter, 112 GB for 7B (its text)",
                  "dry run of DDP, and two kinds of it, tensors weighed",
                  "gradients are bfloat16, or bfloat16 weights exist only in forward and backward", lambda: {
    "with bfloat16 weights made for each forward": ddp_in_bf16(), f"= {in_words(HALF)}": added_up(HALF),
    f"= {in_words(SINGLE)}": added_up(SINGLE)}, says=16)
claims.frameworks("7B under DDP, ~112 GB, does not fit an H100", "dry run of DDP in bf16, bytes per parameter", "",
                  lambda: {"GB; an H100 has 80": ddp_in_bf16() * P7 / 1e9}, says=112)
claims.frameworks("Adam's states cost 12 bytes per parameter and not 4", WEIGHED,
                  "float32 master weights are counted with Adam's two moments", lambda: {
    "bytes of both": added_up(HALF, "weights", "gradients"), "of the moments": weighed(HALF)["moments"]}, says=12)
claims.scaling("the optimizer state is the largest part", WEIGHED, "", lambda: {
    f"of {in_words(HALF)}": added_up(HALF, "weights", "gradients") / added_up(HALF)}, says=above(0.5))
claims.frameworks("bytes per parameter: 2 + 4 + 8/N, 2 + 12/N, 14/N under the stages (its figure 2)",
                  "each stage in mixed precision at N = 8", "no float32 master weights are kept", boxes_of_figure_two)
# fmt: on

# Activations: what forward keeps for backward, of the articles' 4 sequences of 2,048 tokens.


def kept(name: str, **shape) -> tuple[int, int]:
    """(bytes kept for backward, the most at once with every block recomputed: their inputs, and one's activations)."""
    whole, inputs = (saved_bytes(name, 4, 2048, recompute=again, **shape) for again in (False, True))
    two, one = (saved_bytes(name, 4, 2048, **{**shape, "layers": layers}) for layers in (2, 1))
    return whole, inputs + two - one


def activations(name: str, true, first=0) -> tuple:
    """Whether it is `true` of the bytes that are kept, on both sides: `first` 0 of all, 1 with blocks recomputed."""
    both = kept(name)
    measured = f"bfloat16, fused attention: {gb(both[0])} kept, {gb(both[1])} with every block recomputed; "
    return f"{measured}weights {gb(2 * parameters_of(name))}", true(both[first]), true(both[1 - first])


def flops(early_stop: bool | None) -> int:
    """FLOPs of forward and backward of one sequence, on fake tensors; None: nothing is recomputed."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(bool(early_stop)):
        model = runs.gpt("7b", layers=8)
        if early_stop is not None:
            checkpoint_blocks(model, casts=False)
        tokens, targets = (torch.zeros(1, 2048, dtype=torch.int64) for _ in range(2))
        next_token_loss(model(tokens), targets).backward()
    return counter.get_total_flops()


def recomputed_gpt():
    model = runs.small_gpt()
    checkpoint_blocks(model, casts=False)
    return model


@functools.cache
def kept_under(name: str, model_of=runs.small_gpt, **options) -> int:
    """Bytes that forward leaves for backward under an engine, without the parameters it has gathered."""
    with MemoryLedger() as memory, runs.running(name, model_of, **options) as engine:
        flats = [bucket.flat.untyped_storage() for bucket in getattr(engine, "buckets", ())]
        before = memory.live - sum(flat.nbytes() for flat in flats)
        loss = runs.forward(engine)
        after = memory.live - sum(flat.nbytes() for flat in flats)
        del loss
    return after - before


def growth(kernel=None, **doubled) -> float:
    """How many times more bytes are kept if one of the sizes is doubled."""
    usual, rest = {"batch": 2, "seq": 128, "width": 64}, {"layers": 4, "heads": 4, "vocab": 16, "kernel": kernel}
    small, large = (saved_bytes("small", dtype=torch.float32, **sizes, **rest) for sizes in (usual, usual | doubled))
    return large / small


# fmt: off
FORWARD_7B = "forward of a GPT of 34 blocks of width 4096 (7b) on fake tensors"
FORWARD_70B = "forward of a GPT of 86 blocks of width 8192 (70b) on fake tensors"  # Llama-3 70B has 80, and other ones
ALIVE = "live bytes after forward under each stage, gathered weights apart"
for article, words in ((claims.multiple_gpus, "ZeRO leaves activations as they are"),
                       (claims.sharding_state, "sharding does not solve activation memory")):
    article(words, ALIVE, "", lambda: (
        "bytes kept for backward: " + listed({name: kept_under(name) for name in ("single", *runs.STAGES)}),
        all(about(kept_under(name), kept_under("single"), 0.01) for name in runs.STAGES)))
claims.multiple_gpus("activations grow with batch, sequence and width", "each doubled, kept bytes weighed",
                     "attention does not keep its seq x seq scores", lambda: (
    "kept bytes, doubled " + listed({"batch": growth(batch=4), "sequence": growth(seq=256), "width": growth(width=128),
                                     "sequence with scores kept": growth(SDPBackend.MATH, seq=256)}, "{} x{}"),
    all(about(growth(**size), 2, 0.05) for size in ({"batch": 4}, {"seq": 256}, {"width": 128})),
    about(growth(SDPBackend.MATH, seq=256), 2, 0.05)))
claims.frameworks("activations of 7B, 4 x 2048 tokens: ~20-40 GB, checkpointed or not", FORWARD_7B,
                  "activations are not recomputed", partial(activations, "7b", lambda kept: 20e9 <= kept <= 40e9))
claims.frameworks("activations of 7B, 4 x 2048 tokens: ~4 GB", FORWARD_7B, "every block is recomputed",
                  partial(activations, "7b", lambda kept: about(kept, 4e9, 0.1), first=1))
claims.frameworks("activations of 70B, 4 x 2048 tokens: ~30-50 GB", FORWARD_70B, "they are not recomputed",
                  partial(activations, "70b", lambda kept: 30e9 <= kept <= 50e9))
claims.frameworks("activations of 70B often exceed its weights", FORWARD_70B, "activations are not recomputed",
                  partial(activations, "70b", lambda kept: kept > 2 * P70))
claims.frameworks("activations are ~2 bytes per parameter (its figure 2)", "forward of the 7b preset, two batch sizes",
                  "a rank has about 3,000 tokens at work", lambda: {
    f"for {n * 1024} tokens on the rank": saved_bytes("7b", n, 1024) / P7 for n in (3, 1, 8)}, says=2, off=0.1)
claims.frameworks("activation checkpointing needs about 8 times less", "kept bytes of the 7b preset with and without",
                  "the model is deep", lambda: {
    f"times less in {words}, each recomputed": (whole := kept("7b", layers=layers))[0] / whole[1]
    for words, layers in (("34 layers of 4096", 34), ("4 layers", 4))}, says=8, off=0.25)
claims.frameworks("activation checkpointing costs a third more compute", "FLOPs counted with and without",
                  "every block runs again to its end; torch's checkpoint stops earlier and costs less", lambda: {
    f"% more FLOPs for 8 layers of 4096 if blocks run again {words}": 100 * (flops(early_stop) / flops(None) - 1)
    for words, early_stop in (("to their end", False), ("without their last product, as torch does", True))},
    says=100 / 3, off=0.1)
claims.frameworks("FSDP checkpoints activations by use_orig_params", "FSDP1 with and without, live bytes after forward",
                  "", lambda: (
    "bytes that FSDP1 keeps: " + listed({"with it": kept_under("fsdp1"), "without it": kept_under(
        "fsdp1", use_orig_params=False), "with checkpoint() per block": kept_under("fsdp1", recomputed_gpt)}),
    kept_under("fsdp1") < 0.9 * kept_under("fsdp1", use_orig_params=False)))
# fmt: on

# Offload: what leaves the GPU, and what it costs. Dry runs on a fake GPU.


def offloaded(engine: str) -> dict:
    return dry(engine, "--offload", preset="tiny")


def mb(found: dict) -> str:
    return listed({name: nbytes / 1e6 for name, nbytes in found.items()})


def peaks() -> dict[str, int]:
    return {"without": dry("zero3", preset="tiny")["peak_bytes"], "with": offloaded("zero3")["peak_bytes"]}


# fmt: off
# What offload adds to a step does not depend on the batch; what it can hide behind, and is measured by, does. Here for
# a parameter on 8 H100: float32, up twice and down once at 64 GB/s, which no link exceeds, over 6 FLOPs for each token.
COPIES = {f"{tokens:,}": (3 * 4 / 8 / 64e9) / (6 * tokens / 989e12) for tokens in (2_048, 1_048_576)}
claims.sharding_state("CPU offload saves GPU memory but kills throughput",
                      "ZeRO-3 with and without, dry; published rates", "a step has few tokens per GPU", lambda: (
    f"peak on the device, MB: {mb(peaks())}; copies over computation, 8 H100 with links of 64 GB/s: "
    + listed(COPIES, "{1} for {0} tokens per GPU") + "; AdamW on the host comes on top",
    *(peaks()["with"] < peaks()["without"] and longer > 1 for longer in COPIES.values())))
claims.wordpress("FSDP2's CPU offloading can move optimizer states to RAM", "dry run of FSDP2 with its policy", "",
                 lambda: (
    f"MB on the device: {mb(offloaded('fsdp2')['held_bytes'])}; in RAM: {mb(offloaded('fsdp2')['host']['held_bytes'])}",
    offloaded("fsdp2")["held_bytes"]["optimizer"] == 0
    and offloaded("fsdp2")["host"]["held_bytes"]["optimizer"] >= 8 * parameters_of("tiny") / 8))
# Of two ways to be limited: in what can be left on the GPU, and in how much leaves it. DeepSpeed is not run.
claims.frameworks("CPU offload: limited in FSDP, excellent in DeepSpeed", "FSDP2's policy, and a dry run with it",
                  "one wants to choose what goes, or a disk", lambda: (
    {"FSDP2's policy has the choices": [field.name for field in dataclasses.fields(CPUOffloadPolicy)],
     "MB of state that stay on the device": state(offloaded("fsdp2")) / 1e6,
     "MB that go": sum(offloaded("fsdp2")["host"]["held_bytes"].values()) / 1e6},
    [field.name for field in dataclasses.fields(CPUOffloadPolicy)] == ["pin_memory"], state(offloaded("fsdp2")) > 0))
# fmt: on
