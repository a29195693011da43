"""Claims about the bytes of parameters, gradients, optimizer state and activations.

Most are dry runs of the real engines: one rank's training step on fake tensors (`measure/memory.py`). Its 7B is 34
blocks of width 4096 with 6.986e9 parameters, so a table for 7e9 is met to 0.5%. Ψ is the number of parameters: float32
weights are 4Ψ bytes.
"""

import functools

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from zerolab.measure import memory
from zerolab.measure.gpus import needed_bytes
from zerolab.measure.held import buckets_of
from zerolab.measure.ledger import HELD, PARTS, MemoryLedger
from zerolab.teach.articles import runs
from zerolab.teach.articles.runs import parameters_of, saved_bytes, step, toy

P7 = parameters_of("7b")


@functools.cache
def dry(engine: str, *options: str, preset: str = "7b", ranks: int = 8) -> dict:
    """A dry run of `engine`: its row of `./launch.sh memory`. Run once, whoever asks."""
    return memory.measure_alone(engine, memory.arguments(["--preset", preset, str(ranks), *options]))


def of_a_dry_run(engine: str, what: str, options: str = "", **sizes) -> float:
    """In GB: a part of what is held, or one "at the peak"; "state", all that is held; "peak"; and what is "needed",
    also "beside the state": if that were cut into ever more shards.

    Needed by the rule of the dry run's table: 5% for gaps, 2 GB for CUDA and NCCL. Beside them bytes for each of Ψ.
    """
    run = dry(engine, *options.split(), **sizes)
    held = run["held_bytes"]
    found = {**held, "16Ψ": 16 * P7, "2Ψ": 2 * P7, "2Ψ/N": 2 * P7 / 8}
    for part in PARTS:
        found[f"{part} at the peak"] = run["peak_parts"].get(part, 0)
    found |= {"weights and gradients": held["parameters"] + held["gradients"], "state": sum(held.values())}
    found |= {"peak": run["peak_bytes"], "needed": needed_bytes(run["peak_bytes"])}
    found["needed beside the state"] = found["needed"] - 1.05 * found["state"]
    return found[what] / 1e9


def copies(name: str) -> float:
    """Optimizer state on all 8 ranks together, over what one copy is."""
    together = sum(step(name, toy, rank=rank)["optimizer"] for rank in range(8))
    return together / step("single", toy)["optimizer"]


# Mixed precision.


@functools.cache
def weighed(gradients: str) -> dict[str, float]:
    """Bytes per parameter of what is alive after a step in bfloat16 with AdamW, gradients in that dtype."""
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    (weight,) = layer.parameters()
    master = weight.detach().float().requires_grad_()
    optimizer = torch.optim.AdamW([master])
    layer(torch.ones(1, 64, dtype=weight.dtype)).sum().backward()
    gradient = weight.grad.to(getattr(torch, gradients))
    master.grad = gradient.float()  # for the update only
    optimizer.step()
    moments = [tensor.nbytes for tensor in optimizer.state[master].values() if tensor.shape == master.shape]
    sizes = {"weights": weight.nbytes, "gradients": gradient.nbytes, "float32 weights": master.nbytes}
    return {part: nbytes / weight.numel() for part, nbytes in {**sizes, "moments": sum(moments)}.items()}


def trained_in_bf16(parts: list[str], gradients: str = "bfloat16", preset: str = "") -> float:
    """Bytes per parameter of these parts; with a preset its GB."""
    total = sum(weighed(gradients)[part] for part in parts)
    return total * parameters_of(preset) / 1e9 if preset else total


# Activations: what forward keeps for backward, of the articles' 4 sequences of 2,048 tokens.


def of_a_forward(preset: str, what: str, batch: int = 4, seq: int = 2048, **shape) -> float:
    """GB that are "kept" for backward; with every block "recomputed" the most at once: their inputs, and one's
    activations. Or how many "parameters" there are, in 10^9."""
    if what == "parameters":
        return parameters_of(preset) / 1e9
    kept = functools.partial(saved_bytes, preset, batch, seq)
    if what == "kept":
        return kept(**shape) / 1e9
    two, one = (kept(**{**shape, "layers": layers}) for layers in (2, 1))
    return (kept(recompute=True, **shape) + two - one) / 1e9


@functools.cache
def kept_under(name: str, model: str = "small", **options) -> int:
    """Bytes that forward leaves for backward under an engine, without the parameters it has gathered."""
    with MemoryLedger() as memory, runs.running(name, runs.MODELS[model], **options) as engine:
        flats = [bucket.flat.untyped_storage() for bucket in buckets_of(engine)]
        before = memory.live - sum(flat.nbytes() for flat in flats)
        loss = runs.forward(engine)
        after = memory.live - sum(flat.nbytes() for flat in flats)
        del loss
    return after - before


# Offload: what leaves the GPU, and what it costs.


def most_beside(parts: tuple[str, ...], **options) -> int:
    """The most bytes that ZeRO-3 has at once in a step beside these parts."""
    return runs.worst_moment(
        runs.small_gpt,
        of=lambda moment: moment.live - sum(moment.parts[part] for part in parts),
        make_optimizer=runs.ADAMW,
        **options,
    )


def offloaded():
    """All on the device, and what is held left out: under the policy that is on the host, where it has its own memory.

    What offload adds to a step does not depend on the batch; what it can hide behind, and is measured by, does. Here
    for a parameter on 8 H100: float32, up twice and down once at 64 GB/s, which no link exceeds, over 6 FLOPs for each
    token.
    """
    without = most_beside(())
    device = most_beside(HELD, offload_policy=CPUOffloadPolicy(pin_memory=False))
    copies = [(3 * 4 / 8 / 64e9) / (6 * tokens / 989e12) for tokens in (2_048, 1_048_576)]
    return [without / 1e6, device / 1e6, *copies], *(device < without and longer > 1 for longer in copies)
