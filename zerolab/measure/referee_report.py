"""The output of the referee: the headline, the verdict, and the tables of its results."""

import argparse
import os

import torch

from zerolab.measure import proof, step_time, tables
from zerolab.run import json_file, micro_batches
from zerolab.run.engines import DTYPES, who_trained
from zerolab.run.model import number_of_parameters, preset
from zerolab.run.process_group import World

CONDITIONS = ("preset", "batch", "accumulate", "checkpoint_activations", "slow_rank", "seq", "steps", "timed_steps",
              "dtype")  # fmt: skip
PRECISION = {"fp32": "float32", "bf16": "bfloat16"}


def conditions(options: argparse.Namespace, world: World) -> dict:
    """The settings and the machine of the comparison, for the JSON."""
    return {
        "device": world.device.type,
        "backend": world.backend,
        "world_size": world.world_size,
        "parameters": number_of_parameters(preset(options.preset)),
        # Whether float32 products on a GPU may use TF32, which keeps 10 of 23 bits of each factor.
        "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32" if world.device.type == "cuda" else None,
        **json_file.about(world.device, "compare", os.environ["LOCAL_WORLD_SIZE"]),
    } | {name: getattr(options, name) for name in CONDITIONS}


def headline(about: dict, options: argparse.Namespace, world: World) -> str:
    """What is compared, and where, in one or two lines."""
    recomputed = ", activations recomputed" if options.checkpoint_activations else ""
    precision = "float32" if options.dtype == "fp32" else "bfloat16 with float32 reduction and master weights"
    tf32 = "" if about["tf32"] is None else f", TF32 {'on' if about['tf32'] else 'off'}"
    return (
        f"{world.world_size} rank(s), {world.backend}, {world.device.type}: {world.why}\n"
        f"GPT {options.preset}: {about['parameters']:,} parameters; {options.batch} x {options.seq} tokens per rank "
        f"and step{micro_batches.in_words(options)}{recomputed}, {options.steps} steps, AdamW, "
        f"{precision}{tf32}"
    )


# The verdict.


def verdict(result: dict, reference: str) -> str:
    """Whether the engines train correctly, and then, for each pass, what it compared and what it found."""
    runs = result["runs"]
    lines = []
    for name, run in runs.items():
        if not run["match"]:
            lines.append(f"DOES NOT MATCH: {name} {what_is_off(run, reference, result['dtype'])}.")
    if not lines:
        lines.append(f"MATCH: all {len(runs)} engines train alike." if len(runs) > 1 else "MATCH: there is one engine.")
    return "\n".join([*lines, *float64_pass(runs), *training_pass(result, reference)])


def what_is_off(run: dict, reference: str, dtype: str) -> str:
    """Behind "DOES NOT MATCH: zero1"."""
    if not within_tolerance(run):
        return (
            f"does not compute what one process computes: its losses in float64 are off by "
            f"{run['float64_difference']:.2g}, allowed {proof.TOLERANCE:g}"
        )
    off, allowed = run["difference"], run["tolerance"]
    return f"is off by {off:.3g} from {reference} in {PRECISION[dtype]}, allowed {allowed:g}"


def within_tolerance(run: dict) -> bool:
    """Whether the float64 pass found nothing. False for NaN, which compares false with everything."""
    return run["float64_difference"] is None or run["float64_difference"] <= proof.TOLERANCE


def float64_pass(runs: dict) -> list[str]:
    """What the first pass compared, and which engines it has proved, which it has missed, and which it cannot ask."""
    asked = [name for name, run in runs.items() if run["float64_difference"] is not None]
    passed = [name for name in asked if within_tolerance(runs[name])]
    proved = [name for name in passed if runs[name]["match"]]
    lines = []
    if proved:
        largest = max(runs[name]["float64_difference"] for name in proved)
        lines.append(
            f"Float64 pass: {proof.STEPS} steps of SGD with momentum and weight decay on a small model. These compute "
            f"what one process computes on the whole batch: {', '.join(proved)}. Their losses differ by at most "
            f"{largest:.1g} ({proof.TOLERANCE:g} is allowed)."
        )
    if missed := [name for name in passed if not runs[name]["match"]]:
        lines.append(
            f"The float64 pass did not find what is wrong with {', '.join(missed)}: it begins after step "
            f"{proof.STEPS}, or it needs the larger model, AdamW or the lower precision."
        )
    if unproved := [name for name in runs if name not in (*asked, "single")]:
        lines.append(f"Not in the float64 pass, because they cannot train in float64: {', '.join(unproved)}.")
    return lines


