"""`./launch.sh bench`: what options cost. Engines with different values of an option take turns in one run.

    ./launch.sh bench 2                     sweeps of bucket size, units, prefetch, recomputation
    ./launch.sh bench 2 --sweeps units      only the sweep of units
    ./launch.sh bench --host                the host's time, with many small parameters

All numbers are measured in this run. Peaks and collectives are measured first, with one engine alive at a time.
"""

import argparse
import gc
import statistics
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from zerolab.measure import bench_options, fake_ranks, tables
from zerolab.measure.interleaved import take_turns
from zerolab.measure.ledger import MemoryLedger
from zerolab.measure.sweeps import SWEEPS, prepare
from zerolab.measure.watched_step import allocator_of, watched_step
from zerolab.run import engines, json_file, process_group
from zerolab.run.data import Batches, load_text
from zerolab.run.model import GPT, GPTConfig, next_token_loss, number_of_parameters, preset
from zerolab.run.names import CHAPTERS, engines_of
from zerolab.run.process_group import World
from zerolab.run.progress import with_progress

MEANINGS = """
step ms      time of a step on the slowest rank, median over the rounds; lowest, highest
relative     time relative to the first row, median over the rounds
peak MB      the most that was alive at once in a step, in 10^6 bytes
8 tokens MB  the peak of a step on 8 tokens, which has hardly any activations
"""


def build_variant(variant: dict, config: GPTConfig, world: World):
    model = GPT(config).to(world.device)
    options = prepare(variant, model)  # it may change the model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=world.device.type != "cpu")
    return engines.ENGINES[variant["name"]].build(model, optimizer, world.device, **options)


def peaks_and_collectives(variant: dict, batch, config: GPTConfig, world: World) -> dict[str, int]:
    """Peaks, as the maximum over the ranks, and collectives of a step.

    The short peak is measured in a step on 8 tokens, which has hardly any activations.
    """
    allocator = allocator_of(world.device)
    with MemoryLedger() as memory:
        engine = build_variant(variant, config, world)
        step = partial(engine.training_step, *batch, next_token_loss)
        step()
        step()
        with watched_step(engine, memory, allocator) as seen:
            step()
        with watched_step(engine, memory, allocator) as short:
            engine.training_step(*(tensor[:1, :8] for tensor in batch), next_token_loss)
    peak, short_peak = process_group.largest([seen.peak, short.peak], world)
    return {
        "peak_bytes": int(peak),
        "short_peak_bytes": int(short_peak),
        "collectives": len(seen.collectives),
        "sent_bytes": seen.sent_bytes,
    }


def rows_of_times(times: dict[str, list[float]]) -> dict[str, dict]:
    """{label: step times in ms}. `ratio` is the median of the time divided by the first label's time."""
    rows, first = {}, next(iter(times.values()))
    for label, seconds in times.items():
        row = rows[label] = {"ratio": round(statistics.median(a / b for a, b in zip(seconds, first)), 4)}
        for name, of in (("step_ms", statistics.median), ("step_ms_lowest", min), ("step_ms_highest", max)):
            row[name] = round(of(seconds) * 1000, 3)
    return rows


def measure_together(variants: dict[str, dict], batch, options: argparse.Namespace, world: World) -> dict[str, dict]:
    """{label: what was measured}, as the maximum over the ranks. A collective."""
    config, found = preset(options.preset), {}
    for label in with_progress(variants, "peaks and collectives", world.rank == 0):
        found[label] = peaks_and_collectives(variants[label], batch, config, world)
        gc.collect()
    alive = {label: build_variant(variant, config, world) for label, variant in variants.items()}
    steps = {label: partial(engine.training_step, *batch, next_token_loss) for label, engine in alive.items()}
    times = rows_of_times(take_turns(steps, options.rounds, world))
    del alive, steps
    gc.collect()
    return {label: found[label] | times[label] for label in variants}


