"""Claims about the bytes of parameters, gradients, optimizer state and activations.

Most are dry runs of the real engines: one rank's training step on fake tensors (`measure/memory.py`). Its 7B is 34
blocks of width 4096 with 6.986e9 parameters, so a table for 7e9 is met to 0.5%. Ψ is the number of parameters: float32
weights are 4Ψ bytes.
"""

import functools

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from harness.measure import memory
from harness.measure.gpus import needed_bytes
from harness.measure.held import buckets_of, held_bytes
from harness.measure.ledger import MemoryLedger
from harness.measure.memory_parts import HELD, PARTS
from harness.run.model import next_token_loss
from harness.run.recompute import checkpoint_blocks
from harness.teach.articles import runs
from harness.teach.articles.claim import about, gigabytes
from harness.teach.articles.runs import parameters_of, saved_bytes, step, toy

P7 = parameters_of("7b")
CHECKPOINTED = "--dtype", "bf16", "--batch", "4", "--checkpoint-activations"


@functools.cache
def dry(engine: str, *options: str, preset: str = "7b", ranks: int = 8) -> dict:
    """A dry run of `engine`: its row of `./launch.sh memory`. Run once, whoever asks."""
    return memory.measure_alone(engine, memory.arguments(["--preset", preset, str(ranks), *options]))


def state(run: dict) -> int:
    return sum(run["held_bytes"].values())


def of_a_dry_run(engine: str, what: str, options: str = "") -> float:
    """In GB: a part of what is held, or one "at the peak"; "state", all that is held; "peak"; and what is "needed",
    also "beside the state": if that were cut into ever more shards.

    Needed by the rule of the dry run's table: 5% for gaps, 2 GB for CUDA and NCCL. Beside them bytes for each of Ψ.
    """
    run = dry(engine, *options.split())
    sizes = {**run["held_bytes"], "16Ψ": 16 * P7, "2Ψ": 2 * P7, "2Ψ/N": 2 * P7 / 8}
    for part in PARTS:
        sizes[f"{part} at the peak"] = run["peak_parts"].get(part, 0)
    sizes |= {"state": state(run), "peak": run["peak_bytes"], "needed": needed_bytes(run["peak_bytes"])}
    sizes["needed beside the state"] = sizes["needed"] - 1.05 * sizes["state"]
    return sizes[what] / 1e9


# What a rank holds of 7B.


def optimizer_beside_the_rest():
    """At the peak of a step, activations included: of whole state, and of state that is cut."""
    found = []
    for name in ("ddp", "zero3"):
        parts = dict(dry(name)["peak_parts"])
        optimizer = parts.pop("optimizer")
        largest = max(parts, key=parts.get)
        found.append(optimizer / parts[largest])
    whole, cut = found
    return [whole, cut, largest], whole > 1, cut > 1


def of_a_40_gb_gpu():
    """Not recomputed: what is alive when forward is over, at the very least."""
    run = dry("zero3", *CHECKPOINTED)
    return gigabytes([run["peak_bytes"], state(run) * 3 / 4 + saved_bytes("7b", 4, 2048)])


def before_the_first_batch():
    """Of real DDP with AdamW. Without init_sync, as gloo keeps what it broadcasts for a moment longer."""
    with MemoryLedger() as memory, runs.running("ddp", optimizer_cls=runs.ADAMW, init_sync=False) as engine:
        before = memory.live
        runs.forward(engine).backward()
        engine.step()
        after = sum(held_bytes(engine).values())
        del engine
    return [28 * nbytes / runs.size_of(runs.chain) for nbytes in (after, before)]


def more_on_64_ranks():
    few, many = (state(dry("ddp", preset="toy", ranks=ranks)) for ranks in (2, 64))
    return [many - few]


# How the state shrinks with N.


@functools.cache
def copies(name: str) -> float:
    """Optimizer state on all 8 ranks together, over what one copy is."""
    together = sum(step(name, toy, rank=rank)["optimizer"] for rank in range(8))
    return together / step("single", toy)["optimizer"]


def redundant_copies():
    return [ranks * copies("ddp") / 8 - 1 for ranks in (5, 2, 8)]


def layers_over_the_state():
    """What ZeRO-3 has gathered does not shrink with N."""
    return [runs.of_a_step("zero3", "over the state", ranks=ranks) / (4 / 8) for ranks in (8, 32)]


# Mixed precision.

HALF, SINGLE = torch.bfloat16, torch.float32


