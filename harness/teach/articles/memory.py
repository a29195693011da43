"""Claims about the bytes of parameters, gradients and optimizer state: dry runs of the real engines at 7B and less.

A dry run is one rank's training step on fake tensors (`measure/dry_run.py`). Its 7B is 34 blocks of width 4096 with
6.986e9 parameters, so a table for 7e9 is met to 0.5%. Ψ is the number of parameters: float32 weights are 4Ψ bytes.
"""

import functools

import torch

from harness.measure import dry_run
from harness.measure.memory import MemoryLedger, held_bytes
from harness.teach.articles.claim import (
    FRAMEWORKS,
    MULTIPLE_GPUS,
    NAMES,
    SCALING,
    SHARDING_STATE,
    WORDPRESS,
    Claim,
    about,
    gb,
    holds_when,
    verdict,
)
from harness.teach.articles.runs import build, chain, fake_ranks, one_rank, parameters_of, saved_bytes, step, toy

CHECKPOINTED = ("--batch", "4", "--precision", "bf16", "--checkpoint-activations")


@functools.cache
def dry(engine: str, *options: str, preset: str = "7b", ranks: int = 8) -> dict:
    """A dry run of `engine`: its row of `./launch.sh memory`. Run once, whoever asks."""
    with fake_ranks(ranks):
        return dry_run.measure(engine, dry_run.arguments(["--preset", preset, "--ranks", str(ranks), *options]))


def state(run: dict) -> int:
    return sum(run["held_bytes"].values())


def parts(run: dict) -> str:
    return " + ".join(f"{nbytes / 1e9:.3g}" for nbytes in run["held_bytes"].values())


def table_7b(engine: str, parameters: float, gradients: float, optimizer: float) -> tuple[str, str]:
    """Against GB of each row and of the total of the article's table."""
    run = dry(engine)
    rows = zip(run["held_bytes"].values(), (parameters, gradients, optimizer))
    total = parameters + gradients + optimizer
    right = all(about(nbytes, row * 1e9) for nbytes, row in rows) and about(state(run), total * 1e9)
    return f"{gb(state(run))} = {parts(run)}", verdict(right)


def eightfold() -> tuple[str, str]:
    ddp, zero3 = state(dry("ddp")), state(dry("zero3"))
    return f"{gb(ddp)} / {gb(zero3)} = {ddp / zero3:.4g}", verdict(about(ddp / zero3, 8))


def runs_on_14() -> tuple[str, str]:
    """State and peak of a step, in float32 on one sequence, and in bfloat16 with every block recomputed."""
    usual, least = dry("zero3"), dry("zero3", *CHECKPOINTED)
    peaks = gb(usual["peak_bytes"]), gb(least["peak_bytes"])
    measured = f"state {gb(state(usual))}; peak of a step {peaks[0]}, in bfloat16 with blocks recomputed {peaks[1]}"
    condition = "N = 8 and only what is held between steps counts"
    return measured, holds_when(condition, about(state(usual), 14e9), about(least["peak_bytes"], 14e9, 0.02))


def before_the_first_batch() -> tuple[str, str]:
    """What real DDP with AdamW has alive before its first batch, and holds after its first step."""
    with one_rank(), MemoryLedger() as memory:
        engine = build("ddp", chain(), init_sync=False)  # gloo keeps what it broadcasts for a moment longer
        before = memory.live
        engine(torch.ones(1, 64)).sum().backward()
        engine.step()
        psi = sum(param.numel() for param in engine.model.parameters())
        after = sum(held_bytes(engine).values())
        engine = None
    before_7b, after_7b = before / psi * 7e9, after / psi * 7e9
    measured = f"before the first batch {before / psi:g}Ψ bytes (weights, DDP's buckets) = {gb(before_7b)} at 7B; "
    measured += f"after the first step {after / psi:.3g}Ψ (AdamW's state is there) = {gb(after_7b)}"
    condition = "the first step is counted, in which AdamW makes its state"
    return measured, holds_when(condition, after_7b > 80e9, before_7b > 80e9)


