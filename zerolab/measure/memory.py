"""Rank 0 of N without the other ranks: what one rank holds, sends and needs at the worst moment of a training step.

The real engines run on a process group that moves nothing ("fake"), with fake tensors, which have shapes, dtypes and
storages but no memory, or with real tensors on a GPU. Measured numbers come from ledgers that watch the second step.
Formulas are printed next to them. Ψ is the number of parameters, as in the ZeRO paper.

Run it: ./launch.sh memory 8 --preset 7b
"""

import argparse

import torch

from zerolab.measure import memory_options, tables
from zerolab.measure.dry_run import row_of
from zerolab.measure.fake_ranks import fake_ranks
from zerolab.measure.gpus import CONTEXT_BYTES, GAPS, fits_on, needed_bytes
from zerolab.measure.ledger import PARTS
from zerolab.run import engines as registry
from zerolab.run import json_file, micro_batches, process_group
from zerolab.run.model import number_of_parameters, preset
from zerolab.run.progress import with_progress

CONDITIONS = ("ranks", "preset", "dtype", "batch", "accumulate", "seq", "checkpoint_activations", "device")
ARTICLE = '"AI in Multiple GPUs: ZeRO & FSDP"'
SHORT = {"gathered units": "gathered", "gradients in flight": "in flight", "batch and buffers": "batch"}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    options = memory_options.arguments(argv)
    if options.device != "fake" and not process_group.count_gpus():
        raise ValueError(f"--device {options.device}, but torch sees no GPU here: use --device fake")
    options.engines = registry.chosen(options.engines, "memory")
    return options


def measure_alone(name: str, options: argparse.Namespace) -> dict:
    """One engine's row, in a process without a process group."""
    with fake_ranks(options.ranks):
        return row_of(name, options)


def measure_all(options: argparse.Namespace) -> dict:
    """The JSON of `./launch.sh memory` for the engines of `options`."""
    engines = {}
    results = {"parameters": number_of_parameters(preset(options.preset))}
    results |= {name: getattr(options, name) for name in CONDITIONS}
    device = torch.device("cpu" if options.device == "fake" else options.device)
    results |= json_file.about(device, "memory") | {"engines": engines}
    with fake_ranks(options.ranks):
        for name in with_progress(options.engines, f"engines on {options.ranks} ranks"):
            engines[name] = row_of(name, options)
    return results


def print_wrapped(text: str) -> None:
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
        print_wrapped(
            f"  {options.ranks:>5} rank{'s' if options.ranks > 1 else ' '}, peak in {unit}: " + ", ".join(peaks)
        )
    return {**results, "ranks": numbers, "engines": engines}


# The tables. GB are 10^9 bytes, MB 10^6.


def all_tables(results: dict) -> str:
    """All tables of a run with one number of ranks."""
    parameters = results["parameters"]
    unit, size = tables.unit(4 * parameters)
    engines = {}
    for name, row in results["engines"].items():
        engines[name + (" (stand-in)" if row.get("stand_in") else "")] = row
    ran = {name: row for name, row in engines.items() if "out_of_memory" not in row}
    lines = [f"GPT {results['preset']}: Ψ = {parameters:,} parameters, {4 * parameters / size:.3f} {unit} in float32"]
    lines += ["", *gpu_lines(engines)]
    held = f"Held by one rank right before the update, {unit}"
    lines += ["", f"{held}, and {formula_name(results)}:", *held_table(ran, size)]
    lines += ["", f"At the worst moment of the step, {unit}:", *peak_table(ran, size)]
    lines += state_table(ran, unit, size)
    share = f"Ψ times (N-1)/N = {results['ranks'] - 1}/{results['ranks']}"
    lines += ["", f"Sent by one rank in the step, {unit} (elements: {share}):"]
    lines += sent_table(ran, parameters * (results["ranks"] - 1) / results["ranks"], size)
    lines += ["", registry.who_trained(results["engines"], dtype=registry.DTYPES[results["dtype"]])]
    return "\n".join(lines)


def formula_name(results: dict) -> str:
    """The source of the column "formula": an article's bytes per parameter, or our own count."""
    own = "our count: bfloat16 weights, float32 weights to update, float32 gradients"
    return f"the formula of {ARTICLE}" if results["dtype"] == "fp32" else own


