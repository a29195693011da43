"""What can be recorded: the engines, and a bug from the museum beside the engine that it was made from."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist

from zerolab.run import engines
from zerolab.run.data import Batches, load_text
from zerolab.run.model import GPT, next_token_loss, preset
from zerolab.run.process_group import Rank
from zerolab.teach.museum.exhibits import EXHIBITS
from zerolab.teach.museum.loop import SHAPE, TIMEOUT, Loop, Training

TITLES = {name: engines.ENGINES[name].title for name in engines.named("watch")}
WARM_UP = 3  # steps before the recorded one: the optimizer makes its state, DDP its buckets
NUMBERS = {"losses", "norms", "scales"}  # what a page of memory and messages does not show


@dataclass(frozen=True)
class Recordable:
    """Something to record.

    `loop(me, steps)` has the data of so many steps: `build()` makes the engine, `step(engine, number)` trains it once.
    `warm_up` steps come before the recorded one; `once`: what is to be seen happens in that step alone.
    """

    name: str
    title: str
    about: dict
    loop: Callable
    warm_up: int = WARM_UP
    once: bool = False


def of_engine(name: str, options) -> Recordable:
    """The engine `name` with the GPT, batch and buckets of the command's options."""
    config = preset(options.preset)
    seq = options.seq or config.seq
    text = load_text(None, seq)
    with torch.device("meta"):
        nbytes = sum(param.nbytes for param in GPT(config).parameters())
    bucket_mb = nbytes / 2**20 / 6 if options.bucket_mb is None else options.bucket_mb

    def build(me: Rank):
        model = GPT(config).to(me.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=me.device.type != "cpu")
        more = {"bucket_mb": bucket_mb} if "bucket_mb" in engines.ENGINES[name].takes else {}
        return engines.build(name, model, optimizer, me.device, **more)

    def loop(me: Rank, steps: int) -> SimpleNamespace:
        draw = Batches(text, options.batch, seq, 0, me.device)
        batches = [draw(number, me.rank) for number in range(steps)]

        def step(engine, number: int) -> None:
            engine.training_step(*batches[number], next_token_loss)

        return SimpleNamespace(build=partial(build, me), step=step)

    words = f"GPT {options.preset}, {options.batch} x {seq} tokens per rank"
    return Recordable(name, TITLES[name], {"model": words}, loop)


def of_exhibit(number: int) -> list[Recordable]:
    """The right engine, and bug `number` of the museum. Raises ValueError for one that no step shows."""
    exhibit = EXHIBITS[number]
    training = Training(**exhibit.training)
    if training.reload_at is not None or training.resume_at is not None:
        raise ValueError(
            f"bug {number} shows when weights or a checkpoint are loaded, not in a step: ./launch.sh bug {number}"
        )
    stage = exhibit.right.__name__.replace("ZeRO", "ZeRO-")
    note = f"{exhibit.title}; {exhibit.symptom}."
    if exhibit.differs <= NUMBERS:
        note += f" It changes numbers, and not who holds or sends what: ./launch.sh bug {number} shows them."
    words = f"a GPT of {SHAPE.layers} layers, 2 x {SHAPE.seq} tokens per rank; {training}"
    shown = {"warm_up": WARM_UP}
    if exhibit.differs & {"timeout", "error"}:  # it stops in its first step
        shown = {"warm_up": 0, "once": True}
    elif training.overflow_at is not None:
        shown = {"warm_up": training.overflow_at, "once": True}

    def wrong(me: Rank, steps: int) -> Loop:
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))  # a collective may hang in it, for a few seconds
        return Loop(exhibit, exhibit.wrong, me.rank, group, steps)

    return [
        Recordable("right", f"{stage}, the right one", {"model": words},
            lambda me, steps: Loop(exhibit, exhibit.right, me.rank, steps=steps), **shown),
        Recordable(f"bug{number}", f"{stage} with bug {number}", {"model": words, "note": note}, wrong, **shown),
    ]  # fmt: skip