def many_small_parameters() -> nn.Module:
    """34 units of 6 tiny linear layers: 408 tensors, whose kernels need hardly any time."""
    blocks = []
    for _ in range(34):
        blocks.append(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))))
    return nn.Sequential(*blocks)


def host_times(options: argparse.Namespace) -> dict[str, dict]:
    """{engine: time per step with many small parameters}, which is the host's time, of rank 0 of 8.

    The process group moves nothing.
    """
    world = World(0, 8, torch.device("cpu"), "fake", "")
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    variants, steps = [("plain", "single", {})], {}
    for name in engines_of("memory"):  # these run on one process
        variants.append((name, name, {}))
        if name in CHAPTERS:
            variants.append((f"{name} engine", name, {"engine": True}))
    with fake_ranks.fake_ranks(world.world_size):
        for label, name, more in variants:
            model = many_small_parameters()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
            engine = fake_ranks.build_alone(name, model, optimizer, world.device, **more)
            steps[label] = partial(engine.training_step, x, y, F.mse_loss)
        times = take_turns(steps, options.rounds, world)
        del engine, steps
        gc.collect()  # DDP's reducer, before its group
    return rows_of_times(times)


def cells_of_steps(title: str, label: str, row: dict) -> dict[str, str]:
    """A row of a table, {title: cell}. The host's table has only times."""
    found = {
        title: label,
        "step ms": f"{row['step_ms']:.1f}",
        "lowest": f"{row['step_ms_lowest']:.1f}",
        "highest": f"{row['step_ms_highest']:.1f}",
        "relative": f"{row['ratio']:.3f}",
    }
    if "peak_bytes" in row:
        found["peak MB"] = f"{row['peak_bytes'] / 1e6:.2f}"
        found["8 tokens MB"] = f"{row['short_peak_bytes'] / 1e6:.2f}"
        found["collectives"] = f"{row['collectives']}"
    return found


def table_of_steps(title: str, rows: dict[str, dict]) -> str:
    """The table of what was measured, a line for each label."""
    lines = [cells_of_steps(title, label, row) for label, row in rows.items()]
    return "\n".join(tables.text(tables.rows_of(lines), rule=False))


def on_ranks(options: argparse.Namespace) -> None:
    """Measure, print and write the tables. A collective."""
    config = preset(options.preset)
    text = load_text(None, config.seq)
    world = process_group.start(options.backend, options.device)
    batch = Batches(text, options.batch, options.seq, 0, world.device)(0, world.rank)
    about = [__doc__.splitlines()[0], f"{world.world_size} rank(s), {world.backend}, {world.device.type}: {world.why}"]
    shape = f"GPT of {number_of_parameters(config):,} parameters"
    about.append(f"{shape}, {options.batch} sequence(s) of {options.seq} tokens per rank; AdamW, float32")
    world.print(tables.wrapped("\n".join([*about, MEANINGS])))
    found = {}
    results = {
        "backend": world.backend,
        "ranks": world.world_size,
        "preset": options.preset,
        "batch": options.batch,
        "seq": options.seq,
        "sweeps": found,
    }
    results |= json_file.about(world.device, "bench", world.world_size)
    file = options.json if world.rank == 0 else None
    for title in (name for name in SWEEPS if options.sweeps in name):
        found[title] = measure_together(SWEEPS[title], batch, options, world)
        world.print(table_of_steps(title, found[title]) + "\n")
        json_file.write(file, results, whole=False)
    process_group.stop()
    json_file.write(file, results)


def main(argv=None) -> None:
    options = bench_options.arguments(argv)
    gc.collect()
    gc.disable()  # a collection would fall into one engine's step and not into another's
    if options.host:
        rows = host_times(options)
        print("host time per step, rank 0 of 8 on the fake group, 408 parameters in 34 units:\n")
        print(table_of_steps("engine", rows))
        json_file.write(options.json, json_file.about(torch.device("cpu"), "bench") | {"host": rows})
    else:
        on_ranks(options)


if __name__ == "__main__":
    process_group.run(main)