@functools.cache
def weighed(gradient_dtype: torch.dtype = HALF) -> list[float]:
    """Bytes per parameter of bfloat16 weights, gradients, float32 weights, AdamW's moments: alive after a step."""
    layer = nn.Linear(64, 64, bias=False, dtype=HALF)
    (weight,) = layer.parameters()
    master = weight.detach().float().requires_grad_()
    optimizer = torch.optim.AdamW([master])
    layer(torch.ones(1, 64, dtype=HALF)).sum().backward()
    gradient = weight.grad.to(gradient_dtype)
    master.grad = gradient.float()  # for the update only
    optimizer.step()
    moments = [tensor.nbytes for tensor in optimizer.state[master].values() if tensor.shape == master.shape]
    return [nbytes / weight.numel() for nbytes in (weight.nbytes, gradient.nbytes, master.nbytes, sum(moments))]


def ddp_in_bf16() -> float:
    """Bytes per parameter that DDP holds when it trains in bfloat16 through autograd's casts."""
    run = dry("ddp", "--dtype", "bf16", preset="toy")
    return state(run) / (run["held_bytes"]["parameters"] / 4)


def trained_in_bf16(parts: list[str], gradients: str = "bfloat16", preset: str = "") -> float:
    """Bytes per parameter of these parts; with a preset its GB."""
    names = "weights", "gradients", "float32 weights", "moments", "what DDP holds"
    sizes = dict(zip(names, [*weighed(getattr(torch, gradients)), ddp_in_bf16()]))
    total = sum(sizes[part] for part in parts)
    return total * parameters_of(preset) / 1e9 if preset else total


def boxes_of_figure_two():
    """Against engines with bfloat16 weights and float32 gradients at N = 8.

    Of float32 weights a rank has 4/N bytes beside bfloat16 ones; in ZeRO-3 they are the only ones, where the figure
    has 2/N.
    """
    held = [step(name, dtype=HALF)["state"] for name in runs.STAGES]
    boxes = [2 + 4 + 8 / 8, 2 + 12 / 8, 14 / 8]
    without = [nbytes - copy for nbytes, copy in zip(held, (4 / 8, 4 / 8, 2 / 8))]
    meets = [all(about(one, box, 0.02) for one, box in zip(found, boxes)) for found in (without, held)]
    return [*held, *boxes], *meets


# Activations: what forward keeps for backward, of the articles' 4 sequences of 2,048 tokens.


def of_a_forward(preset: str, what: str, **shape) -> float:
    """GB that are "kept" for backward; with every block "recomputed" the most at once: their inputs, and one's
    activations; and the "weights"."""
    whole, inputs = (saved_bytes(preset, 4, 2048, recompute=again, **shape) for again in (False, True))
    two, one = (saved_bytes(preset, 4, 2048, **{**shape, "layers": layers}) for layers in (2, 1))
    sizes = {"kept": whole, "recomputed": inputs + two - one, "weights": 2 * parameters_of(preset)}
    return sizes[what] / 1e9


def bytes_per_parameter():
    return [saved_bytes("7b", sequences, 1024) / P7 for sequences in (3, 1, 8)]


def flops(early_stop: bool | None) -> int:
    """FLOPs of forward and backward of one sequence, on fake tensors; None: nothing is recomputed."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(bool(early_stop)):
        model = runs.gpt("7b", layers=8)
        if early_stop is not None:
            checkpoint_blocks(model, casts=False)
        tokens, targets = (torch.zeros(1, 2048, dtype=torch.int64) for _ in range(2))
        next_token_loss(model(tokens), targets).backward()
    return counter.get_total_flops()


def more_flops():
    """In percent, if blocks run again to their end, and if they stop where torch's do."""
    return [100 * (flops(early_stop) / flops(None) - 1) for early_stop in (False, True)]


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


def growth(kernel=None, **doubled) -> float:
    """How many times more bytes are kept if one of the sizes is doubled."""
    usual = {"batch": 2, "seq": 128, "width": 64}
    shape = {"layers": 4, "heads": 4, "vocab": 16, "kernel": kernel, "dtype": SINGLE}
    small, large = (saved_bytes("small", **sizes, **shape) for sizes in (usual, usual | doubled))
    return large / small


# Offload: what leaves the GPU, and what it costs.


def most_beside(parts: tuple[str, ...], **options) -> int:
    """The most bytes that ZeRO-3 has at once in a step beside these parts."""
    return runs.worst_moment(
        runs.small_gpt,
        of=lambda moment: moment.live - sum(moment.parts[part] for part in parts),
        optimizer_cls=runs.ADAMW,
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
