"""report.md: one page of what was measured, what failed, and what this machine could not show."""

import statistics
from pathlib import Path

from harness.measure.report.jobs import DONE, FAILED, INTERRUPTED, OUT_OF_MEMORY, SKIPPED, TIMED_OUT

PAIRS = (("zero1", "zero_redundancy_optimizer"), ("zero2", "fsdp2_no_reshard"), ("zero3", "fsdp2"))
FIGURES = (
    ("losses", "Losses of all engines, and how far each is from the reference"),
    ("memory", "Held and at the peak, per engine"),
    ("lanes", "ZeRO-3's step: what a rank computes, and which collectives are under way"),
    ("sweeps", "What the options cost"),
)
TIMES = ("step_ms", "step_ms_lowest", "step_ms_highest")
LEGEND = """Difference: the largest from DDP's loss, over steps and ranks. Held: before the optimizer's step. Peak: on
CUDA the allocator's, on a CPU all live storages. Step times: medians of the slowest rank; the engines take turns where
all fit into memory. MFU: 6Ψ + 12 layers width seq FLOP per token, of the GPU's dense peak in that dtype (TF32 off).
"""
BROKEN = (FAILED, TIMED_OUT, INTERRUPTED)


def table(columns: list[str], rows: list[list]) -> list[str]:
    """A table as GitHub shows it; all but the first column to the right."""
    cells = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in cells] + [""]


