"""The chapters and the engines that build on them."""

import copy

import torch
from torch import nn

from harness.measure.ledger import MemoryLedger
from harness.measure.watched_step import watched_step
from harness.properties.chapter_subjects import CHAPTERS, chapter_of
from harness.properties.fixtures import ADAMW, Stack, TiedAcross, seeded, token_batch, vector_batch
from harness.properties.property import STAGES, ask, ask_each, ask_thorough, holds, same
from harness.run.model import GPT, next_token_loss, preset

STEPS = 3  # the last one is watched: AdamW makes its state in the first


def of_gpt(rank: int, step: int):
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    config = preset("toy")
    tokens = torch.randint(config.vocab, (2, config.seq + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


# {name: (model, its batch on a rank in a step, the loss)}
MODELS = {
    "gpt": (lambda: GPT(preset("toy")), of_gpt, next_token_loss),
    "mlp": (Stack, lambda rank, step: vector_batch(step, rank), nn.functional.mse_loss),
    "tied": (TiedAcross, lambda rank, step: token_batch(step, rank), nn.functional.cross_entropy),
}


def collectives_of(seen) -> list[tuple]:
    return [(each.kind, each.whole_bytes, each.sent_bytes, each.step) for each in seen.collectives]


def watched(build, model: str, **options) -> dict:
    """Three steps of what `build` puts around the model. What the last one sent, held and needed, and the weights."""
    make, batch, loss_fn = MODELS[model]
    module = seeded(make, dtype=torch.float32)
    rank = torch.distributed.get_rank()
    with MemoryLedger() as memory:
        engine = build(module, ADAMW, **options)
        for step in range(STEPS - 1):
            loss = engine.training_step(*batch(rank, step), loss_fn)
        with watched_step(engine, memory) as seen:
            loss = engine.training_step(*batch(rank, STEPS - 1), loss_fn)
    return {
        "the collectives of a step, in their order": collectives_of(seen),
        "bytes held before the update": seen.held,
        "the peak of a step": seen.peak,
        "the loss": loss,
        "the weights": copy.deepcopy(engine.full_state_dict()),
    }


@holds(
    "traffic",
    *ask_each("model", MODELS, STAGES, (1, 2, 3, 4), more_ranks=()),
    ask("zero3", model="gpt", prefetch=0),
    ask("zero3", model="gpt", prefetch=2),
    ask(("zero1", "zero2"), model="gpt", bucket_mb=0),
    ask_thorough(("zero1", "zero2"), model="mlp", bucket_mb=0.02),
    of_stages=True,
)
def an_engine_does_what_its_chapter_does(engine, model, **options):
    """Without options of its own an engine sends, holds and computes what its chapter does, to the bit.

    That is in models whose forward runs the units in the order in which they are declared. In others an engine
    remembers the order of the last forward and prefetches by that; a chapter does not.
    """
    chapter = watched(CHAPTERS[chapter_of(engine.like)], model, **options)
    found = watched(engine, model, **options)
    for what, expected in chapter.items():
        # To the bit: both hand the same numbers to the same operations, in the same order.
        same(what, found[what], expected, step=4)
