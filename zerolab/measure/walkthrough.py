"""`./launch.sh zero1 2`: a few training steps of a chapter, then the trace of one step, event by event.

Everything printed is observed from outside, by a timeline and the memory and traffic ledgers. The chapters have no code
for it.
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist

from zerolab.measure import tables, walkthrough_options
from zerolab.measure.held import buckets_of, owners, sizes_of_layout
from zerolab.measure.ledger import PartsLedger
from zerolab.measure.step_trace import BucketTrace, UnitTrace, held_in_words
from zerolab.measure.timeline import Timeline, chrome_trace
from zerolab.measure.watched_step import watched_step
from zerolab.run import json_file, process_group
from zerolab.run.data import Batches, load_text
from zerolab.run.engines import CHAPTERS
from zerolab.run.model import GPT, next_token_loss, number_of_parameters, preset
from zerolab.run.process_group import World

BATCH = 4  # sequences of each rank


def headline(chapter: str) -> str:
    """The first line of the chapter's docstring."""
    return sys.modules[CHAPTERS[chapter].__module__].__doc__.splitlines()[0]


def main() -> None:
    options = walkthrough_options.arguments()
    seq = preset(options.preset).seq
    text = load_text(None, seq)
    world = process_group.start(options.backend, options.device)
    batches = Batches(text, BATCH, seq, 0, world.device)
    ready = [batches(step, world.rank) for step in range(options.steps)]  # before anything is counted

    def print_wrapped(text: str) -> None:
        world.print(tables.wrapped(text))

    print_wrapped(headline(options.chapter))
    print_wrapped(
        f"{world.world_size} rank(s), {world.backend}, {world.device.type}: {world.why}. MB are 10^6 bytes; "
        "this is rank 0."
    )
    with PartsLedger() as memory:
        # Every rank draws different weights, and the engine broadcasts rank 0's.
        model = GPT(preset(options.preset), seed=world.rank).to(world.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=world.device.type != "cpu")
        engine = CHAPTERS[options.chapter](model, optimizer, **_own(options))
        print_wrapped(_partition(engine, options))
        for number, batch in enumerate(ready[:-1], 1):
            memory.start_step(engine)
            loss = engine.training_step(*batch, next_token_loss)
            print_wrapped(f"training step {number}: loss {loss.item():.4f} on this rank's batch")
        _print_trace(engine, memory, ready[-1], options, print_wrapped)
    if options.trace:
        _trace(engine, ready[-1], world, options)
    process_group.stop()


def _own(options: argparse.Namespace) -> dict:
    """The chapter's own options."""
    return {name: value for name, value in vars(options).items() if name in ("bucket_mb", "prefetch")}


def _print_trace(engine, memory: PartsLedger, batch, options: argparse.Namespace, print_wrapped) -> None:
    """Print one training step, event by event, and what it sent."""
    print_wrapped(f"training step {options.steps}, event by event.\n")
    kind = UnitTrace if hasattr(engine, "units") else BucketTrace
    trace = kind(engine, memory)
    with watched_step(engine, memory) as seen, Timeline(engine, listener=trace):
        loss = engine.training_step(*batch, next_token_loss)
    print_wrapped("\n".join([trace.how_to_read, *trace.lines]))
    print_wrapped(
        f"\nloss {loss.item():.4f} on this rank's batch; after zero_grad() this rank keeps {held_in_words(engine)}"
    )
    print_wrapped(f"alive between steps, including buffers that stay allocated: {memory.live / 1e6:.2f} MB")
    times = ""
    if (ranks := engine.world_size) > 1:
        share = seen.sent_elements / number_of_parameters(preset(options.preset)) * ranks / (ranks - 1)
        times = f" = {share:.3f} Ψ x (N-1)/N, with N = {ranks}"
    megabytes, count = seen.sent_bytes / 1e6, len(seen.collectives)
    print_wrapped(
        f"sent in this step: {seen.sent_elements:,} elements{times}; {megabytes:.2f} MB in {count} collectives"
    )


def _trace(engine, batch, world: World, options: argparse.Namespace) -> None:
    """Write one more step of all ranks into one file."""
    dist.barrier()  # the ranks' clocks start here
    timeline = Timeline(engine, world.device)
    with PartsLedger(engine) as memory, timeline:
        memory.clock = timeline.now
        engine.training_step(*batch, next_token_loss)
        memory.clock = time.perf_counter
    # Memory that was alive before the timeline was opened is alive from its beginning.
    live = [(max(0.0, timeline.seconds(moment.when)), moment.live) for moment in memory.moments()]
    of_all_ranks = process_group.gathered((timeline.spans, live))
    if world.rank > 0:
        return
    name = type(engine).__name__
    own = [f", {option.replace('_', ' ')} {value}" for option, value in _own(options).items()]
    about = {
        "title": f"{name}{''.join(own)}: GPT {options.preset}, {world.world_size} ranks over {world.backend}",
        **json_file.about(world.device),
        "command": " ".join(["./launch.sh", options.chapter, str(world.world_size), *sys.argv[2:]]),
    }
    json_file.write(options.trace, chrome_trace(*zip(*of_all_ranks), **about), indent=None)
    print("open it in chrome://tracing or ui.perfetto.dev")


def _partition(engine, options: argparse.Namespace) -> str:
    """Step 0: how the model was cut, which ranks own which parameter, and what this rank holds."""
    psi = number_of_parameters(preset(options.preset))
    if hasattr(engine, "units"):
        count = sum(unit.module is not engine.model for unit in engine.units)
        parts = f"{count} unit{'s' if count > 1 else ''}"
        limit = " (a transformer block each) and the root (all other parameters)"
    else:
        count = len(buckets_of(engine))
        parts = f"{count} bucket{'s' if count > 1 else ''}"
        limit = f" of at most {options.bucket_mb:g} MiB"
    whole, shard, padding = sizes_of_layout(engine)
    return "\n".join([
        f"\nGPT {options.preset}: Ψ = {psi:,} parameters, {4 * psi / 1e6:.2f} MB in float32",
        f"\nStep 0 partition: {parts}{limit}, each cut into {whole // shard} equal shards, one per rank.",
        f"This rank owns {shard:,} elements. {padding} elements are padding: zeros that make the shards equal.",
        *_owners(engine, options.map),
        f"holds {held_in_words(engine)} (AdamW allocates its state in its first step)\n",
    ])  # fmt: skip


def _owners(engine, everything: bool) -> list[str]:
    """Which ranks own which parameter, in the engine's layout."""
    lines = []
    for name, shape, first, last in owners(engine):
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        lines.append(f"  {name:<28} {str(shape):<14} {ranks}")
    if not everything and len(lines) > 8:
        lines = [*lines[:6], f"  ... {len(lines) - 6} more (--map prints all)"]
    return lines


if __name__ == "__main__":
    process_group.run(main)
