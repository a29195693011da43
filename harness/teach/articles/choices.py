"""Claims about which engine, batch and option to take: predicted by the planner, with its dry run's memory."""

from dataclasses import replace

from harness.plan.published import OUT_OF_MEMORY, ROWS
from harness.run.model import GPTConfig
from harness.teach.articles.claim import (
    FRAMEWORKS,
    MULTIPLE_GPUS,
    SCALING,
    SHARDING_STATE,
    WORDPRESS,
    Claim,
    gb,
    holds_when,
    verdict,
)
from harness.teach.articles.planned import ASSUMED, GPUS, H100, ISLAND, ms, predicted, setup

NOISE = 0.03  # published rows that differ by less are equal
BERT = GPTConfig(24, 1024, 16, 30_522, 512)  # as large as BERT-large; ours is causal
GPU_GB = H100.gpu.memory_gb


def when_ddp_breaks() -> tuple[str, str]:
    found = predicted(setup("7b", "ddp", 128))
    weights, state = 2 * found.parameters, 16 * found.parameters
    measured = f"predicted: DDP needs {gb(found.needed_bytes)} for 7B: weights {gb(weights)} in bfloat16, state "
    measured += f"{gb(state)}, 2,048 tokens; a GPU has {GPU_GB} GB"
    breaks = not found.fits
    return measured, holds_when(
        "the model counts with its gradients, optimizer state and activations",
        breaks and state > GPU_GB * 1e9,
        breaks and weights > GPU_GB * 1e9,
    )


def published_rows(model: str, engine: str) -> dict[tuple, float]:
    return {
        (row.setup.ranks, row.setup.micro_batch): row.tokens_per_s
        for row in ROWS
        if row.model == model and row.setup.engine == engine and row.gpu == "h100"
    }


def ddp_for_what_fits() -> tuple[str, str]:
    """The one published model that was run with both; ZeRO-1 is the paper's, of 2Ψ."""
    ddp, zero1 = published_rows("1.34B", "ddp"), published_rows("1.34B", "zero1_2psi")
    faster = {place: ddp[place] / zero1[place] - 1 for place in sorted(ddp.keys() & zero1.keys())}
    measured = "published, 1.34B, tokens/s of DDP beside ZeRO-1: " + ", ".join(
        f"{more:+.1%} on {ranks} GPUs with {sequences} per micro-batch" for (ranks, sequences), more in faster.items()
    )
    return measured, verdict(min(faster.values()) >= -NOISE and max(faster.values()) > NOISE)


def fsdp_for_all_that_is_larger() -> tuple[str, str]:
    """The published model that DDP could not hold: did it need its parameters sharded?"""
    too_large = [row.model for row in OUT_OF_MEMORY if row.setup.engine == "ddp"]
    trained = {model: published_rows(model, "zero1_2psi") for model in too_large}
    fails = [row.model for row in OUT_OF_MEMORY if row.setup.engine == "zero1_2psi"]
    measured = f"published: DDP does not fit for {', '.join(too_large)}; ZeRO-1 trains it at " + ", ".join(
        f"{rate:,} tokens/s/GPU on {ranks}"
        for rows in trained.values()
        for (ranks, batch), rate in sorted(rows.items())
        if batch == 1
    )
    measured += f", and fails for {', '.join(fails)}"
    needed = not any(trained.values())
    return measured, holds_when("ZeRO-1 and -2 do not fit either", bool(fails), needed)


