"""The engines that can be recorded, and a bug from the museum next to the engine that it was made from."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from zerolab.run import engines
from zerolab.run.data import Batches, load_text
from zerolab.run.model import GPT, next_token_loss, number_of_parameters, preset
from zerolab.run.names import engines_of
from zerolab.run.process_group import World
from zerolab.teach.museum.exhibits import EXHIBITS
from zerolab.teach.museum.loop import BATCH, SHAPE, Loop

TITLES = {name: engines.ENGINES[name].title for name in engines_of("watch")}
CHAPTERS = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3-prefetch0": 3}
WARM_UP = 3  # steps before the recorded one: the optimizer makes its state, DDP its buckets
SEQUENCES, TOKENS = 2, 32  # of each rank. With more tokens the activations would need nearly all of the memory
NUMBERS = {"losses", "norms", "scales"}  # what a page of memory and messages does not show


@dataclass(frozen=True)
class Recordable:
    """Something to record.

    `loop(world, steps)` has the data of so many steps: `build()` makes the engine, and `step(engine, number)` trains it
    once. `warm_up` steps come before the recorded one. `chapter` is the number of the chapter that trains, for the page
    to show its code.
    """

    name: str
    title: str
    about: dict
    loop: Callable
    warm_up: int = WARM_UP
    chapter: int | None = None


def of_engine(name: str, size: str) -> Recordable:
    """The engine `name` with a GPT of the preset `size`, and about six buckets."""
    config = preset(size)
    seq = min(TOKENS, config.seq)
    text = load_text(None, seq)
    bucket_mb = 4 * number_of_parameters(config) / 2**20 / 6

    def loop(world: World, steps: int) -> SimpleNamespace:
        draw = Batches(text, SEQUENCES, seq, 0, world.device)
        batches = [draw(number, world.rank) for number in range(steps)]

        def build():
            model = GPT(config)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            more = {"bucket_mb": bucket_mb} if "bucket_mb" in engines.ENGINES[name].takes else {}
            return engines.build(name, model, optimizer, world.device, **more)

        def step(engine, number: int) -> None:
            engine.training_step(*batches[number], next_token_loss)

        return SimpleNamespace(build=build, step=step)

    about = {"model": f"GPT {size}, {SEQUENCES} x {seq} tokens per rank"}
    return Recordable(name, TITLES[name], about, loop, chapter=CHAPTERS.get(name))


def of_exhibit(number: int) -> list[Recordable]:
    """The correct stage, and bug `number` of the museum. Raises ValueError for one that no step shows."""
    exhibit = EXHIBITS[number]
    if exhibit.resume_at is not None:
        raise ValueError(f"bug {number} shows when a checkpoint is loaded, not in a step: ./launch.sh bug {number}")
    note = f"{exhibit.title}; {exhibit.text['Symptom']}"
    if exhibit.differs <= NUMBERS:
        note += f" It changes numbers, and not who holds or sends what: ./launch.sh bug {number} shows them."
    about = {"model": f"a GPT of {SHAPE.layers} layers, {BATCH} x {SHAPE.seq} tokens per rank"}
    warm_up = 0 if exhibit.differs & {"timeout", "error"} else WARM_UP  # such a bug stops in its first step

    def correct(world: World, steps: int) -> Loop:
        return Loop(exhibit, exhibit.correct, world.rank, steps)

    def wrong(world: World, steps: int) -> Loop:
        return Loop(exhibit, exhibit.build, world.rank, steps)

    return [
        Recordable("right", "the correct stage", about, correct, warm_up, CHAPTERS.get(exhibit.stage)),
        Recordable(f"bug{number}", f"bug {number}", about | {"note": note}, wrong, warm_up),
    ]