def kept_by_zero1() -> tuple[str, str]:
    run, psi = dry("zero1"), parameters_of("7b")
    share = {part: nbytes / psi for part, nbytes in run["held_bytes"].items()}
    measured = ", ".join(f"{part} {nbytes:.3g}Ψ" for part, nbytes in share.items()) + " bytes"
    return measured, verdict(
        about(share["parameters"], 4) and about(share["gradients"], 4) and about(share["optimizer"], 8 / 8)
    )


def eighth_of_the_optimizer() -> tuple[str, str]:
    share = dry("zero1")["held_bytes"]["optimizer"] / dry("ddp")["held_bytes"]["optimizer"]
    return f"{share:.4f} of DDP's, on each of 8 ranks", verdict(about(share, 1 / 8))


@functools.cache
def mixed_precision(gradient_dtype: torch.dtype) -> dict[str, float]:
    """Bytes per parameter alive after a backward, of bfloat16 weights updated through float32 ones by AdamW."""
    layer = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    (weight,) = layer.parameters()
    master = weight.detach().float().requires_grad_()
    optimizer = torch.optim.AdamW([master])
    gradient = torch.zeros_like(weight, dtype=gradient_dtype)

    def keep(param):
        gradient.copy_(param.grad)
        param.grad = None

    weight.register_post_accumulate_grad_hook(keep)
    for _ in range(2):
        layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        master.grad = gradient.float()  # for the update only
        optimizer.step()
        master.grad = None
        with torch.no_grad():
            weight.copy_(master)
    moments = [tensor for tensor in optimizer.state[master].values() if tensor.shape == master.shape]
    rows = {"weights": [weight], "gradients": [gradient], "float32 weights": [master], "moments": moments}
    return {name: sum(tensor.nbytes for tensor in tensors) / weight.numel() for name, tensors in rows.items()}


def sixteen_bytes() -> tuple[str, str]:
    held = mixed_precision(torch.bfloat16)
    total = sum(held.values())
    rows = " + ".join(f"{nbytes:g} {name}" for name, nbytes in held.items())
    measured = f"{rows} = {total:g} bytes; {gb(total * parameters_of('7b'))} for the 7b preset"
    return measured, verdict(total == 16)


def fourteen_bytes() -> tuple[str, str]:
    held = mixed_precision(torch.float32)
    total, without = sum(held.values()), sum(held.values()) - held["float32 weights"]
    rows = " + ".join(f"{nbytes:g} {name}" for name, nbytes in held.items())
    measured = f"{rows} = {total:g} bytes, without the float32 weights {without:g}"
    return measured, holds_when("no float32 master weights are kept", without == 14, total == 14)


def sixteen_in_mixed_precision() -> tuple[str, str]:
    low, high = (sum(mixed_precision(dtype).values()) for dtype in (torch.bfloat16, torch.float32))
    cast = ddp_in_bf16()
    measured = f"bfloat16 weights made for each forward {cast:.4g} bytes; kept, with gradients in bfloat16 {low:g}, in "
    condition = "gradients are bfloat16, or bfloat16 weights exist only in forward and backward"
    return measured + f"float32 (its table) {high:g}", holds_when(condition, about(cast, 16) and low == 16, high == 16)


def ddp_in_bf16() -> float:
    """Bytes per parameter that DDP holds when it trains in bfloat16 through autograd's casts."""
    run = dry("ddp", "--precision", "bf16", preset="toy")
    return state(run) / (run["held_bytes"]["parameters"] / 4)


def twelve_bytes_of_adam() -> tuple[str, str]:
    moments = step("plain").held["optimizer"] / (step("plain").parameter_bytes / 4)
    with_master = moments + 4
    measured = f"the moments {moments:.4g} bytes, with float32 master weights {with_master:.4g}"
    return measured, holds_when("float32 master weights are counted with Adam's two moments",
                                about(with_master, 12), about(moments, 12))  # fmt: skip


def largest_part() -> tuple[str, str]:
    held = mixed_precision(torch.bfloat16)
    optimizer = held["float32 weights"] + held["moments"]
    return f"{optimizer:g} of {sum(held.values()):g} bytes per parameter", verdict(optimizer > sum(held.values()) / 2)


