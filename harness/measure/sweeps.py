"""Sweeps over what an engine lets one choose: bucket size, units, prefetch, recomputation, and the price of each.

Every sweep has all its variants alive and gives each one step in turn; peaks and collectives are taken before, with one
variant alive at a time.

Run it: ./launch.sh sweeps 2 --preset tiny
"""

import argparse
import gc
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from harness.measure import tables
from harness.measure.ledger import MemoryLedger, warm_up
from harness.measure.traffic import TrafficLedger
from harness.measure.turns import take_turns
from harness.run import options as common
from harness.run import process_group
from harness.run.data import Batches, load_text
from harness.run.engines import ENGINES, named
from harness.run.model import GPT, next_token_loss, preset
from harness.run.process_group import Rank
from harness.run.recompute import checkpoint_blocks


def every_layer(model: GPT) -> list[nn.Module]:
    """Every module that has parameters of its own and shares none: Linear and LayerNorm layers inside the blocks."""
    return [module for block in model.blocks for module in block.children()]


def pairs_of_blocks(model: GPT) -> list[nn.Module]:
    """The blocks two by two, as modules that the model then runs."""
    blocks = list(model.blocks)
    model.blocks = nn.ModuleList(nn.Sequential(*blocks[start : start + 2]) for start in range(0, len(blocks), 2))
    return list(model.blocks)


def _buckets(name: str) -> dict[str, tuple]:
    sizes = {"one parameter": 0, "0.25 MiB": 0.25, "1 MiB": 1, "4 MiB": 4, "25 MiB": 25}
    return {label: (name, None, {"bucket_mb": size}) for label, size in sizes.items()}