def sweet_spot() -> tuple[str, str]:
    """It is one if it fits where DDP does not, and is faster than what saves more. On 128 GPUs in two networks."""
    ddp, *sharded = (setup("7b", engine, 128) for engine in ("ddp", "zero2", "zero3"))
    found = {
        where: [predicted(which, cluster) for which in sharded]
        for where, cluster in (("in nodes of 8", H100), ("all linked as in a node", ISLAND))
    }
    too_large = not predicted(ddp).fits
    (zero2, zero3), *_ = found.values()
    measured = (
        f"predicted, 7B, 2,048 tokens on each of 128 GPUs; DDP fits: {not too_large}; ZeRO-2 has "
        f"{gb(zero2.peak_bytes)}, ZeRO-3 {gb(zero3.peak_bytes)}; their steps, "
    )
    measured += "; ".join(f"{where}: {ms(zero2)}, {ms(zero3)}" for where, (zero2, zero3) in found.items())
    wins = [too_large and zero2.fits and zero2.step < zero3.step for zero2, zero3 in found.values()]
    return measured, holds_when("communication outweighs computation, as on many nodes with few tokens", *wins)


def bert() -> tuple[str, str]:
    """Worth it: DDP does not fit, or is slower by more than the planner errs (18% at most)."""
    ddp, zero3 = (predicted(setup(BERT, engine, 8, micro_batch=16)) for engine in ("ddp", "zero3"))
    small = GPUS["t4"].memory_gb
    measured = (
        f"predicted, a GPT of BERT-large's size, 16 x 512 tokens on each of 8 GPUs: DDP {ms(ddp)} and "
        f"{gb(ddp.needed_bytes)}, ZeRO-3 {ms(zero3)} and {gb(zero3.needed_bytes)}"
    )
    faster = ddp.step > 1.18 * zero3.step
    small_needs_it = ddp.needed_bytes > small * 1e9 >= zero3.needed_bytes
    condition = f"the GPU has more than DDP needs, here {ddp.needed_bytes / 1e9:.0f} GB"
    return measured, holds_when(condition, ddp.fits and not faster, not small_needs_it and not faster)


def trillions() -> tuple[str, str]:
    """Two shapes of 10^12 parameters on GPUs whose memory together is enough: what of it does one GPU need?"""
    wide, deep = GPTConfig(128, 25_600, 160, 51_200, 2048), GPTConfig(552, 12_288, 96, 51_200, 2048)
    found = [predicted(setup(config, "zero3", 512, recompute="blocks")) for config in (wide, deep)]
    measured = f"predicted, 512 GPUs with {512 * GPU_GB / 1e3:.0f} TB: " + "; ".join(
        f"{config.layers} blocks of {config.width:,}: {one.parameters / 1e12:.2f}e12 parameters, state "
        f"{16 * one.parameters / 1e12:.0f} TB, a GPU needs {gb(one.needed_bytes)}"
        for config, one in zip((wide, deep), found)
    )
    return measured, holds_when(
        "its units are small enough to be gathered beside the shards", found[1].fits, found[0].fits
    )


def activations_run_out() -> tuple[str, str]:
    """What is left if the state were cut into ever more shards: does it fit then?"""
    kept = predicted(setup("7b", "zero3", 8, micro_batch=8))
    recomputed = predicted(setup("7b", "zero3", 8, micro_batch=32, recompute="blocks"))
    state = 16 * kept.parameters / 8
    measured = (
        f"predicted, ZeRO-3, 7B on 8 GPUs: 8 x 2,048 tokens on each need {gb(kept.needed_bytes)}, of which "
        f"{gb(state)} state; 32 x 2,048 with blocks recomputed {gb(recomputed.needed_bytes)}; a GPU has {GPU_GB} GB"
    )
    without_state = [one.needed_bytes - 1.05 * state > GPU_GB * 1e9 for one in (kept, recomputed)]
    return measured, holds_when("activations are not recomputed", *without_state)


def larger_batches() -> tuple[str, str]:
    kept = predicted(setup("7b", "zero3", 8, micro_batch=8))
    recomputed = predicted(setup("7b", "zero3", 8, micro_batch=32, recompute="blocks"))
    measured = (
        f"predicted, ZeRO-3, 7B on 8 GPUs: 8 sequences need {gb(kept.needed_bytes)}, with blocks recomputed 32 need "
        f"{gb(recomputed.needed_bytes)}; a GPU has {GPU_GB} GB"
    )
    return measured, verdict(recomputed.fits and not kept.fits)