def zero3_in_mixed_precision() -> tuple[str, str]:
    run = dry("zero3", *CHECKPOINTED)
    own, lacking = 1.75 + 3.5 + 7 + 4, (4 - 2) * parameters_of("7b") / 8
    peak = run["peak_bytes"]
    measured = (
        f"state {gb(state(run))} = {parts(run)}, peak {gb(peak)} with blocks recomputed; its sum of {own} GB has "
    )
    measured += f"2 bytes per parameter where float32 master weights are 4: {gb(lacking)} too little"
    return measured, verdict(about(peak, own * 1e9, 0.02) or about(state(run) + 4e9, own * 1e9, 0.02))


def fits_40() -> tuple[str, str]:
    """Recomputed: the peak of a step. Not recomputed: what is alive when forward is over, at the very least."""
    recomputed = dry("zero3", *CHECKPOINTED)
    kept = state(recomputed) - recomputed["held_bytes"]["gradients"] + saved_bytes("7b", 4, 2048)
    peak = recomputed["peak_bytes"]
    measured = f"peak {gb(peak)} with blocks recomputed; without, after forward {gb(kept)} of state and activations"
    return measured, holds_when("activations are recomputed", peak < 40e9, kept < 40e9)


def ddp_does_not_fit() -> tuple[str, str]:
    whole = ddp_in_bf16() * parameters_of("7b")
    return f"{ddp_in_bf16():.4g} bytes per parameter: {gb(whole)}, H100 80 GB", verdict(
        about(whole, 112e9) and whole > 80e9
    )


def boxes_of_figure_two() -> tuple[str, str]:
    """Its figure's 2 + 4 + 8/N, 2 + 12/N and 14/N against engines with bfloat16 weights and float32 gradients."""
    boxes, ranks = {"zero1": 2 + 4 + 8 / 8, "zero2": 2 + 12 / 8, "zero3": 14 / 8}, 8
    mixed = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    runs = {name: step(name, ranks=ranks, **mixed) for name in boxes}
    held = {name: run.state / (run.parameter_bytes / 4) for name, run in runs.items()}
    rows = ", ".join(f"{NAMES[name]} {held[name]:.3g} and not {boxes[name]:g}" for name in boxes)
    # The float32 copy: beside bfloat16 weights 4/N; in ZeRO-3 the only one, where the figure has 2/N.
    without = {name: held[name] - (2 if name == "zero3" else 4) / ranks for name in boxes}
    met, kept = (all(about(found[name], boxes[name], 0.02) for name in boxes) for found in (without, held))
    measured = f"bytes per parameter at N = 8, with float32 master weights: {rows}"
    return measured, holds_when("no float32 master weights are kept", met, kept)


def more_gpus_under_ddp() -> tuple[str, str]:
    held = {ranks: state(dry("ddp", preset="toy", ranks=ranks)) for ranks in (2, 64)}
    measured = ", ".join(f"{nbytes:,} bytes on each of {ranks}" for ranks, nbytes in held.items())
    return measured, verdict(held[2] == held[64])


def redundant_copies() -> tuple[str, str]:
    """Optimizer state on all ranks together over what one copy is."""
    one = step("plain").held["optimizer"]
    extra = {ranks: ranks * step("plain").held["optimizer"] / one - 1 for ranks in (2, 5, 8)}
    measured = ", ".join(f"{count:g} of {ranks} ranks" for ranks, count in extra.items()) + " are redundant: N-1"
    return measured, holds_when("N = 5", extra[5] == 4, extra[8] == 4 or extra[2] == 4)


def linear_in_ranks() -> tuple[str, str]:
    """State at N = 8 over state at N = 32: 4 if it falls with 1/N."""
    ratios = {name: step(name, ranks=8).state / step(name, ranks=32).state for name in ("zero1", "zero2", "zero3")}
    measured = "state at N = 8 over N = 32: " + ", ".join(
        f"{NAMES[name]} {ratio:.3g}" for name, ratio in ratios.items()
    )
    return measured, holds_when("the stage is ZeRO-3", about(ratios["zero3"], 4, 0.02),
                                about(ratios["zero1"], 4, 0.02) or about(ratios["zero2"], 4, 0.02))  # fmt: skip