# sweep: {label: (engine, what to do to the model, options)}; an option may be a function of the model.
SWEEPS = {
    **{f"bucket size, {name}": _buckets(name) for name in named("sweeps")},
    "units": {
        "layers": ("zero3", None, {"units": every_layer}),
        "blocks": ("zero3", None, {}),
        "pairs of blocks": ("zero3", None, {"units": pairs_of_blocks}),
        "the whole model": ("zero3", None, {"units": lambda model: [model]}),
    },
    "prefetch": {f"{ahead} ahead": ("zero3", None, {"prefetch": ahead}) for ahead in (0, 1, 2, 4)},
    "activations": {
        "activations kept": ("zero3", None, {}),
        "recomputed": ("zero3", partial(checkpoint_blocks, casts=False), {}),
    },
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.Parser(prog="sweeps", description=__doc__.splitlines()[0])
    common.add(parser, "preset", "seq", "backend", "device", "json")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of each sweep (default 15)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step (default 4)")
    parser.add_argument("--only", default="", help=f"sweeps with this in their name: {'; '.join(SWEEPS)}")
    options = parser.parse_args(argv)
    common.settle(options, rounds=1, batch=1, seq=1)
    if not any(options.only in name for name in SWEEPS):
        raise ValueError(f"--only {options.only!r} is in none of: {'; '.join(SWEEPS)}")
    return options


def build(variant: tuple, options: argparse.Namespace, me: Rank):
    name, change, own = variant
    model = GPT(preset(options.preset)).to(me.device)
    if change is not None:
        change(model)
    own = {key: value(model) if callable(value) else value for key, value in own.items()}
    adamw = partial(torch.optim.AdamW, lr=1e-3, fused=me.device.type != "cpu")
    return ENGINES[name].build(model, adamw, me.device, **own)


def peak_of(step: Callable[[], object], memory: MemoryLedger, before: int, on_gpu: bool) -> int:
    """The most that is alive at once in `step`; on CUDA by the allocator, which had given out `before`."""
    memory.reset_peak()
    if on_gpu:
        torch.accelerator.reset_peak_memory_stats()
    step()
    return torch.accelerator.max_memory_allocated() - before if on_gpu else memory.peak


def measure(sweep: str, batch, options: argparse.Namespace, me: Rank) -> dict[str, dict]:
    """{label: {"step_ms", "peak_bytes", "short_peak_bytes", "collectives", ...}}, maxima over the ranks.

    The short peak is that of a step on 8 tokens: what is left of the peak when there are hardly any activations.
    `ratio` is the median over the rounds of a step's time over the first variant's in the same round.
    """
    short_batch = [tensor[:1, :8] for tensor in batch]
    on_gpu, rows = me.device.type != "cpu", {}
    if on_gpu:
        warm_up(me.device)
    for label, variant in SWEEPS[sweep].items():
        before = torch.accelerator.memory_allocated() if on_gpu else 0
        with MemoryLedger() as memory:
            engine = build(variant, options, me)
            step = partial(engine.training_step, *batch, next_token_loss)
            step()
            step()
            with TrafficLedger() as traffic:
                peak = peak_of(step, memory, before, on_gpu)
            short = peak_of(partial(engine.training_step, *short_batch, next_token_loss), memory, before, on_gpu)
        peak, short = process_group.largest([peak, short], me)
        rows[label] = {
            "peak_bytes": int(peak),
            "short_peak_bytes": int(short),
            "collectives": len(traffic.collectives),
            "all_gathers": sum(collective.kind == "all-gather" for collective in traffic.collectives),
            "sent_bytes": traffic.sent_bytes,
        }
        del engine, step
        gc.collect()
    engines = {label: build(variant, options, me) for label, variant in SWEEPS[sweep].items()}
    steps = {label: partial(engine.training_step, *batch, next_token_loss) for label, engine in engines.items()}
    times = take_turns(steps, options.rounds, me)
    first = next(iter(times.values()))
    for label, seconds in times.items():
        rows[label]["ratio"] = round(statistics.median(a / b for a, b in zip(seconds, first)), 4)
        for name, of in (("step_ms", statistics.median), ("step_ms_lowest", min), ("step_ms_highest", max)):
            rows[label][name] = round(of(seconds) * 1000, 3)
    del engines, steps
    gc.collect()
    return rows


def table(sweep: str, rows: dict[str, dict]) -> str:
    columns = {
        sweep: lambda label, row: label,
        "step ms": lambda label, row: f"{row['step_ms']:.1f}",
        "lowest": lambda label, row: f"{row['step_ms_lowest']:.1f}",
        "highest": lambda label, row: f"{row['step_ms_highest']:.1f}",
        "relative": lambda label, row: f"{row['ratio']:.3f}",
        "peak MB": lambda label, row: f"{row['peak_bytes'] / 1e6:.2f}",
        "8 tokens MB": lambda label, row: f"{row['short_peak_bytes'] / 1e6:.2f}",
        "collectives": lambda label, row: f"{row['collectives']}",
        "all-gathers": lambda label, row: f"{row['all_gathers']}",
    }
    return "\n".join(tables.text(tables.rows_of(columns, rows), rule=False))


def main() -> None:
    options = arguments()
    text = load_text(None, preset(options.preset).seq)
    me = process_group.start(options.backend, options.device)
    batch = Batches(text, options.batch, options.seq, 0, me.device)(0, me.rank)
    me.print(f"{__doc__.splitlines()[0]}\n{me.world_size} rank(s), {me.backend}, {me.device.type}: {me.why}")
    me.print(f"GPT {options.preset}, {options.batch} sequence(s) of {options.seq} tokens per rank; AdamW, float32")
    me.print(f"step ms      time of a step on the slowest rank, median over {options.rounds} rounds; lowest, highest")
    me.print("relative     time relative to the first row, median over rounds")
    me.print("peak MB      the most that was alive at once in a step, in 10^6 bytes")
    me.print("8 tokens MB  the same of a step on 8 tokens, where activations are next to nothing\n")
    sweeps = {}
    for sweep in SWEEPS:
        if options.only in sweep:
            sweeps[sweep] = measure(sweep, batch, options, me)
            me.print(table(sweep, sweeps[sweep]) + "\n")
    if options.json and me.rank == 0:
        results = {"hardware": process_group.hardware(me.device), "torch": torch.__version__}
        results |= {"backend": me.backend, "ranks": me.world_size}
        results |= {name: getattr(options, name) for name in ("preset", "batch", "seq")}
        results |= {"command": common.command("sweeps", me.world_size), "sweeps": sweeps}
        common.write_json(options.json, results)
        me.print(f"written: {options.json}")
    process_group.stop()


if __name__ == "__main__":
    process_group.run(main)