def training_pass(result: dict, reference: str) -> list[str]:
    """How near the losses in float32 or bfloat16 are."""
    runs, precision = result["runs"], PRECISION[result["dtype"]]
    equal = [name for name, run in runs.items() if run["difference"] == 0 and run["match"] and name != reference]
    near = [name for name, run in runs.items() if run["difference"] > 0 and run["match"]]
    found = []
    if equal:
        found.append(f"equal to {reference} to the bit: {', '.join(equal)}")
    if near:
        largest = max(runs[name]["difference"] for name in near)
        found.append(
            f"within {largest:.1e} of {reference}, because sums are taken in a different order: {', '.join(near)}"
        )
    lines = []
    if found:
        lines.append(f"Training pass: {result['steps']} steps of AdamW in {precision}. Losses are {'; '.join(found)}.")
    if result["dtype"] == "bf16":
        lines.append(
            "Not proved: the casts to bfloat16, which the float64 pass leaves out. Losses that are equal to the bit "
            "have the same casts. A small error in the casts of the others would not be seen."
        )
    return lines


# The tables. MB are 10^6 bytes, as in the articles.


def cells_of_run(name: str, run: dict, base: dict, reference: str) -> dict[str, str]:
    """A line of the results, {title: cell}; `base` is the reference's run."""
    held, timed = run["held_bytes"], base["step_ms"] is not None
    off = run.get("float64_difference")
    found = {
        "engine": name,
        "float64": "-" if off is None else f"{off:.1e}" if off else "0",
        f"diff to {reference}": f"{run['difference']:.1e}" if run["difference"] else "0 (to the bit)",
        "peak MB": f"{run['peak_bytes'] / 1e6:.2f}",
        "sent MB": f"{run['sent_bytes'] / 1e6:.2f}",
        "step ms": f"{run['step_ms']:.1f}" if timed else "-",
        "first loss": f"{run['losses'][0]:.4f}",
        "last loss": f"{run['losses'][-1]:.4f}",
        "params MB": f"{held['parameters'] / 1e6:.2f}",
        "grads MB": f"{held['gradients'] / 1e6:.2f}",
        "optim MB": f"{held['optimizer'] / 1e6:.2f}",
        f"x {reference}": f"{run['step_ms'] / base['step_ms']:.2f}" if timed else "-",
        "tokens/s": f"{run['tokens_per_s']:.0f}" if timed else "-",
    }
    if "reserved_bytes" in run:  # on a GPU
        found["ledger MB"] = f"{run['ledger_peak_bytes'] / 1e6:.2f}"
        found["reserved MB"] = f"{run['reserved_bytes'] / 1e6:.0f}"
    return found


FIRST = 6  # columns of the first table: who trains alike, and what it costs
FLOAT64 = "Float64: the largest difference from the losses of one process, in float64. -: not asked."
PEAK = "Peak: all live storages of one step."
PEAK_ON_GPU = "Peak: the GPU allocator's. Reserved: what it has reserved. Ledger: all live storages of one step."
SENT = "Sent: logical bytes per rank and step, in collectives and in sends from rank to rank."
NOT_SEEN = "Not seen: what another Python thread of an engine sends or allocates."
HELD = """\
Params, grads, optim: what a rank holds after the gradients are reduced and before the optimizer's step. Of an engine
with several optimizers only `engine.optimizer` is counted, unless the engine has `held_tensors()`."""
NO_RESHARD = """\
fsdp2_no_reshard keeps a unit's parameters gathered only from its forward to its backward, and 1/N of them otherwise: it
is not quite ZeRO-2."""


def results(result: dict, reference: str) -> str:
    """Everything that the referee prints, from the result that it writes as JSON."""
    runs = result["runs"]
    cells = [list(cells_of_run(name, run, runs[reference], reference).items()) for name, run in runs.items()]
    first = [dict(row[:FIRST]) for row in cells]
    second = [dict(row[:1] + row[FIRST:]) for row in cells]
    lines = [verdict(result, reference), "", *tables.text(tables.rows_of(first))]
    peak = PEAK if result["device"] == "cpu" else PEAK_ON_GPU
    lines += ["", *tables.text(tables.rows_of(second)), "", FLOAT64, peak, SENT, NOT_SEEN, HELD]
    lines += [NO_RESHARD] * ("fsdp2_no_reshard" in runs)
    lines += [who_trained(runs, dtype=DTYPES[result["dtype"]])]
    if any(run.get("step_time") for run in runs.values()):
        lines += ["", step_time.table(result)]
    return "\n".join(lines)
