"""Claims about activations: what forward keeps for backward, weighed on fake tensors at 7B and 70B, and small."""

import contextlib
import functools

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint_sequential, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from harness.measure.memory import MemoryLedger
from harness.run.recompute import checkpoint_blocks
from harness.teach.articles.claim import (
    FRAMEWORKS,
    MULTIPLE_GPUS,
    NAMES,
    SHARDING_STATE,
    Claim,
    about,
    gb,
    holds_when,
    verdict,
)
from harness.teach.articles.runs import (
    SGD,
    batch_for,
    build,
    fake_ranks,
    gpt,
    loss_for,
    new_dtype,
    parameters_of,
    saved_bytes,
    small_gpt,
)

BATCH, SEQ = 4, 2048  # the article's


def one_block(name: str, **shape) -> int:
    """What one more block keeps for backward: alive while it is recomputed."""
    layers = gpt_layers(name, **shape)
    more, fewer = (saved_bytes(name, BATCH, SEQ, **{**shape, "layers": n}) for n in (2, 1))
    return more - fewer if layers > 1 else 0


def gpt_layers(name: str, **shape) -> int:
    with torch.device("meta"):
        return len(gpt(name, **shape).blocks)


def recomputed_bytes(name: str, **shape) -> int:
    """The most that is kept at once when every block is recomputed: all blocks' inputs, and one block's activations."""
    return saved_bytes(name, BATCH, SEQ, recompute=True, **shape) + one_block(name, **shape)


def twenty_to_forty() -> tuple[str, str]:
    kept, recomputed = saved_bytes("7b", BATCH, SEQ), recomputed_bytes("7b")
    measured = f"{gb(kept)} kept, {gb(recomputed)} with every block recomputed (bfloat16, fused attention)"
    return measured, holds_when("activations are not recomputed", 20e9 <= kept <= 40e9, 20e9 <= recomputed <= 40e9)


def about_four() -> tuple[str, str]:
    kept, recomputed = saved_bytes("7b", BATCH, SEQ), recomputed_bytes("7b")
    measured = f"{gb(recomputed)} with every block recomputed, {gb(kept)} without"
    return measured, holds_when("every block is recomputed", about(recomputed, 4e9, 0.1), about(kept, 4e9, 0.1))


def thirty_to_fifty() -> tuple[str, str]:
    kept, recomputed = saved_bytes("70b", BATCH, SEQ), recomputed_bytes("70b")
    measured = f"{gb(kept)} kept, {gb(recomputed)} with every block recomputed (bfloat16, fused attention)"
    return measured, verdict(30e9 <= kept <= 50e9 or 30e9 <= recomputed <= 50e9)


def more_than_weights() -> tuple[str, str]:
    kept, recomputed, weights = saved_bytes("70b", BATCH, SEQ), recomputed_bytes("70b"), 2 * parameters_of("70b")
    measured = f"{gb(kept)} of activations, {gb(weights)} of weights; the article's own 30-50 GB would be less"
    return measured, holds_when("activations are not recomputed", kept > weights, recomputed > weights)


def two_bytes_per_parameter() -> tuple[str, str]:
    per = {n: saved_bytes("7b", n, 1024) / parameters_of("7b") for n in (3, 1)}
    per[8] = saved_bytes("7b", BATCH, SEQ) / parameters_of("7b")
    measured = ", ".join(f"{per[n]:.3g} for {n * 1024:,} tokens" for n in sorted(per)) + " on the rank"
    others = about(per[1], 2, 0.1) or about(per[8], 2, 0.1)
    return measured, holds_when("a rank has about 3,000 tokens at work", about(per[3], 2, 0.1), others)


def eightfold() -> tuple[str, str]:
    shapes = {"34 layers": {}, "4 layers": {"layers": 4}}
    factors = {n: saved_bytes("7b", BATCH, SEQ, **s) / recomputed_bytes("7b", **s) for n, s in shapes.items()}
    measured = ", ".join(f"{name} of 4096, each recomputed: {factor:.3g}x less" for name, factor in factors.items())
    segments = saved_bytes("7b", BATCH, SEQ) / in_segments(8)
    deep, shallow = (about(factor, 8, 0.25) for factor in factors.values())
    measured += f"; checkpoint_sequential in 8 segments, 34 layers: {segments:.3g}x"
    return measured, holds_when(
        "the model is deep and every layer a segment", deep, shallow or about(segments, 8, 0.25)
    )


@functools.cache
def in_segments(segments: int) -> int:
    """Kept for backward by `checkpoint_sequential` over the 7B blocks: of the last segment everything."""
    with FakeTensorMode(), new_dtype(torch.bfloat16), MemoryLedger() as memory:
        model = gpt("7b")
        tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
        before = memory.live
        x = model.tokens(tokens) + model.positions(torch.arange(SEQ))
        x = checkpoint_sequential(list(model.blocks), segments, x, use_reentrant=False)
        logits = model.head(model.norm(x))
        saved = memory.live - before
        del logits
    return saved


