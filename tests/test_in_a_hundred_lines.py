"""The listings of docs/in-a-hundred-lines.md, taken from the page: they train as the chapters do, to the bit."""

import re
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_rooms import code_lines

from harness.measure.ledger import MemoryLedger, held_bytes
from harness.measure.traffic import TrafficLedger
from harness.properties import parts
from harness.run.model import GPT, next_token_loss, preset

PAGE = Path(__file__).resolve().parent.parent / "docs" / "in-a-hundred-lines.md"
*LISTINGS, TRY_IT = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
CONFIG = preset("toy")


def engines_of_the_page() -> dict:
    """{name: class}, of all listings one after the other, as a reader would put them into one file."""
    names = {}
    exec("\n".join(LISTINGS), names)
    return names


def test_how_long_the_listings_are():
    lines = {stage: 0 for stage in parts.STAGES}
    for stage, listing in zip(parts.STAGES, LISTINGS, strict=True):
        lines[stage] = code_lines(listing)
        assert all(len(line) <= 120 for line in listing.splitlines())
    assert sum(lines.values()) <= 120, lines
    assert f" {sum(lines.values())} lines of code" in PAGE.read_text(), lines


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of this rank alone: (inputs, targets)."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(CONFIG.vocab, (3, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def trained(engine) -> dict:
    """Losses of six steps; and of the last ones, what was sent, what is held before the update, and the peak.

    Of several peaks the lowest: gloo's thread may let go of a buffer a moment late. So one is higher, and never lower.
    """
    found = {"losses": [float(engine.training_step(*batch(step), next_token_loss)) for step in range(3)]}
    update, held, peaks = engine.optimizer.step, [], []
    engine.optimizer.step = lambda: (held.append(held_bytes(engine)), update())
    for step in range(3, 6):
        with MemoryLedger(engine) as memory, TrafficLedger() as traffic:
            found["losses"].append(float(engine.training_step(*batch(step), next_token_loss)))
        peaks.append(memory.peak)
    moved = [(c.kind, c.whole_bytes) for c in traffic.collectives]
    return found | {"held": held[-1], "sent": sorted(moved), "peak": min(peaks)}


def beside_the_chapter(stage: str) -> None:
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    # The same buckets, for where a number lies in its buffer decides in which order three ranks' numbers are added.
    options = {"prefetch": 0} if stage == "zero3" else {"bucket_mb": 0.02}
    chapter, model = parts.STAGES[stage](GPT(CONFIG), adamw, **options), GPT(CONFIG, seed=dist.get_rank())
    named = dict(model.named_parameters())
    runs = [[named[name] for name in bucket.names] for bucket in chapter.buckets]
    listing = engines_of_the_page()[parts.STAGES[stage].__name__]
    engine = listing(model, adamw, list(model.blocks) if stage == "zero3" else runs)
    buckets = [*engine.units, engine.root] if stage == "zero3" else engine.buckets
    engine.buckets = buckets  # where `held_bytes` looks for shards
    assert len(buckets) > 2 and sum(bucket.flat.numel() for bucket in buckets) % 4 == 0

    ours, of_the_chapter = trained(engine), trained(chapter)
    for what in ours:  # what a chapter holds is held to the theory by the property held_bytes_equal_the_theory
        assert ours[what] == of_the_chapter[what], what
    if stage == "zero3":
        assert all(unit.flat.untyped_storage().nbytes() == 0 for unit in buckets), "a unit is still gathered"
        for unit in buckets:
            engine.gather(unit)
    state = chapter.full_state_dict()
    for name, weight in model.named_parameters():
        assert torch.equal(weight, state[name]), name


@pytest.mark.parametrize("world_size", (2, 3))
@pytest.mark.parametrize("stage", parts.STAGES)
def test_a_listing_trains_as_its_chapter_does(ranks, stage, world_size):
    ranks(world_size).run(beside_the_chapter, stage=stage)


def the_readers_file() -> str:
    with patch.object(dist, "init_process_group"), patch("builtins.print") as said:
        exec("\n".join([*LISTINGS, TRY_IT]), {})
    return [call.args[0] for call in said.call_args_list]


def test_the_file_that_a_reader_puts_together_runs(ranks):
    for rank, lines in enumerate(ranks(2).run(the_readers_file)):
        assert all(line.startswith(f"rank {rank}: ZeRO") for line in lines) and len(lines) == 3
        assert len({line.split()[-1] for line in lines}) == 1, lines
