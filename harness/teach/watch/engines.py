"""What can be recorded: the engines, and a bug from the museum beside the engine that it was made from."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from harness.run import engines
from harness.run.counterparts import PlainStep
from harness.run.data import Batches, load_text
from harness.run.model import GPT, next_token_loss, preset
from harness.run.process_group import Rank
from harness.teach.museum import visit
from harness.teach.museum.exhibits import EXHIBITS, Exhibit
from zero1 import ZeRO1
from zero2 import ZeRO2
from zero3 import ZeRO3

TITLES = {
    "zero3": "ZeRO-3, prefetch 1",
    "zero3-prefetch0": "ZeRO-3, prefetch 0",
    "zero2": "ZeRO-2",
    "zero1": "ZeRO-1",
    "ddp": "DDP",
    "fsdp2": "FSDP2 (fully_shard)",
}


NUMBERS = {"losses", "norms", "scales"}  # what a page of memory and messages does not show


@dataclass(frozen=True)
class Run:
    """Something to record.

    `batches(me, count)` makes what `count` steps need, before anything is watched; `build(me)` makes the engine, and
    `step(engine, batch)` trains it once.
    """

    name: str
    title: str
    batches: Callable
    build: Callable
    step: Callable
    about: dict


def of_engine(name: str, options) -> Run:
    """The engine `name` with the GPT, batch and buckets of the command's options."""
    config = preset(options.preset)
    seq = options.seq or config.seq
    text = load_text(None, seq)
    with torch.device("meta"):
        nbytes = sum(param.nbytes for param in GPT(config).parameters())
    bucket_mb = nbytes / 2**20 / 6 if options.bucket_mb is None else options.bucket_mb

    def build(me: Rank):
        model = GPT(config, seed=me.rank).to(me.device)  # every rank another start: the engine takes rank 0's
        adamw = partial(torch.optim.AdamW, lr=1e-3, fused=me.device.type == "cuda")
        if name in ("zero1", "zero2"):
            return {"zero1": ZeRO1, "zero2": ZeRO2}[name](model, adamw, bucket_mb=bucket_mb)
        if name.startswith("zero3"):
            return ZeRO3(model, adamw, prefetch=0 if name.endswith("prefetch0") else 1)
        if name == "ddp":
            ids = [me.device] if me.device.type == "cuda" else None
            model = DistributedDataParallel(model, ids, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
            return PlainStep(model, adamw(model.parameters()))
        return engines.build(name, GPT(config).to(me.device), adamw, me.device)

    def batches(me: Rank, count: int) -> list:
        draw = Batches(text, options.batch, seq, 0, me.device)
        return [draw(number, me.rank) for number in range(count)]

    def step(engine, batch) -> None:
        engine.training_step(*batch, next_token_loss)

    words = f"GPT {options.preset}, {options.batch} x {seq} tokens per rank"
    return Run(name, TITLES[name], batches, build, step, {"model": words})


def of_exhibit(number: int) -> list[Run]:
    """The right engine, and bug `number` of the museum. Raises ValueError for one that no step shows."""
    exhibit = EXHIBITS[number]
    training = visit.Training(**exhibit.training)
    if training.reload_at is not None or training.resume_at is not None:
        raise ValueError(
            f"bug {number} shows when weights or a checkpoint are loaded, not in a step: ./launch.sh bug {number}"
        )
    right = _of_training(exhibit, exhibit.right, training)
    wrong = _of_training(exhibit, exhibit.wrong, training)
    stage = exhibit.right.__name__.replace("ZeRO", "ZeRO-")
    note = f"{exhibit.title}. {exhibit.symptom}"
    if exhibit.differs <= NUMBERS:
        note += f" It changes numbers, and not who holds or sends what: ./launch.sh bug {number} shows them."
    return [
        replace(right, name="right", title=f"{stage}, the right one"),
        replace(wrong, name=f"bug{number}", title=f"{stage} with bug {number}", about={**wrong.about, "note": note}),
    ]


def _of_training(exhibit: Exhibit, engine_cls: type, training: visit.Training) -> Run:
    text = load_text(None, visit.SHAPE.seq)

    def build(me: Rank):
        # As the museum does it; a group of its own, in which a collective may hang for a few seconds only.
        model = (visit.Routed if training.kept_losses else visit.Tempered)(visit.SHAPE, seed=me.rank)
        for name, param in model.named_parameters():
            param.requires_grad_(training.frozen is None or training.frozen not in name)
        group = None if engine_cls is exhibit.right else dist.new_group(timeout=visit.timedelta(seconds=visit.TIMEOUT))
        return engine_cls(model, visit.OPTIMIZERS[training.optimizer], **{**exhibit.options, "group": group})

    def batches(me: Rank, count: int) -> list:
        draw, each = Batches(text, 2, visit.SHAPE.seq, 0), training.micro_batches
        return [[draw(number * each + micro, me.rank) for micro in range(each)] for number in range(count)]

    def step(engine, batch) -> None:
        for inputs, targets in batch:
            with record_function("step 1 forward"):
                loss = next_token_loss(engine(inputs), targets) + visit.kept_losses(engine.model)
            with record_function("step 2 backward"):
                (loss / training.micro_batches).backward()
        if training.max_norm is not None:
            engine.clip_grad_norm_(training.max_norm)
        engine.step()
        engine.zero_grad()

    words = f"a GPT of {visit.SHAPE.layers} layers, 2 x {visit.SHAPE.seq} tokens per rank; {training.optimizer}"
    return Run("", "", batches, build, step, {"model": words})