def third_more_compute() -> tuple[str, str]:
    """torch stops recomputing when all that was saved is there again: a block's last product is not repeated."""
    plain = flops(None)
    whole, early = (flops(early_stop) / plain - 1 for early_stop in (False, True))
    measured = (
        f"8 layers of 4096: {whole:.1%} more FLOPs if blocks run again to their end, {early:.1%} as torch does it, "
    )
    condition = "every block runs again to its end; torch's checkpoint stops earlier and costs less"
    return measured + "without their last product", holds_when(
        condition, about(whole, 1 / 3, 0.1), about(early, 1 / 3, 0.1)
    )


def flops(early_stop: bool | None) -> int:
    """FLOPs of forward and backward of one sequence, on fake tensors; None: nothing is recomputed."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(bool(early_stop)):
        model = gpt("7b", layers=8)
        if early_stop is not None:
            checkpoint_blocks(model, casts=False)
        tokens, targets = (torch.zeros(1, SEQ, dtype=torch.int64) for _ in range(2))
        loss_for(model)(model(tokens), targets).backward()
    return counter.get_total_flops()


def kept_under(name: str, **options) -> int:
    """Bytes that forward leaves for backward under an engine, without the parameters it has gathered."""
    with fake_ranks(8), MemoryLedger() as memory:
        model = small_gpt()
        inputs, targets = batch_for(model)
        if options.pop("recompute", False):
            checkpoint_blocks(model, casts=False)
        engine = build(name, model, SGD, **options)

        def gathered() -> int:
            flats = [bucket.flat for unit in getattr(engine, "units", ()) for bucket in unit.buckets]
            flats += [bucket.flat for bucket in engine.root.buckets] if flats else []
            return sum(flat.untyped_storage().nbytes() for flat in flats)

        before = memory.live - gathered()
        loss = loss_for(model)(engine(inputs), targets)
        kept = memory.live - gathered() - before
        del loss
        engine = model = None
    return kept


def untouched() -> tuple[str, str]:
    kept = {name: kept_under(name) for name in ("plain", "zero1", "zero2", "zero3")}
    measured = "kept by forward for backward, gathered weights apart: " + ", ".join(
        f"{NAMES[n]} {k:,}" for n, k in kept.items()
    )
    return measured + " bytes", verdict(all(about(each, kept["plain"], 0.01) for each in kept.values()))


def use_orig_params() -> tuple[str, str]:
    with_it, without = (kept_under("fsdp1", use_orig_params=value) for value in (True, False))
    recomputed = kept_under("fsdp1", recompute=True)
    measured = (
        f"FSDP1 keeps {with_it:,} bytes with it, {without:,} without it, {recomputed:,} with checkpoint() per block"
    )
    return measured, verdict(with_it < 0.9 * without)


def scaling() -> tuple[str, str]:
    def kept(batch=2, seq=128, width=64, backend=None) -> int:
        with sdpa_kernel(backend) if backend else contextlib.nullcontext():
            forward = saved_bytes.__wrapped__  # the kernel is no argument that results could be kept by
            return forward("small", batch, seq, torch.float32, layers=4, width=width, heads=4, vocab=16)

    ratios = {"batch": kept(batch=4) / kept(), "sequence": kept(seq=256) / kept(), "width": kept(width=128) / kept()}
    scores = kept(seq=256, backend=SDPBackend.MATH) / kept(seq=128, backend=SDPBackend.MATH)
    measured = "doubled " + ", ".join(f"{what} x{ratio:.3g}" for what, ratio in ratios.items())
    measured += f"; sequence with attention scores kept x{scores:.3g}"
    linear = all(about(ratio, 2, 0.05) for ratio in ratios.values())
    return measured, holds_when("attention does not keep its seq x seq scores", linear, about(scores, 2, 0.05))


_7B = "forward of a GPT of 34 blocks of width 4096 (7b) on fake tensors"
_70B = "forward of a GPT of 86 blocks of width 8192 (70b) on fake tensors"  # Llama-3 70B has 80, and other ones
CLAIMS = [
    Claim(MULTIPLE_GPUS, "ZeRO leaves activations as they are", "live bytes after forward under each stage", untouched),
    Claim(MULTIPLE_GPUS, "activations grow with batch, sequence and width",
          "each doubled, kept bytes weighed", scaling),
    Claim(SHARDING_STATE, "sharding does not solve activation memory",
          "live bytes after forward under each stage", untouched),
    Claim(FRAMEWORKS, "activations of 7B, 4 x 2048 tokens: ~20-40 GB, checkpointed or not", _7B, twenty_to_forty),
    Claim(FRAMEWORKS, "activations of 7B, 4 x 2048 tokens: ~4 GB", _7B, about_four),
    Claim(FRAMEWORKS, "activations of 70B, 4 x 2048 tokens: ~30-50 GB", _70B, thirty_to_fifty),
    Claim(FRAMEWORKS, "activations of 70B often exceed its weights", _70B, more_than_weights),
    Claim(FRAMEWORKS, "activations are ~2 bytes per parameter (its figure 2)",
          "forward of the 7b preset, two batch sizes", two_bytes_per_parameter),
    Claim(FRAMEWORKS, "activation checkpointing costs a third more compute",
          "FLOPs counted with and without", third_more_compute),
    Claim(FRAMEWORKS, "activation checkpointing needs about 8 times less",
          "kept bytes of the 7b preset with and without", eightfold),
    Claim(FRAMEWORKS, "FSDP checkpoints activations by use_orig_params",
          "FSDP1 with and without, live bytes after forward", use_orig_params),
]  # fmt: skip
