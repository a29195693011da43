"""Claims about bytes: parameters, gradients, optimizer state, activations, and precision.

Those about 7B are dry runs of the real engines on fake tensors. The preset 7b has 34 blocks of width 4096 and 6.986e9
parameters, so a table for 7e9 is met to 0.5%.
"""

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from zerolab.measure.ledger import HELD
from zerolab.teach.articles.claim import (
    FRAMEWORKS,
    MULTIPLE_GPUS,
    SCALING,
    SHARDING_STATE,
    WORDPRESS,
    Outcome,
    claim,
    close,
    depends_on,
    holds_if,
)
from zerolab.teach.articles.runs import (
    GB,
    activations,
    chain,
    chain_of_16,
    dry_run,
    held_gb,
    kept_for_backward,
    ledger_of_zero3,
    most_gathered,
    parameters_of,
    recomputed_activations,
    recomputed_gpt,
    small_gpt,
    step,
    whole_model,
)

BF16 = ("--dtype", "bf16", "--batch", "4")
RECOMPUTED = (*BF16, "--checkpoint-activations")


def peak_gb(engine: str, *options: str) -> float:
    return dry_run(engine, *options)["peak_bytes"] / GB


def added_up(held: list[float]) -> str:
    return f"{sum(held):.4g} GB = " + " + ".join(f"{part:.4g}" for part in held)


# State.


@claim((MULTIPLE_GPUS, "The Memory Problem in DDP"), (WORDPRESS, "The Memory Redundancy Tax in DDP"))
def ddp_needs_112_gb() -> Outcome:
    """7B parameters with Adam in float32 take 28 + 28 + 56 = 112 GB on every GPU under DDP."""
    held = held_gb("ddp")
    return holds_if(all(map(close, held, (28, 28, 56))), added_up(held))


@claim((MULTIPLE_GPUS, "ZeRO-1, ZeRO-2 and ZeRO-3"))
def stages_need_63_38_and_14_gb() -> Outcome:
    """On 8 GPUs the same model takes 63 GB under ZeRO-1, 38.5 GB under ZeRO-2 and 14 GB under ZeRO-3."""
    zero1, zero2, zero3 = held_gb("zero1"), held_gb("zero2"), held_gb("zero3")
    true = all(map(close, zero1, (28, 28, 7))) and all(map(close, zero2, (28, 3.5, 7)))
    true = true and all(map(close, zero3, (3.5, 3.5, 7)))
    return holds_if(true, f"{added_up(zero1)}; {added_up(zero2)}; {added_up(zero3)}")


@claim((MULTIPLE_GPUS, "Memory with ZeRO-3, 7B model, 8 GPUs"))
def zero3_needs_8_times_less() -> Outcome:
    """On 8 GPUs ZeRO-3 uses 8 times less memory than DDP."""
    held = sum(held_gb("ddp")) / sum(held_gb("zero3"))
    peak = peak_gb("ddp") / peak_gb("zero3")
    return depends_on(
        "It holds for the parameters, gradients and optimizer state that a GPU holds right before the "
        "update. The peak of a step also contains activations and gathered units.",
        holds_with=close(held, 8),
        holds_without=close(peak, 8),
        found=f"7B, 1 x 2,048 tokens: {held:.4g} times less held, {peak:.4g} times less at the peak",
    )


@claim((WORDPRESS, "Enter PyTorch FSDP"))
def fsdp_runs_7b_on_14_gb() -> Outcome:
    """FSDP runs a 7B model on 14 GB instead of 112 GB."""
    held, peak, recomputed = sum(held_gb("zero3")), peak_gb("zero3"), peak_gb("zero3", *RECOMPUTED)
    return depends_on(
        "It holds for the parameters, gradients and optimizer state that each of 8 GPUs holds right before "
        "the update. The peak of a step is larger.",
        holds_with=close(held, 14),
        holds_without=close(peak, 14) or close(recomputed, 14),
        found=f"{held:.4g} GB held, {peak:.4g} GB at the peak; in bfloat16 with recomputed blocks {recomputed:.4g} GB",
    )