def ideal_sharding() -> tuple[str, str]:
    whole = step("plain").state
    ratios = {ranks: whole / step("zero3", ranks=ranks).state for ranks in (2, 4, 8, 32)}
    measured = "state without sharding over ZeRO-3's: " + ", ".join(f"N={n} {ratio:.4g}" for n, ratio in ratios.items())
    return measured, verdict(all(about(ratio, ranks) for ranks, ratio in ratios.items()))


def larger_models() -> tuple[str, str]:
    whole = step("plain").state
    ratios = {ranks: whole / step("zero3", ranks=ranks).state for ranks in (4, 8, 16)}
    measured = (
        ", ".join(f"N={ranks} x{ratio:.3g}" for ranks, ratio in ratios.items()) + " (state; activations are not cut)"
    )
    inside = about(ratios[8], 8) and about(ratios[16], 16, 0.01)
    return measured, holds_when("N is 8 to 16", inside, 8 <= ratios[4] <= 16)


def more_than_ideal() -> tuple[str, str]:
    run = dry("zero3")
    extra = run["peak_bytes"] - state(run)
    names = ", ".join(f"{part} {gb(nbytes)}" for part, nbytes in run["peak_parts"].items() if nbytes > 1e8)
    return f"peak {gb(run['peak_bytes'])} for {gb(state(run))} of state: {names}", verdict(extra > 0)


def no_redundancy() -> tuple[str, str]:
    """The optimizer states of all ranks together against one copy."""
    one = step("plain", toy).held["optimizer"]
    together = {
        name: sum(step(name, toy, rank=rank).held["optimizer"] for rank in range(8)) for name in ("zero1", "zero3")
    }
    measured = ", ".join(f"{NAMES[name]}: 8 ranks hold {nbytes / one:.4f} copies" for name, nbytes in together.items())
    return measured, verdict(all(about(nbytes, one) for nbytes in together.values()))


def largest_model() -> tuple[str, str]:
    """Bytes of state per parameter as N grows: what caps the model on one GPU, and what does not."""
    floors = {name: step(name, ranks=ranks).state / (step(name).parameter_bytes / 4)
              for name, ranks in (("ddp", 8), ("zero1", 512), ("zero2", 512), ("zero3", 512))}  # fmt: skip
    measured = "bytes per parameter at N = 512: " + ", ".join(
        f"{NAMES[name]} {floor:.3g}" for name, floor in floors.items()
    )
    return measured, verdict(floors["ddp"] > floors["zero1"] > floors["zero2"] > 10 * floors["zero3"])


def one_layer_too_large() -> tuple[str, str]:
    """What ZeRO-3 has gathered does not shrink with N: a unit at work must fit."""
    over = {ranks: (step("zero3", ranks=ranks).peak - step("zero3", ranks=ranks).state) for ranks in (8, 32)}
    layer = step("zero3").parameter_bytes / 8
    measured = "peak over the state, in layers: " + ", ".join(
        f"N={n} {nbytes / layer:.3g}" for n, nbytes in over.items()
    )
    return measured, verdict(all(nbytes > 2 * layer for nbytes in over.values()))


