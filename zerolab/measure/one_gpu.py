"""Measurements for one GPU that no other command makes, for `./launch.sh report`.

    python -m zerolab.measure.one_gpu memory FOLDER --presets 1b 7b     one rank of eight, by real allocations
    torchrun --nproc-per-node 1 -m zerolab.measure.one_gpu host FOLDER  a step of many small parameters

Each makes several measurements in one process, because starting a process takes longer than most of them. The JSON in
FOLDER is written after each measurement, so a process that is killed loses one.
"""

import argparse
import gc
import sys
from functools import partial
from pathlib import Path

from zerolab.engine import accelerator
from zerolab.measure import bench, memory, tables
from zerolab.run import engines, json_file, process_group

RANKS = 8  # as in the articles' table
COMMAND = " ".join(["python -m zerolab.measure.one_gpu", *sys.argv[1:]])
TITLES = ["engine", "allocator's peak", "dry run's peak, predicted", "held", "held, by the article's formula"]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m zerolab.measure.one_gpu",
        description="Makes the measurements on one GPU that only ./launch.sh report needs.",
    )
    parser.add_argument(
        "what",
        choices=("memory", "host"),
        help="memory: the peaks of one rank of eight, with real allocations; "
        "host: the time that Python needs for a step",
    )
    parser.add_argument("folder", type=Path, help="the folder for the JSON files")
    parser.add_argument(
        "--presets", nargs="+", default=["1b", "7b"], help="for memory, the sizes of the GPT (default 1b 7b)"
    )
    # Short, so that ZeRO-1 with 7e9 parameters fits on a card of 80 GB: activations are no stage's doing.
    parser.add_argument("--seq", default="512", help="for memory, the tokens per sequence (default 512)")
    parser.add_argument("--rounds", default="10", help="for host, the steps of each engine (default 10)")
    return parser.parse_args(argv)


def of_memory(preset: str, seq: str, *more: str) -> argparse.Namespace:
    """The options of `./launch.sh memory` for one table: float32, one sequence."""
    return memory.arguments([str(RANKS), "--preset", preset, "--seq", seq, *more])


def memory_table(results: dict) -> str:
    """Every engine in a line. An engine that does not fit has a prediction and nothing measured."""
    unit, size = tables.unit(4 * results["parameters"])
    rows = [TITLES]
    for name, row in results["engines"].items():
        predicted = f"{row['dry_run_peak_bytes'] / size:.2f}"
        if "out_of_memory" in row:
            rows.append([name, "OUT OF MEMORY", predicted, "-", "-"])
            continue
        measured = (row["peak_bytes"], sum(row["held_bytes"].values()), row["formula_bytes"])
        peak, held, formula = (f"{nbytes / size:.2f}" for nbytes in measured)
        rows.append([name, peak, predicted, held, formula])
    about = f"GPT {results['preset']}, {results['parameters']:,} parameters, rank 0 of {results['ranks']}, {unit}:"
    return "\n".join([about, "", *tables.text(rows, rule=False)])


def measure_memory(options: argparse.Namespace) -> None:
    for preset in options.presets:
        file = options.folder / f"memory-{preset}.json"
        asked = of_memory(preset, options.seq, "--device", accelerator.kind())
        keep = partial(json_file.write, file, indent=None, whole=False)
        results = memory.measure_all(asked, keep) | {"command": COMMAND}
        print(memory_table(results) + "\n", flush=True)
        json_file.write(file, results, indent=None)


def measure_host(options: argparse.Namespace) -> None:
    gc.collect()
    gc.disable()  # it would come in one engine's step, and not in another's
    world = process_group.start()
    rows = bench.host_times(bench.arguments(["--host", "zero3", "--rounds", options.rounds]), world, engines.build)
    world.print(f"A step of 408 parameters in 34 units, {world.world_size} rank(s) over {world.backend}:\n")
    world.print(bench.table_of_steps("engine", rows))
    process_group.stop()
    if world.rank == 0:
        about = json_file.about(world.device) | {
            "command": COMMAND,
            "backend": world.backend,
            "ranks": world.world_size,
        }
        json_file.write(options.folder / "host.json", about | {"host": rows})


def main() -> None:
    options = arguments()
    if options.what == "memory":
        measure_memory(options)
    else:
        measure_host(options)


if __name__ == "__main__":
    process_group.run(main)
