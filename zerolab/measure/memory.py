"""Rank 0 of N without the other ranks: what one rank holds, sends and needs at the worst moment of a training step.

The real engines run on a process group that moves nothing ("fake"), with fake tensors, which have shapes, dtypes and
storages but no memory, or with real ones on a GPU. What is printed as measured comes from the ledgers that
watched the second step; formulas stand beside it. In them Ψ is the number of parameters, as in the ZeRO paper.

Run it: ./launch.sh memory 8 --preset 7b
"""

import argparse
import contextlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from zerolab.engine import accelerator
from zerolab.measure import tables
from zerolab.measure.dry_run import row_of
from zerolab.measure.fake_ranks import fake_ranks
from zerolab.measure.memory_tables import all_tables
from zerolab.run import commands, json_file, micro_batches, process_group
from zerolab.run import engines as registry
from zerolab.run.model import number_of_parameters, preset
from zerolab.run.progress import with_progress
from zerolab.run.starter import end_with_starter

CONDITIONS = ("ranks", "preset", "dtype", "batch", "accumulate", "seq", "checkpoint_activations", "device")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    options = commands.memory(argv)
    there = accelerator.kind() if accelerator.count() else "cuda"
    if options.device not in ("fake", there):
        raise ValueError(f"--device must be fake or {there}, got {options.device!r}")
    if options.device != "fake" and not accelerator.count():
        raise ValueError(f"--device {there}, but torch sees no GPU here: use --device fake")
    options.engines = registry.chosen(options.engines, "memory", registry.named("memory"))
    return options


def measure_alone(name: str, options: argparse.Namespace) -> dict:
    """One engine's row, where there is no process group yet."""
    with fake_ranks(options.ranks):
        return row_of(name, options)


def measure_all(options: argparse.Namespace, keep=lambda results: None) -> dict:
    """Every engine of `options`, one after the other: the JSON of `./launch.sh memory`. `keep` gets it after each."""
    engines = {}
    results = {"parameters": number_of_parameters(preset(options.preset))}
    results |= {name: getattr(options, name) for name in CONDITIONS}
    device = torch.device("cpu" if options.device == "fake" else options.device)
    results |= json_file.about(device, "memory") | {"engines": engines}
    with fake_ranks(options.ranks), predicted_peaks(options) as predicted:
        for name in with_progress(options.engines, f"engines on {options.ranks} ranks"):
            engines[name] = row_of(name, options)
            if options.device != "fake":
                engines[name]["dry_run_peak_bytes"] = predicted[name].result()
            keep(results)
    return results


@contextlib.contextmanager
def predicted_peaks(options: argparse.Namespace):
    """Beside a GPU's rows, what fake tensors say: {engine: Future}. Other processes find it while the GPU works."""
    if options.device == "fake":
        yield {}
        return
    workers = max(1, min(len(options.engines), os.cpu_count() // 2))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, begin_without_gpu, (os.getpid(),)) as pool:
        yield {name: pool.submit(predicted_peak, name, options) for name in options.engines}


def begin_without_gpu(starter: int) -> None:
    """First of all in a process that predicts: it takes no memory of the GPU, as an optimizer's step would."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    end_with_starter(starter)


def predicted_peak(name: str, options: argparse.Namespace) -> int:
    """One engine's peak by the dry run, in a process that has no process group yet."""
    return measure_alone(name, argparse.Namespace(**vars(options) | {"device": "fake"}))["peak_bytes"]


def say(text: str) -> None:
    print(tables.wrapped(text), flush=True)


def measure_up_to(options: argparse.Namespace) -> dict:
    """Every engine at N = 1, 2, 4, ... ranks: {..., "ranks": [N, ...], "engines": {name: [row, ...]}}."""
    unit, size = tables.unit(4 * number_of_parameters(preset(options.preset)))
    numbers = [2**power for power in range(options.up_to.bit_length())]
    engines = {name: [] for name in options.engines}
    for options.ranks in numbers:
        peaks = []
        results = measure_all(options)
        for name, row in results["engines"].items():
            row.pop("curve", None)
            engines[name].append(row)
            no_memory = "out_of_memory" in row
            peaks.append(f"{name} {'OUT OF MEMORY' if no_memory else format(row['peak_bytes'] / size, '.2f')}")
        say(f"  {options.ranks:>5} rank{'s' if options.ranks > 1 else ' '}, peak in {unit}: " + ", ".join(peaks))
    return {**results, "ranks": numbers, "engines": engines}


def main() -> None:
    options = arguments()
    what = "fake tensors, which take no memory" if options.device == "fake" else "real allocations on the GPU"
    batch = f"{options.batch} sequence(s) of {options.seq} tokens per rank{micro_batches.words(options)}"
    extra = ", activations checkpointed" if options.checkpoint_activations else ""
    ranks = f"1 to {options.up_to}" if options.up_to else options.ranks
    say(__doc__.splitlines()[0])
    say(f"Rank 0 of {ranks} on {what}; {options.dtype}, AdamW, {batch}{extra}; the second step.")
    if options.up_to:
        results = measure_up_to(options)
    else:
        results = measure_all(options, partial(json_file.write, options.json, indent=None, whole=False))
        say("\n" + all_tables(results))
    json_file.write(options.json, results, indent=None)


if __name__ == "__main__":
    process_group.run(main)