def worth_the_cost() -> tuple[str, str]:
    """Tokens per second with 4 sequences and all activations kept, and with 32: about as many as fit."""
    kept = setup("7b", "zero3", 8, micro_batch=4)
    recomputed = setup("7b", "zero3", 8, micro_batch=32, recompute="blocks")
    rates = {
        where: [predicted(which, cluster).tokens_per_s for which in (kept, recomputed)]
        for where, cluster in (("NVLink", H100), ("links of 25 GB/s", replace(H100, intra_gbps=25)))
    }
    measured = "predicted, ZeRO-3, 7B on 8 GPUs, tokens/s/GPU of 4 sequences kept and 32 recomputed: " + "; ".join(
        f"{where} {small:,.0f}, {large:,.0f}" for where, (small, large) in rates.items()
    )
    gains = [large > small for small, large in rates.values()]
    return measured, holds_when("communication is exposed, and the larger batch hides it", gains[1], gains[0])


def accumulation_for_memory() -> tuple[str, str]:
    """The same 8 sequences in one piece and in two; and where not the batch but the state is too large."""
    whole = predicted(setup("7b", "zero3", 8, micro_batch=8))
    halves = predicted(setup("7b", "zero3", 8, micro_batch=4, accumulate=2))
    ddp = predicted(setup("7b", "ddp", 128))
    state = 16 * ddp.parameters
    measured = (
        f"predicted, 7B, 8 sequences per step and GPU: ZeRO-3 needs {gb(whole.needed_bytes)} at once, "
        f"{gb(halves.needed_bytes)} as 2 x 4; DDP's state alone is {gb(state)}; a GPU has {GPU_GB} GB"
    )
    condition = "it is the activations that do not fit"
    return measured, holds_when(condition, halves.fits and not whole.fits, state < GPU_GB * 1e9)


def bf16_for_speed() -> tuple[str, str]:
    half, full = (predicted(setup("7b", "zero3", 8, precision=name)) for name in ("bf16", "fp32"))
    units = {name: GPUS[name].bf16 is not None for name in ("h100", "t4")}
    measured = (
        f"predicted, ZeRO-3, 7B on 8 H100: {ms(half)} in bfloat16, {ms(full)} in float32 (TF32 off); "
        f"a T4 has units for bfloat16: {units['t4']}"
    )
    return measured, holds_when("the GPU has units for it", units["h100"] and half.step < full.step, units["t4"])


CLAIMS = [
    Claim(MULTIPLE_GPUS, "ZeRO is not worth it for small models such as BERT", ASSUMED.replace(
        ", 2,048 tokens per sequence", ""), bert),
    Claim(SHARDING_STATE, "under sharding activations still run out of memory", ASSUMED, activations_run_out),
    Claim(FRAMEWORKS, "DDP breaks when the model exceeds the GPU's memory", ASSUMED, when_ddp_breaks),
    Claim(FRAMEWORKS, "DDP for what fits on one GPU", "published rows of both (docs/planner.md)", ddp_for_what_fits),
    Claim(FRAMEWORKS, "FSDP or ZeRO-3 for anything larger than one GPU",
          "published rows (docs/planner.md)", fsdp_for_all_that_is_larger),
    Claim(FRAMEWORKS, "activation checkpointing allows larger batches", ASSUMED, larger_batches),
    Claim(FRAMEWORKS, "a third more compute is worth the larger batch", ASSUMED, worth_the_cost),
    Claim(FRAMEWORKS, "accumulation is for batches that do not fit", ASSUMED, accumulation_for_memory),
    Claim(FRAMEWORKS, "forward in bfloat16 is for speed", ASSUMED, bf16_for_speed),
    Claim(SCALING, "ZeRO-3 trains trillions of parameters if the GPUs' memory together is enough",
          ASSUMED, trillions),
    Claim(WORDPRESS, "ZeRO-2 is the sweet spot for mid-sized models", ASSUMED, sweet_spot),
]  # fmt: skip