@claim((FRAMEWORKS, "Concrete Memory Math for ZeRO-3 on 7B, 8 GPUs"))
def zero3_needs_16_gb() -> Outcome:
    """Parameters 1.75, gradients 3.5, Adam 7 and activations 4 are 16.25 GB in mixed precision."""
    held, peak = held_gb("zero3", *RECOMPUTED), peak_gb("zero3", *RECOMPUTED)
    return holds_if(
        all(map(close, held, (1.75, 3.5, 7))) and close(peak, 16.25, within=0.02),
        f"{held[0]:.4g} + {held[1]:.4g} + {held[2]:.4g} GB, {peak:.4g} GB at the peak with recomputed blocks",
        why="The shards of the weights are float32, so a parameter needs 4 bytes and not 2. The sum also "
        "leaves out the gathered units.",
    )


@claim((FRAMEWORKS, "Concrete Memory Math for ZeRO-3 on 7B, 8 GPUs"))
def zero3_fits_an_a100_with_40_gb() -> Outcome:
    """7B under ZeRO-3 on 8 GPUs fits an A100 with 40 GB: batch 4, sequences of 2,048 tokens."""
    kept, recomputed = peak_gb("zero3", *BF16), peak_gb("zero3", *RECOMPUTED)
    return depends_on(
        "It holds if activations are recomputed.",
        holds_with=recomputed < 40,
        holds_without=kept < 40,
        found=f"{recomputed:.4g} GB at the peak with recomputed blocks, {kept:.4g} GB without",
    )


@claim((FRAMEWORKS, "Figure 2"))
def memory_falls_linearly_with_gpus() -> Outcome:
    """The ZeRO stages reduce memory per GPU linearly with the number of GPUs."""
    saved = {name: step(name).state / step(name, ranks=32).state for name in ("zero1", "zero2", "zero3")}
    return depends_on(
        "It holds for ZeRO-3. The other stages keep the parameters whole, or the parameters and the "
        "gradients, and these do not shrink.",
        holds_with=close(saved["zero3"], 4, within=0.02),
        holds_without=close(saved["zero1"], 4, within=0.02) or close(saved["zero2"], 4, within=0.02),
        found=f"state on 8 ranks over state on 32: ZeRO-1 {saved['zero1']:.4g}, ZeRO-2 {saved['zero2']:.4g}, "
        f"ZeRO-3 {saved['zero3']:.4g}",
    )


# Gathered units and gradients in flight.


@claim((MULTIPLE_GPUS, "ZeRO-2: Gradient Partitioning"))
def zero2_frees_gradients_in_backward() -> Outcome:
    """Under ZeRO-2 gradients are reduce-scattered and freed while backward goes on."""
    small, one = step("zero2", chain_of_16, bucket_mb=0), step("zero2", chain_of_16, bucket_mb=25)
    return depends_on(
        "It holds if the model has several buckets.",
        holds_with=small.above_state < 2,
        holds_without=one.above_state < 2,
        found=f"peak above the held state, 16 layers: {small.above_state:.4g}Ψ bytes with a bucket per parameter, "
        f"{one.above_state:.4g}Ψ with one bucket",
    )


@claim((SHARDING_STATE, "7. Production Debugging"))
def large_buckets_spike_memory() -> Outcome:
    """Too-large buckets spike memory."""
    sizes = (0, 0.0625, 0.25)
    steps = [step("zero2", chain_of_16, bucket_mb=size) for size in sizes]
    peaks = [one.peak / one.psi for one in steps]
    found = ", ".join(f"{peak:.4g}Ψ with {size} MiB" for size, peak in zip(sizes, peaks))
    return holds_if(peaks[0] < peaks[1] < peaks[2], f"peak of ZeRO-2 in bytes, by bucket size: {found}")


@claim(
    (MULTIPLE_GPUS, "ZeRO-3: Parameter Partitioning"),
    (SHARDING_STATE, "3. FSDP"),
    (SCALING, "ZeRO-3: Parameter Sharding"),
)
def zero3_frees_a_layer_after_use() -> Outcome:
    """ZeRO-3 gathers a layer's parameters before use, and frees them right after."""
    of_8, of_16 = 8 * most_gathered(chain), 16 * most_gathered(chain_of_16)
    return holds_if(
        max(of_8, of_16) < 2.01,
        f"layers gathered at once: {of_8:.4g} of 8, {of_16:.4g} of 16 (the one at work and the prefetched one)",
    )