_DRY = "dry run of {} at 7B on 8 ranks"
CLAIMS = [
    Claim(MULTIPLE_GPUS, "7B in fp32 under DDP: 28 + 28 + 56 = 112 GB",
          _DRY.format("DDP"), functools.partial(table_7b, "ddp", 28, 28, 56)),
    Claim(MULTIPLE_GPUS, "under ZeRO-1: 28 + 28 + 7 = 63 GB",
          _DRY.format("ZeRO-1"), functools.partial(table_7b, "zero1", 28, 28, 7)),
    Claim(MULTIPLE_GPUS, "under ZeRO-2: 28 + 3.5 + 7 = 38.5 GB",
          _DRY.format("ZeRO-2"), functools.partial(table_7b, "zero2", 28, 3.5, 7)),
    Claim(MULTIPLE_GPUS, "under ZeRO-3: 3.5 + 3.5 + 7 = 14 GB",
          _DRY.format("ZeRO-3"), functools.partial(table_7b, "zero3", 3.5, 3.5, 7)),
    Claim(MULTIPLE_GPUS, "ZeRO-3 on 8 GPUs: 8 times less memory", _DRY.format("DDP and ZeRO-3") + ", state", eightfold),
    Claim(SHARDING_STATE, "BF16 with Adam: about 16 bytes per parameter",
          "bfloat16 training with AdamW, tensors weighed", sixteen_bytes),
    Claim(SHARDING_STATE, "sharding divides the sharded state by N (the divisor is blank in our copy)",
          "ZeRO-3 at N = 2 to 32", ideal_sharding),
    Claim(SHARDING_STATE, "real memory is above the ideal", _DRY.format("ZeRO-3"), more_than_ideal),
    Claim(SHARDING_STATE, "a layer too large for a GPU needs model parallelism as well",
          "ZeRO-3, peak over state at N = 8 and 32", one_layer_too_large),
    Claim(FRAMEWORKS, "mixed precision takes 14 bytes per parameter, 98 GB for 7B (its table)",
          "bfloat16 training with AdamW, tensors weighed", fourteen_bytes),
    Claim(FRAMEWORKS, "mixed precision takes 16 bytes per parameter, 112 GB for 7B (its text)",
          "three kinds of it, tensors weighed", sixteen_in_mixed_precision),
    Claim(FRAMEWORKS, "Adam's states cost 12 bytes per parameter and not 4", "AdamW's state", twelve_bytes_of_adam),
    Claim(FRAMEWORKS, "7B under DDP, ~112 GB, does not fit an H100",
          "dry run of DDP in bf16, bytes per parameter", ddp_does_not_fit),
    Claim(FRAMEWORKS, "7B under ZeRO-3 takes 16.25 GB",
          _DRY.format("ZeRO-3") + ", bf16, batch 4 x 2048", zero3_in_mixed_precision),
    Claim(FRAMEWORKS, "7B under ZeRO-3 fits a 40 GB A100", _DRY.format("ZeRO-3") + ", bf16, batch 4 x 2048", fits_40),
    Claim(FRAMEWORKS, "bytes per parameter: 2 + 4 + 8/N, 2 + 12/N, 14/N under the stages (its figure 2)",
          "each stage in mixed precision at N = 8", boxes_of_figure_two),
    Claim(FRAMEWORKS, "DDP keeps 4 redundant copies of the optimizer state",
          "AdamW's state, the same on every rank", redundant_copies),
    Claim(FRAMEWORKS, "the stages reduce memory linearly with the number of GPUs",
          "state of each stage at N = 8 and 32", linear_in_ranks),
    Claim(FRAMEWORKS, "FSDP and ZeRO-3 train models 8 to 16 times larger", "state at N = 4, 8 and 16", larger_models),
    Claim(SCALING, "FP16 with Adam: 2 + 2 + 12 bytes (blank in our copy), 112 GB for 7B",
          "bfloat16 training with AdamW, tensors weighed", sixteen_bytes),
    Claim(SCALING, "the optimizer state is the largest part",
          "bfloat16 training with AdamW, tensors weighed", largest_part),
    Claim(SCALING, "each of 8 GPUs stores 1/8 of the optimizer state (the share is blank in our copy)",
          _DRY.format("ZeRO-1"), eighth_of_the_optimizer),
    Claim(SCALING, "no redundant optimizer state under ZeRO", "the states of all 8 ranks added up", no_redundancy),
    Claim(SCALING, "largest model: by one GPU under DDP, more under ZeRO-1 and -2, by the cluster under ZeRO-3",
          "state per parameter at N = 512", largest_model),
    Claim(WORDPRESS, "7B with Adam in FP32: about 112 GB on every GPU",
          _DRY.format("DDP"), functools.partial(table_7b, "ddp", 28, 28, 56)),
    Claim(WORDPRESS, "an 80 GB GPU is out of memory before the first micro-batch",
          "real DDP, live bytes before its first batch, state after its first step", before_the_first_batch),
    Claim(WORDPRESS, "under DDP no number of GPUs lowers the memory of each",
          "dry run of DDP, a small GPT, on 2 and 64 ranks", more_gpus_under_ddp),
    Claim(WORDPRESS, "ZeRO-1 still replicates parameters and gradients", _DRY.format("ZeRO-1"), kept_by_zero1),
    Claim(WORDPRESS, "FSDP runs a 7B model on 14 GB", _DRY.format("ZeRO-3") + ", 1 x 2048 tokens", runs_on_14),
]  # fmt: skip