def mega(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"


def giga(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.2f}"


def hardware(machine: dict) -> str:
    """ "1 x NVIDIA H200" or "2 cores of Intel(R) Xeon(R) Processor"."""
    names = [gpu["name"] for gpu in machine.get("gpus", ())]
    if names:
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{machine['cores']} cores of {machine['processor']}" if machine.get("cores") else "an unknown machine"


def jobs_with_results(report: dict, part: str) -> list[dict]:
    return [job for job in report["parts"].get(part, {}).get("jobs", ()) if job.get("results")]


def equal_to_ddp(results: dict) -> tuple[list[str], list[str], list[str]]:
    """(engines with DDP's losses to the bit, those within the tolerance, those that do not match) of a comparison."""
    exact, near, wrong = [], [], []
    for name, run in results["runs"].items():
        if name != ("ddp" if "ddp" in results["runs"] else next(iter(results["runs"]))):
            (exact if run["difference"] == 0 and run["match"] else near if run["match"] else wrong).append(name)
    return exact, near, wrong


def tests_in_all(report: dict) -> tuple[int, int, int]:
    """(passed, failed, skipped)."""
    rows = [row for job in jobs_with_results(report, "tests") for row in job["results"]["tests"].values()]
    return tuple(sum(row[place] for row in rows) for place in range(3))


# The sections.


def found_equal(report: dict) -> list[str]:
    lines = []
    for job in jobs_with_results(report, "referee"):
        exact, near, wrong = equal_to_ddp(job["results"])
        said = [f"equal to DDP to the bit, at every step and on every rank: {_names(exact)}"] if exact else []
        if near:
            allowed = max(job["results"]["runs"][name]["tolerance"] for name in near)
            said.append(f"within {allowed:g} nats (sums in another order): {_names(near)}")
        if wrong:
            said.append(f"**does not match**: {_names(wrong)}")
        lines.append(f"- {job['name']}: {'; '.join(said) or 'nothing was compared'}")
    passed, failed, skipped = tests_in_all(report)
    if passed or failed or skipped:
        lines.append(f"- Tests: {passed} passed, {failed} failed, {skipped} skipped")
    return [*(lines or ["Nothing was compared."]), ""]


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def machine(report: dict) -> list[str]:
    about, rows = report["machine"], []
    for gpu in about.get("gpus", ()):
        rows.append(["GPU", f"{gpu['name']}, {gpu['memory_bytes'] / 1e9:.0f} GB, capability {gpu['capability']}, "
                     f"{gpu['multiprocessors']} multiprocessors"])  # fmt: skip
    for gpu in about.get("nvidia_smi", ()):
        rows.append([f"nvidia-smi, GPU {gpu['index']}", ", ".join(f"{key} {value}" for key, value in gpu.items()
                     if key not in ("index", "name"))])  # fmt: skip
    if about.get("other_processes"):
        rows.append(["other processes on the GPUs", about["other_processes"]])
    for key in ("cuda", "nccl", "cudnn", "torch", "python", "processor", "cores", "system", "matplotlib", "pytest",
                "commit", "changed_files"):  # fmt: skip
        if about.get(key):
            rows.append([key.replace("_", " "), about[key]])
    if about.get("memory_bytes"):
        rows.append(["memory", f"{about['memory_bytes'] / 1e9:.0f} GB"])
    for key, value in about.get("environment", {}).items():
        rows.append([f"`{key}`", f"`{value}`"])
    rows += [[key.replace("_", " "), value] for key, value in about.items() if key.endswith("_failed")]
    lines = [line.replace("---:", "---") for line in table(["", ""], rows)] if rows else []
    if about.get("topology"):
        lines += ["```", about["topology"], "```", ""]
    return lines


def tests(report: dict) -> list[str]:
    lines = []
    for job in jobs_with_results(report, "tests"):
        lines += [f"`{job['shown']}`", ""]
        rows = [[f"`{name}`", *counts] for name, counts in job["results"]["tests"].items()]
        lines += table(["test", "passed", "failed", "skipped"], rows)
        said = job["results"]["said"]
        lines += [f"- {entry}" for entry in said]
        lines += [f"- and {job['results']['more']} more"] * bool(job["results"]["more"]) + [""] * bool(said)
    return lines


def referee(report: dict) -> list[str]:
    lines, ratios = [], []
    for job in jobs_with_results(report, "referee"):
        results = job["results"]
        runs, cuda = results["runs"], results["device"] == "cuda"
        base = runs.get("ddp", {}).get("step_ms")
        rows = []
        for name, run in runs.items():
            off = "0, to the bit" if run["difference"] == 0 else f"{run['difference']:.0e}"
            row = [f"`{name}`", off, mega(sum(run["held_bytes"].values())), mega(run["peak_bytes"])]
            row.append(mega(run["reserved_bytes"]) if cuda else mega(run["sent_bytes"]))
            row += [f"{run['step_ms']:.1f}", f"{run['step_ms'] / base:.2f}"] if run["step_ms"] and base else ["", ""]
            if cuda:
                row.append("" if run.get("mfu") is None else f"{run['mfu']:.1%}")
            else:
                row.append(f"{run['tokens_per_s']:,.0f}" if run["tokens_per_s"] else "")
            rows.append(row)
        columns = ["engine", "difference", "held MB", "peak MB", "reserved MB" if cuda else "sent MB/step", "step ms"]
        lines += [f"### {job['name']}", "", f"`{job['shown']}`", ""]
        lines += table([*columns, "x DDP", "MFU" if cuda else "tokens/s"], rows)
        times = {name: run["step_ms"] for name, run in runs.items() if run["step_ms"]}
        pairs = [f"{times[a] / times[b]:.2f}" if a in times and b in times else "" for a, b in PAIRS]
        if any(pairs):
            ratios.append([job["name"], *pairs])
    if ratios:
        lines += ["### Step times beside torch's own", ""]
        lines += table(["run", *(f"`{ours}` / `{theirs}`" for ours, theirs in PAIRS)], ratios)
    if lines:
        lines.append(LEGEND)
    return lines


def memory(report: dict) -> list[str]:
    lines = []
    for job in jobs_with_results(report, "memory"):
        results, rows = job["results"], []
        show, unit = (giga, "GB") if results["parameters"] > 2.5e8 else (mega, "MB")
        for name, row in results["engines"].items():
            if "out_of_memory" in row:
                rows.append([f"`{name}`", "out of memory", *[""] * 5])
                continue
            dry, ledger = row.get("dry_run_peak_bytes"), row.get("ledger_peak_bytes")
            cells = [show(sum(row["held_bytes"].values())), show(row["formula_bytes"]), show(row["peak_bytes"])]
            cells += [show(dry), f"{row['peak_bytes'] / dry - 1:+.2%}"] if dry else ["", ""]
            rows.append([f"`{name}`", *cells, f"{row['peak_bytes'] / ledger - 1:+.2%}" if ledger else ""])
        real = results["device"] == "cuda"
        columns = ["engine", f"held {unit}", f"formula {unit}", f"peak {unit}"]
        more = [f"dry run's peak {unit}", "difference", "from the ledger"] if real else []
        lines += [f"### {job['name']}", "", f"`{job['shown']}`", ""]
        lines += table(columns + more, [row[: len(columns + more)] for row in rows])
    return lines


def timeline(report: dict) -> list[str]:
    rows = []
    for job in jobs_with_results(report, "timeline"):
        found = job["results"]
        hidden = found["both_ms"] / found["collectives_ms"] if found["collectives_ms"] else 0.0
        rows.append([job["name"], *(f"{found[key]:.1f}" for key in ("step_ms", "compute_ms", "collectives_ms")),
                     f"{hidden:.0%}", found["collectives"]])  # fmt: skip
    if not rows:
        return []
    lines = table(["run", "step ms", "computes ms", "collectives ms", "of it computing", "collectives"], rows)
    return [*lines, "Rank 0's step, watched, which slows it down. The traces open in ui.perfetto.dev.", ""]


def sweeps(report: dict) -> list[str]:
    lines = []
    for job in jobs_with_results(report, "sweeps"):
        for name, choices in job["results"]["sweeps"].items():
            rows = [
                [
                    label,
                    row["collectives"],
                    *(f"{row[k]:.1f}" for k in ("step_ms", "step_ms_lowest", "step_ms_highest")),
                ]
                + [f"{row['ratio']:.2f}", mega(row["peak_bytes"]), mega(row["short_peak_bytes"])]
                for label, row in choices.items()
            ]
            columns = ["collectives", "step ms", "lowest", "highest", "x the first", "peak MB", "on 8 tokens"]
            lines += [f"`{job['shown']}`", "", *table([name, *columns], rows)]
    return lines


def host(report: dict) -> list[str]:
    lines = []
    for job in jobs_with_results(report, "host"):
        times = job["results"]["ms"]
        medians = {name: statistics.median(values) for name, values in times.items()}
        rows = [[f"`{name}`", f"{medians[name]:.1f}", f"{min(values):.1f}", f"{max(values):.1f}",
                 f"{medians[name] / medians['plain']:.2f}"] for name, values in times.items()]  # fmt: skip
        lines += [f"### {job['name']}", "", "Rank 0 of 8 whose collectives move nothing; 408 small parameters in 34 "
                  "units.", "", *table(["engine", "ms per step", "lowest", "highest", "x plain"], rows)]  # fmt: skip
        costs = [[f"`{row['function']}`", f"{row['calls_per_step']:g}", f"{row['ms_per_step']:.2f}"]
                 for row in job["results"].get("profile", ())]  # fmt: skip
        lines += [f"The ten largest costs of `{job['results'].get('profiled')}`, under Python's profiler:", ""]
        lines += table(["function", "calls per step", "ms per step, its own"], costs)
    return lines


def failures(report: dict) -> list[str]:
    lines = []
    for name, part in report["parts"].items():
        for job in part["jobs"]:
            if job["status"] in (*BROKEN, OUT_OF_MEMORY):
                after = f"after {job['seconds']:.0f} s"
                if job["status"] == TIMED_OUT:
                    after += f" (its limit was {job['limit']:.0f} s)"
                code = f", exit status {job['exit']}" if job.get("exit") else ""
                lines += [f"### {name}: {job['name']}", "", f"{job['status'].capitalize()} {after}{code}. "
                          f"`{job['shown']}`", ""]  # fmt: skip
                if job.get("tail"):
                    lines += ["```", job["tail"].replace("```", "'''"), "```", ""]
    return lines or ["Nothing.", ""]


def not_shown(report: dict) -> list[str]:
    """What no part could show here, and why: by the machine, and by what was skipped or had no time."""
    about, lines = report["machine"], []
    gpus = len(about.get("gpus", ()))
    if not about.get("torch"):
        lines.append("torch did not start here, or the part that asks it did not come to its end")
    if about.get("nvidia_smi") and not gpus:
        lines.append("there is a GPU that torch does not see: a build of torch for CPUs, or a driver that is too old")
    if not gpus:
        lines.append("no GPU: nothing about NCCL, CUDA's streams, the allocator's peak, float16 on a GPU, or MFU")
        lines.append("step times on a CPU say how much work an engine does around the model, and nothing of a cluster")
    if gpus == 1:
        lines.append("one GPU: one rank over NCCL sends nothing, and ranks that share the GPU send through the host's "
                     "memory, so no step time here says what overlapping is worth between GPUs")  # fmt: skip
    if gpus > 1:
        lines.append("one machine: nothing about a network between machines")
    if gpus and not any(run.get("mfu") for job in jobs_with_results(report, "referee")
                        for run in job["results"]["runs"].values()):  # fmt: skip
        lines.append("no MFU: this GPU's peak is not in harness/measure/gpus.py, or no step was timed")
    if report["quick"]:
        lines.append("--quick: small models and few steps")
    for name in report["left_out"]:
        lines.append(f"{name}: left out by --only")
    for name, part in report["parts"].items():
        lines += [f"{name}: {job['name']}: {job['skip']}" for job in part["jobs"] if job["status"] == SKIPPED]
    for name in report["not_reached"]:
        lines.append(f"{name}: the report ended before")
    lines += report["notes"]
    return [*(f"- {line}" for line in lines), ""]


SECTIONS = {"machine": machine, "tests": tests, "referee": referee, "memory": memory, "timeline": timeline,
            "sweeps": sweeps, "host": host}  # fmt: skip


def page(report: dict, folder: Path) -> str:
    """The whole page. A section that its results break costs no other."""
    parts = report["parts"]
    whole = sum(part["status"] == DONE for part in parts.values())
    lines = [f"# {hardware(report['machine'])}", ""]
    lines.append(f"Written by `{report['command']}` on {report['date']}, in {report['seconds'] / 60:.1f} minutes: "
                 f"{whole} of {len(parts)} parts without a failure.")  # fmt: skip
    if report["status"] != DONE:
        lines.append(f"**{report['status'].capitalize()}**: what is here was measured; the rest is missing.")
    lines.append("")
    shown = [f"![{words}]({name}.png)" for name, words in FIGURES if (folder / f"{name}.png").exists()]
    lines += ["## What was found equal", "", *_section(found_equal, report)]
    for name, part in parts.items():
        lines += [f"## {part['title']}", ""]
        if part["status"] != DONE:
            lines += [f"Part {name}: **{part['status']}**, see [what failed](#what-failed).", ""]
        lines += _section(SECTIONS[name], report)
    if shown:
        lines += ["## Figures", "", *(line for figure in shown for line in (figure, ""))]
    lines += ["## What failed", "", *_section(failures, report)]
    lines += ["## What this machine could not show", "", *_section(not_shown, report)]
    return "\n".join(lines)


def _section(write, report: dict) -> list[str]:
    try:
        return write(report)
    except Exception as error:  # results of a kind that nobody foresaw, on a machine that nobody has seen
        return [
            f"This section could not be written ({type(error).__name__}: {error}); report.json has the results.",
            "",
        ]
