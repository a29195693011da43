"""The dry run's tables, from its JSON. GB are 10^9 bytes, MB 10^6."""

from zerolab.measure import tables
from zerolab.measure.gpus import CONTEXT_BYTES, GAPS, fits_on, needed_bytes
from zerolab.measure.memory_parts import PARTS
from zerolab.measure.traffic import KINDS
from zerolab.run.engines import DTYPES, who_trained

ARTICLE = '"AI in Multiple GPUs: ZeRO & FSDP"'
SHORT = {"gathered units": "gathered", "gradients in flight": "in flight", "batch and buffers": "batch"}
OTHER_PEAKS = {"ledger_peak_bytes": "live storages, whose parts these are", "dry_run_peak_bytes": "the dry run"}


def all_tables(results: dict) -> str:
    """Everything that is printed of a run with one number of ranks."""
    parameters = results["parameters"]
    unit, size = tables.unit(4 * parameters)
    engines = {}
    for name, row in results["engines"].items():
        engines[name + (" (stand-in)" if row.get("stand_in") else "")] = row
    ran = {name: row for name, row in engines.items() if "out_of_memory" not in row}
    lines = [f"GPT {results['preset']}: Ψ = {parameters:,} parameters, {4 * parameters / size:.3f} {unit} in float32"]
    held = f"Held by one rank with the gradients of a finished backward, {unit}"
    lines += ["", f"{held}, beside {formula_name(results)}:", *held_table(ran, size)]
    lines += ["", f"At the worst moment of the step, {unit}:", *peak_table(ran, unit, size)]
    lines += state_table(ran, results["dtype"], unit, size)
    share = f"Ψ times (N-1)/N = {results['ranks'] - 1}/{results['ranks']}"
    lines += ["", f"Sent by one rank in the step, {unit} (elements: {share}), and in how many collectives:"]
    lines += sent_table(ran, parameters * (results["ranks"] - 1) / results["ranks"], size)
    lines += ["", who_trained(results["engines"], dtype=DTYPES[results["dtype"]]), *gpu_lines(engines)]
    return "\n".join(lines)


def formula_name(results: dict) -> str:
    """What the column "formula" is: an article's bytes per parameter, or this project's own count."""
    own = "our count: bfloat16 weights, float32 weights to update, float32 gradients"
    return f"the formula of {ARTICLE}" if results["dtype"] == "fp32" else own


def held_table(engines: dict[str, dict], size: float) -> list[str]:
    """What is held, and how it differs from the formula; `engines` are rows by the name to show."""
    rows = [["engine", "parameters", "gradients", "optimizer", "together", "formula", "difference, bytes"]]
    for name, row in engines.items():
        held = row["held_bytes"].values()
        rest = row["difference_bytes"] - row["step_counters_bytes"]
        difference = f"{row['difference_bytes']:+,} = {row['step_counters_bytes'] // 4:,} step counters of 4 bytes"
        difference += f" {rest:+,} padding" if rest else ""
        numbers = [f"{nbytes / size:.3f}" for nbytes in (*held, sum(held), row["formula_bytes"])]
        rows.append([name, *numbers, difference])
    return tables.text(rows, rule=False)


def peak_table(engines: dict[str, dict], unit: str, size: float) -> list[str]:
    """The peak, where it is and what it is for; other ways to measure it."""
    rows = [["engine", "peak", "step", "module", *(SHORT.get(part, part) for part in PARTS)]]
    more = []
    for name, row in engines.items():
        where = row["peak_where"]
        parts = [f"{row['peak_parts'].get(part, 0) / size:.3f}" for part in PARTS]
        rows.append([name, f"{row['peak_bytes'] / size:.3f}", where["step"], where["module"] or "-", *parts])
        for other, what in OTHER_PEAKS.items():
            if other in row:
                off, there = row["peak_bytes"] / row[other] - 1, f"{row[other] / size:.3f} {unit}"
                more.append(f"  {name}: the allocator's peak is {off:+.2%} from {what} ({there})")
    return [*tables.text(rows, left=(0, 2, 3), rule=False), *more]


def state_table(engines: dict[str, dict], precision: str, unit: str, size: float) -> list[str]:
    """The stages' peaks without activations and temporaries, beside their formulas."""
    if not any(name.startswith("zero") for name in engines):
        return []
    if precision != "fp32":
        return ["", "The stages' formulas for the peak are for fp32."]
    rows = [["engine", "peak", "formula", "off by", "which is, in bytes"]]
    for name, row in engines.items():
        if row["state_peak_formula"]:
            measured, formula = row["state_peak_bytes"], row["state_peak_formula_bytes"]
            off = f"{measured / formula - 1:+.3%}"
            rows.append([name, f"{measured / size:.3f}", f"{formula / size:.3f}", off, row["state_peak_formula"]])
    return [
        "",
        f"Without activations and temporaries, {unit}, beside the stage's own formula:",
        *tables.text(rows, left=(0, 4), rule=False),
        "  Elements: Ψ all parameters, G the largest gradient, U the largest unit, R the root (what no unit has);",
        "  A, B, T of buckets (`Letters` in zerolab/measure/memory_formulas.py says which). p: units gathered ahead.",
    ]


def sent_table(engines: dict[str, dict], share: float, size: float) -> list[str]:
    """What is sent, by the kinds of collectives; `share` are Ψ (N-1)/N elements."""
    used = set().union(*(row["sent"] for row in engines.values()))
    kinds = [kind for kind in KINDS if kind in used]
    rows = [["engine", "together", *kinds]]
    for name, row in engines.items():
        together = {"bytes": row["sent_bytes"], "elements": row["sent_elements"]}
        together["count"] = sum(one["count"] for one in row["sent"].values())
        cells = [together, *(row["sent"].get(kind) for kind in kinds)]
        rows.append([name, *(_sent_cell(one, share, size) for one in cells)])
    return tables.text(rows, rule=False)


def _sent_cell(one: dict | None, share: float, size: float) -> str:
    if not one or not one["count"]:
        return "-"
    times = f" ({one['elements'] / share:.3f} Ψ)" if share else ""
    return f"{one['bytes'] / size:.3f}{times} in {one['count']}"


def gpu_lines(engines: dict[str, dict]) -> list[str]:
    """On which GPUs each engine fits, by the planner's rule."""
    needed = f"the peak, {GAPS:.0%} more for the allocator's gaps, and {CONTEXT_BYTES / 1e9:.0f} GB"
    lines = [f"On which GPUs it fits (GB of 10^9 bytes; needed: {needed}"]
    lines += ["for CUDA and NCCL, all assumed as in ./launch.sh plan):"]
    for name, row in engines.items():
        if "out_of_memory" in row:
            predicted = row.get("dry_run_peak_bytes")  # only where there is a GPU
            said = f" The dry run predicts a peak of {predicted / 1e9:.1f} GB." if predicted else ""
            lines.append(f"  {name}: OUT OF MEMORY here. {row['out_of_memory']}.{said}")
            continue
        fits = fits_on(row["peak_bytes"])
        answer = f"from {fits[0]} GB on" if fits else "on none of them"
        lines.append(f"  {name}: {answer}, {needed_bytes(row['peak_bytes']) / 1e9:.1f} GB are needed")
    return lines
