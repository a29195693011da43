"""What each chapter does when it is run: a few training steps, then one step told event by event.

Everything printed is observed from outside, by the memory and traffic ledgers; the stage files know nothing of it.
"""

import argparse
import contextlib
import inspect
import time
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from harness.measure import step_report, step_time
from harness.measure.memory_parts import PARTS, PartsLedger
from harness.measure.out_of_memory import explained
from harness.measure.places import PlacesLedger, name_rows
from harness.measure.story import BucketStory, UnitStory, held
from harness.measure.timeline import Timeline, chrome_trace
from harness.measure.traffic import TrafficLedger
from harness.run import micro_batches, process_group
from harness.run import options as common
from harness.run.data import Batches, load_text
from harness.run.model import GPT, next_token_loss, preset
from harness.run.recompute import checkpoint_blocks

STEPS = ("0 partition", "1 forward", "2 backward", "3 reduce gradients", "4 update the shard", "5 gather parameters")
WATCHED_STEPS = 3  # after the told one, for the line that says where the time goes


def arguments(engine_cls, doc: str, argv=None) -> argparse.Namespace:
    own = inspect.signature(engine_cls).parameters  # bucket_mb in ZeRO-1 and -2, prefetch in ZeRO-3
    parser = common.Parser(description=doc.splitlines()[0])
    common.add(parser, "preset", "checkpoint-activations", "data", "lr", "seed", "backend", "device")
    parser.add_argument("--steps", type=int, default=5, help="training steps (default 5)")
    micro_batches.add_options(parser, 4)
    parser.add_argument("--trace", help="write a Chrome/Perfetto trace of one more step, and of step 0, to this file")
    parser.add_argument("--map", action="store_true", help="print which ranks own which parameter, all of them")
    if "bucket_mb" in own:
        parser.add_argument("--bucket-mb", type=float, default=2.0, help="MiB; 0: one per parameter (default 2)")
    if "prefetch" in own:
        parser.add_argument("--prefetch", type=int, default=1, help="units to gather ahead (default 1)")
        keep = "keep units gathered until backward"
        parser.add_argument("--no-reshard-after-forward", action="store_true", help=keep)
    options = parser.parse_args(argv)
    common.settle(options, steps=2, **{name: 0 for name in ("bucket_mb", "prefetch") if name in own})
    micro_batches.settle(options, 4)
    process_group.check_writable("--trace", options.trace)
    return options


def run(engine_cls, doc: str) -> None:
    """Train and tell; the `main()` of every stage file."""
    process_group.run(partial(_walk, engine_cls, doc))


def _walk(engine_cls, doc: str) -> None:
    options = arguments(engine_cls, doc)
    config = preset(options.preset)
    text = load_text(options.data, config.seq)
    me = process_group.start(options.backend, options.device)
    batches = Batches(text, options.batch, config.seq, options.seed, me.device)
    ready = [batches(step, me.rank) for step in range(options.steps)]  # before anything is counted
    own = {name: getattr(options, name) for name in ("bucket_mb", "prefetch") if hasattr(options, name)}
    if hasattr(options, "prefetch"):
        own["reshard_after_forward"] = not options.no_reshard_after_forward
    me.print(doc.splitlines()[0])
    me.print(f"{me.world_size} rank(s), {me.backend}, {me.device.type}: {me.why}. MB are 10^6 bytes; this is rank 0.")
    with PartsLedger() as memory:
        model = GPT(config, options.seed + me.rank).to(me.device)  # every rank another start: the engine takes rank 0's
        if options.checkpoint_activations:
            checkpoint_blocks(model, casts=False)
        adamw = partial(torch.optim.AdamW, lr=options.lr, fused=me.device.type != "cpu")
        timeline = Timeline(device=me.device) if options.trace else contextlib.nullcontext()
        with timeline as partition, explained("step 0, the construction", None, memory):
            engine = engine_cls(model, adamw, **own)
        psi = sum(param.numel() for param in engine.model.parameters())
        me.print(f"\nGPT {options.preset}: Ψ = {psi:,} parameters, {4 * psi / 1e6:.2f} MB in float32")
        limit = f" of at most {options.bucket_mb:g} MiB" if hasattr(options, "bucket_mb") else ""
        me.print(f"\nStep {STEPS[0]}: {_partition(engine, limit)}")
        me.print(_owners(engine, options.map))
        # ZeRO-1's gradients have memory before the first backward.
        whole = hasattr(engine.trained_buckets[0], "flat_gradient")
        buffers = "; the gradients' buffers are made with the engine" * whole
        me.print(f"holds {held(engine)} (AdamW makes its state in its first step{buffers})\n")
        for step in range(options.steps - 1):
            memory.begin(engine)
            with explained(f"training step {step + 1}", engine, memory):
                loss = micro_batches.training_step(engine, *ready[step], next_token_loss, options.accumulate)
            me.print(f"training step {step + 1}: loss {loss.item():.4f} on this rank's batch")
        again = "; backward computes each block's forward again" * options.checkpoint_activations
        me.print(f"training step {options.steps}, event by event{again}.\n")
        story = (UnitStory if hasattr(engine, "units") else BucketStory)(engine, memory, options.accumulate)
        memory.begin(engine)
        with TrafficLedger(story.event) as traffic, explained(f"training step {options.steps}", engine, memory):
            loss = micro_batches.training_step(engine, *ready[-1], next_token_loss, options.accumulate)
        story.close()
    me.print("\n".join([*story.how_to_read(), "", *story.lines]))
    me.print(f"\nloss {loss.item():.4f} on this rank's batch; between steps this rank holds {held(engine)}")
    me.print(f"alive between steps, buffers that are kept for the next one included: {memory.live / 1e6:.2f} MB")
    factor = (me.world_size - 1) / me.world_size
    elements, megabytes = traffic.sent_elements, traffic.sent_bytes / 1e6
    times = f" = {elements / (psi * factor):.3f} Ψ x (N-1)/N, with N = {me.world_size}" if factor else ""
    count = len(traffic.collectives)
    me.print(f"sent in this step: {elements:,} elements{times}; {megabytes:.2f} MB in {count} collectives")
    again = partial(micro_batches.training_step, engine, *ready[-1], next_token_loss, options.accumulate)
    found = step_time.watch(again, WATCHED_STEPS, engine, me.device, step_time.clock_offset()[0])
    me.print(step_report.sentence(step_time.summary(found), 0))
    if options.trace:
        _trace(engine, partition.spans, ready[-1], me, options, own)
    process_group.stop()