def held_table(engines: dict[str, dict], size: float) -> list[str]:
    """Held bytes, and how they differ from the formula. The keys of `engines` are the labels."""
    rows = [["engine", "parameters", "gradients", "optimizer", "together", "formula", "difference, bytes"]]
    for name, row in engines.items():
        held = row["held_bytes"].values()
        rest = row["difference_bytes"] - row["step_counters_bytes"]
        difference = f"{row['difference_bytes']:+,} = {row['step_counters_bytes'] // 4:,} step counters of 4 bytes"
        difference += f" {rest:+,} padding" if rest else ""
        numbers = [f"{nbytes / size:.3f}" for nbytes in (*held, sum(held), row["formula_bytes"])]
        rows.append([name, *numbers, difference])
    return tables.text(rows, rule=False)


def peak_table(engines: dict[str, dict], size: float) -> list[str]:
    """The peak, where it is, and its parts. On a GPU the peak is the allocator's, and the parts are live storages."""
    rows = [["engine", "peak", "step", "module", *(SHORT.get(part, part) for part in PARTS)]]
    more = []
    for name, row in engines.items():
        where = row["peak_where"]
        parts = [f"{row['peak_parts'].get(part, 0) / size:.3f}" for part in PARTS]
        rows.append([name, f"{row['peak_bytes'] / size:.3f}", where["step"], where["module"] or "-", *parts])
        if "ledger_peak_bytes" in row:
            off = row["peak_bytes"] / row["ledger_peak_bytes"] - 1
            more.append(
                f"  {name}: the allocator's peak is {off:+.2%} from the live storages, which the parts add up to"
            )
    return [*tables.text(rows, left=(0, 2, 3), rule=False), *more]


def state_table(engines: dict[str, dict], unit: str, size: float) -> list[str]:
    """The stages' peaks without activations and temporaries, and their formulas, for fp32 and one backward a step."""
    rows = [["engine", "peak", "formula", "off by", "which is, in bytes"]]
    for name, row in engines.items():
        if row["state_peak_formula"]:
            measured, formula = row["state_peak_bytes"], row["state_peak_formula_bytes"]
            off = f"{measured / formula - 1:+.3%}"
            rows.append([name, f"{measured / size:.3f}", f"{formula / size:.3f}", off, row["state_peak_formula"]])
    if len(rows) == 1:
        return []
    return [
        "",
        f"Without activations and temporaries, {unit}, and the formula of each stage:",
        *tables.text(rows, left=(0, 4), rule=False),
        "  Elements: Ψ all parameters, G the largest gradient, U the largest unit, R the root (all other parameters);",
        "  A, B, T of buckets (`Letters` in zerolab/measure/memory_formulas.py says which). p: units gathered ahead.",
    ]


def sent_table(engines: dict[str, dict], share: float, size: float) -> list[str]:
    """Traffic. `share` is Ψ (N-1)/N, in elements."""
    rows = [["engine", "sent", "elements", "collectives"]]
    for name, row in engines.items():
        times = f"{row['sent_elements'] / share:.3f} Ψ" if share else "-"
        count = sum(one["count"] for one in row["sent"].values())
        rows.append([name, f"{row['sent_bytes'] / size:.3f}", times, f"{count}"])
    return tables.text(rows, rule=False)


def gpu_lines(engines: dict[str, dict]) -> list[str]:
    """Which GPUs have room for each engine, by the planner's rule."""
    lines = [
        "Which GPUs have room for it (GB of 10^9 bytes). Needed are the peak, "
        f"{GAPS:.0%} more for the allocator's gaps, and {CONTEXT_BYTES / 1e9:.0f} GB for CUDA and NCCL, as in "
        "./launch.sh plan. While there is room, the allocator may reserve more."
    ]
    for name, row in engines.items():
        if "out_of_memory" in row:
            lines.append(f"  {name}: OUT OF MEMORY here. {row['out_of_memory']}.")
            continue
        fits = fits_on(row["peak_bytes"])
        answer = f"from {fits[0]} GB on" if fits else "on none of them"
        lines.append(f"  {name}: {answer}, {needed_bytes(row['peak_bytes']) / 1e9:.1f} GB are needed")
    return lines


def main() -> None:
    options = arguments()
    what = "fake tensors, which use no memory" if options.device == "fake" else "real allocations on the GPU"
    batch = f"{options.batch} sequence(s) of {options.seq} tokens per rank{micro_batches.in_words(options)}"
    extra = ", activations checkpointed" if options.checkpoint_activations else ""
    ranks = f"1 to {options.up_to}" if options.up_to else options.ranks
    print_wrapped(__doc__.splitlines()[0])
    print_wrapped(f"Rank 0 of {ranks} on {what}; {options.dtype}, AdamW, {batch}{extra}; the second step.")
    if options.up_to:
        results = measure_up_to(options)
    else:
        results = measure_all(options)
        print_wrapped("\n" + all_tables(results))
    json_file.write(options.json, results, indent=None)


if __name__ == "__main__":
    process_group.run(main)