@claim((WORDPRESS, "ZeRO Stages: Sharding the Infrastructure"), (SCALING, "Implementation Logic from Scratch"))
def model_is_whole_during_forward_and_backward() -> Outcome:
    """Under ZeRO-3 the model exists in full during the forward and backward pass only."""
    units, kept = most_gathered(small_gpt), most_gathered(small_gpt, reshard_after_forward=False)
    one = most_gathered(small_gpt, units=whole_model)
    return depends_on(
        "The model is whole if its units stay gathered after forward, or if the model is one unit. "
        "Otherwise it is never whole.",
        holds_with=min(kept, one) > 0.9,
        holds_without=units > 0.9,
        found=f"most of an 8-block GPT gathered at once: {units:.4g} with a unit per block, "
        f"{kept:.4g} with reshard_after_forward=False, {one:.4g} as one unit",
    )


# Mixed precision.


def bytes_in_mixed_precision() -> dict[str, int]:
    """Bytes per parameter of what is alive after a step in bfloat16 with AdamW, and of gradients in float32."""
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    master = layer.weight.detach().float().requires_grad_()
    optimizer = torch.optim.AdamW([master])
    layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
    master.grad = layer.weight.grad.float()
    optimizer.step()
    moments = optimizer.state[master]["exp_avg"].nbytes + optimizer.state[master]["exp_avg_sq"].nbytes
    sizes = {
        "weights": layer.weight.nbytes,
        "gradients": layer.weight.grad.nbytes,
        "float32 gradients": master.grad.nbytes,
        "master weights": master.nbytes,
        "moments": moments,
    }
    return {part: nbytes // layer.weight.numel() for part, nbytes in sizes.items()}


@claim((SHARDING_STATE, "1. Training State Memory"), (SCALING, "The Memory Wall in LLM Training"))
def bfloat16_with_adam_is_16_bytes() -> Outcome:
    """Training in BF16 with Adam takes about 16 bytes per parameter: 112 GB for 7B."""
    of = bytes_in_mixed_precision()
    total = of["weights"] + of["gradients"] + of["master weights"] + of["moments"]
    return holds_if(
        total == 16,
        f"{total} bytes = {of['weights']} weights + {of['gradients']} gradients + {of['master weights']} float32 "
        f"weights + {of['moments']} moments; {total * parameters_of('7b') / GB:.4g} GB for 7B",
    )


@claim((FRAMEWORKS, "TL;DR and Act 0: The Memory Problem"))
def float32_gradients_and_adam_make_16_bytes() -> Outcome:
    """2 bytes in BF16 and 12 bytes of FP32 gradients and Adam's states are 16 bytes per parameter: 112 GB for 7B."""
    of = bytes_in_mixed_precision()
    table = of["weights"] + of["float32 gradients"] + of["moments"]
    with_master = table + of["master weights"]
    return holds_if(
        16 in (table, with_master),
        f"{table} bytes, {table * parameters_of('7b') / GB:.4g} GB for 7B; {with_master} with float32 master weights",
        why="The parts that the article names add up to 14 bytes, as in its own table (98 GB). With float32 "
        "master weights they add up to 18. 16 bytes is correct for BF16 gradients and master weights.",
    )


@claim((FRAMEWORKS, "Figure 2"))
def stages_in_mixed_precision() -> Outcome:
    """Under the stages a GPU has 2 + 4 + 8/N, 2 + 12/N and 14/N bytes per parameter in mixed precision."""
    states = [step(name, dtype=torch.bfloat16).state for name in ("zero1", "zero2", "zero3")]
    return holds_if(
        all(close(state, printed, within=0.02) for state, printed in zip(states, (7, 3.5, 1.75))),
        f"at N = 8: {states[0]:.4g}, {states[1]:.4g} and {states[2]:.4g} bytes; the formulas give 7, 3.5 and 1.75",
        why="The figure leaves out the float32 master weights, which are sharded as well and need 4/N bytes more.",
    )


# Activations.


@claim((MULTIPLE_GPUS, "The Memory Problem in DDP"), (SHARDING_STATE, "5. Sharding vs Activation Memory"))
def zero_leaves_activations_as_they_are() -> Outcome:
    """ZeRO does not reduce activation memory."""
    whole = kept_for_backward("single")
    shares = [kept_for_backward(name) / whole for name in ("zero1", "zero2", "zero3")]
    return holds_if(
        all(close(share, 1, within=0.01) for share in shares),
        "bytes kept for backward, over one process's: "
        f"ZeRO-1 {shares[0]:.4g}, ZeRO-2 {shares[1]:.4g}, ZeRO-3 {shares[2]:.4g}",
    )


@claim((FRAMEWORKS, "Concrete Memory Math for ZeRO-3 on 7B, 8 GPUs"))
def activations_of_7b_are_4_gb() -> Outcome:
    """4 sequences of 2,048 tokens need about 4 GB of activations in a 7B model (elsewhere it says 20 to 40 GB)."""
    kept, recomputed = activations("7b"), recomputed_activations("7b")
    return depends_on(
        "It holds if every block is recomputed. Without recomputation the activations need the other "
        "number, 20 to 40 GB.",
        holds_with=close(recomputed, 4, within=0.1),
        holds_without=close(kept, 4, within=0.1),
        found=f"bfloat16, fused attention: {recomputed:.4g} GB with recomputed blocks, {kept:.4g} GB without",
    )


@claim((FRAMEWORKS, "Gradient Checkpointing (Activation Recomputation)"))
def activations_of_70b_are_30_to_50_gb() -> Outcome:
    """4 sequences of 2,048 tokens need 30 to 50 GB of activations in a 70B model, often more than its weights."""
    kept, recomputed = activations("70b"), recomputed_activations("70b")
    weights = 2 * parameters_of("70b") / GB
    return holds_if(
        30 <= kept <= 50 and kept > weights,
        f"bfloat16, fused attention: {kept:.4g} GB, {recomputed:.4g} GB with recomputed blocks; "
        f"the weights have {weights:.4g} GB",
        why="The activations need more. Besides, 30 to 50 GB would be less than the weights, which need 140 GB.",
    )


@claim((FRAMEWORKS, "Gradient Checkpointing (Activation Recomputation)"))
def recomputing_needs_8_times_less() -> Outcome:
    """Gradient checkpointing reduces activation memory about 8 times."""
    deep = activations("7b") / recomputed_activations("7b")
    shallow = activations("7b", layers=4) / recomputed_activations("7b", layers=4)
    return depends_on(
        "It holds if the model is deep.",
        holds_with=close(deep, 8, within=0.25),
        holds_without=close(shallow, 8, within=0.25),
        found=f"{deep:.4g} times less in 34 layers of width 4096, {shallow:.4g} times in 4 layers",
    )


@claim((FRAMEWORKS, "PyTorch FSDP vs. DeepSpeed ZeRO"))
def fsdp_recomputes_by_use_orig_params() -> Outcome:
    """FSDP does activation checkpointing by its option use_orig_params."""
    with_it, without = kept_for_backward("fsdp1"), kept_for_backward("fsdp1", use_orig_params=False)
    recomputed = kept_for_backward("fsdp1", recomputed_gpt)
    return holds_if(
        with_it < without,
        f"bytes kept for backward: {with_it:,} with the option, {without:,} without; {recomputed:,} with checkpoint()",
        why="The option only keeps the original parameters visible. To recompute activations, call "
        "checkpoint() around each block.",
    )


# Offload.


def bytes_not_held(moment) -> int:
    return moment.live - sum(moment.parts[part] for part in HELD)


@claim((SHARDING_STATE, "7. Production Debugging"))
def offload_saves_memory_and_kills_throughput() -> Outcome:
    """CPU offload saves GPU memory but kills throughput.

    Under the policy parameters, gradients and optimizer state are on the host. They are left out here, because this
    machine has one kind of memory. The copies do not depend on the batch: for a float32 parameter on 8 H100 two up and
    one down at 64 GB/s, which no link exceeds. They can hide behind 6 FLOPs for each token.
    """
    without = ledger_of_zero3(small_gpt).peak_moment().live
    offloaded = ledger_of_zero3(small_gpt, offload_policy=CPUOffloadPolicy(pin_memory=False))
    device = bytes_not_held(offloaded.peak_moment(of=bytes_not_held))
    copies = 3 * 4 / 8 / 64e9
    few, many = (copies / (6 * tokens / 989e12) for tokens in (2_048, 1_048_576))
    return depends_on(
        "It kills throughput if a step has few tokens per GPU.",
        holds_with=device < without and few > 1,
        holds_without=device < without and many > 1,
        found=f"peak on the device, a small GPT: {without / 1e6:.4g} MB without, {device / 1e6:.4g} MB with; "
        f"copies over computation by formula, 8 H100: {few:.4g} with 2,048 tokens per GPU, {many:.4g} with 1,048,576",
    )