def _trace(engine, partition: list, batch, me, options: argparse.Namespace, own: dict) -> None:
    """One more step of all ranks, into one file; what step 0 was stands before it."""
    dist.barrier()  # the ranks' clocks start here
    with PlacesLedger(engine) as memory, Timeline(engine, me.device) as timeline:
        memory.clock = timeline.now
        micro_batches.training_step(engine, *batch, next_token_loss, options.accumulate)
        memory.clock = time.perf_counter
    # What is there already when the timeline is opened is there from its beginning.
    live = []
    for moment in memory.moments():
        live.append((max(0.0, timeline.seconds(moment.when)), {part: moment.parts[part] for part in PARTS}))
    everyone = [None] * me.world_size
    name_rows(timeline.collectives, memory)
    dist.all_gather_object(everyone, (partition, timeline.spans, live))
    if me.rank == 0:
        own = "".join(f", {name.replace('_', ' ')} {value}" for name, value in own.items())
        name, ranks = type(engine).__name__, f"{me.world_size} ranks over {me.backend}"
        about = {"title": f"{name}{own}: GPT {options.preset}, {ranks}", "torch": torch.__version__}
        about |= {"hardware": process_group.hardware(me.device), "command": common.command(name.lower(), me.world_size)}
        # The step begins where step 0 has ended on the last rank: Perfetto takes no times below zero.
        begins = max(span.end for partition, _, _ in everyone for span in partition)
        about["step_begins_ms"] = round(begins * 1e3, 4)
        ranks, live = [], []
        for built, step, moments in everyone:
            ranks.append([*built, *(replace(span, start=begins + span.start, end=begins + span.end) for span in step)])
            live.append([(begins + seconds, parts) for seconds, parts in moments])
        common.write_json(options.trace, chrome_trace(ranks, live, **about), indent=None)
        print(f"written: {options.trace} (open it in chrome://tracing or ui.perfetto.dev)")


def _partition(engine, limit: str) -> str:
    units = getattr(engine, "units", None)
    count, what = (len(engine.buckets), "bucket") if units is None else (len(units), "unit")
    parts = f"{count} {what}{'s' * (count > 1)}{limit}"
    if units is not None:
        parts += " (a transformer block each) and the root (what belongs to no unit)"
    padding = sum(bucket.numel for bucket in engine.buckets) - sum(p.numel() for b in engine.buckets for p in b.params)
    shard = sum(bucket.shard_numel for bucket in engine.buckets)
    own = f"This rank owns {shard:,} elements. In all {padding} are padding: zeros that make the shards equal."
    return f"{parts}, each cut into {engine.world_size} equal shards, one per rank.\n{own}"


def _owners(engine, everything: bool) -> str:
    """Which ranks own which parameter, for the layout that is really used."""
    lines = []
    for bucket in engine.buckets:
        for name, offset, param in zip(bucket.names, bucket.offsets, bucket.params):
            first = offset // bucket.shard_numel
            last = (offset + max(param.numel(), 1) - 1) // bucket.shard_numel
            owners = f"rank {first}" if first == last else f"ranks {first} to {last}"
            lines.append(f"  {name:<28} {str(tuple(param.shape)):<14} {owners}")
    if not everything and len(lines) > 8:
        lines = lines[:6] + [f"  ... {len(lines) - 6} more (--map prints all)"]
    return "\n".join(lines)
