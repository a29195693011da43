"""report.md: one page of what was measured, what failed, and what this machine could not show.

The tables are what the commands printed: the page has what the terminal has.
"""

import re
from pathlib import Path

from harness.measure.report.commands import FIGURES
from harness.measure.report.process import DONE, FAILED, INTERRUPTED, LEFT_OUT, OUT_OF_MEMORY, TIMED_OUT

BROKEN = (FAILED, TIMED_OUT, INTERRUPTED)


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


def counted(log: str) -> list[int]:
    """[passed, failed, skipped], of what pytest has printed last."""
    last = log.strip().rpartition("\n")[2]
    kinds = (r"passed", r"(?:failed|error)", r"skipped")
    return [sum(map(int, re.findall(rf"(\d+) {kind}", last))) for kind in kinds]


# The sections.


def found_equal(report: dict) -> list[str]:
    lines = []
    kinds = ("equal to DDP to the bit, at every step and on every rank", "near it (sums in another order)",
             "**does not match**")  # fmt: skip
    for job in jobs_with_results(report, "referee"):
        found = zip(kinds, equal_to_ddp(job["results"]))
        lines.append(f"- {job['name']}: " + "; ".join(f"{kind}: {', '.join(names)}" for kind, names in found if names))
    if any(tests_in_all(report)):
        lines.append("- Tests: {} passed, {} failed, {} skipped".format(*tests_in_all(report)))
    return lines or ["Nothing was compared."]


def how(job: dict) -> str:
    """How a command ended, in words."""
    said = job["status"] if job["status"] == LEFT_OUT else f"{job['status']} after {job['seconds']:.0f} s"
    said += f" (its limit was {job['limit']:.0f} s)" if job["status"] == TIMED_OUT else ""
    said += f", exit status {job['exit']}" if job.get("exit") else ""
    return said + (f": {job['skip']}" if job.get("skip") else "")


def printed(job: dict, folder: Path) -> list[str]:
    """What a command printed."""
    log = (folder / job["log"]).read_text()
    # What ./launch.sh says before it starts the ranks is the same every time.
    said = log[log.find("\n+ ") + 1 :].strip().replace("```", "'''")
    words = "" if job["name"] == job["shown"] else f" `{job['shown']}`"
    return [f"### {job['name']}", "", f"{how(job).capitalize()}.{words}", "", "```", said, "```", ""]


def not_shown(report: dict, jobs: list[tuple[str, dict]]) -> list[str]:
    """What no part could show here, and why: by the machine, and by what was left out."""
    about, gpus = report["machine"], len(report["machine"].get("gpus", ()))
    rates = [run.get("mfu") for job in jobs_with_results(report, "referee") for run in job["results"]["runs"].values()]
    reasons = {
        "torch did not start here, or the part that asks it did not come to its end": not about.get("torch"),
        "there is a GPU that torch does not see: a build of torch for CPUs, or a driver that is too old":
            about.get("nvidia_smi") and not gpus,
        "no GPU: nothing about NCCL, CUDA's streams, the allocator's peak, float16 on a GPU, or MFU": not gpus,
        "step times on a CPU say how much work an engine does around the model, and nothing of a cluster": not gpus,
        "one GPU: one rank over NCCL sends nothing, and ranks that share the GPU send through the host's memory, so no "
        "step time here says what overlapping is worth between GPUs": gpus == 1,
        "one machine: nothing about a network between machines": gpus > 1,
        "the GPU has no bfloat16: float32 alone": gpus and not about.get("bf16"),
        "no MFU: this GPU's peak is not in harness/measure/gpus.py, or no step was timed": gpus and not any(rates),
        "--quick: small models and few steps": report["quick"],
    }  # fmt: skip
    lines = [words for words, it_is_so in reasons.items() if it_is_so]
    lines += [f"{name}: left out by --only" for name in report["left_out"]]
    lines += [f"{part}: {job['name']}: {job['skip']}" for part, job in jobs if job["status"] == LEFT_OUT]
    return [f"- {line}" for line in lines]


def page(report: dict, folder: Path) -> str:
    """The whole page."""
    jobs = [(name, job) for name, part in report["parts"].items() for job in part["jobs"]]
    done = sum(job["status"] == DONE for _, job in jobs)
    broken = [f"- {name}: {job['name']}: {how(job)}" for name, job in jobs if job["status"] in (*BROKEN, OUT_OF_MEMORY)]
    lines = [f"# {hardware(report['machine'])}", ""]
    lines += [f"Written by `{report['command']}` on {report['date']}, in {report['seconds'] / 60:.1f} minutes: "
              f"{done} of {len(jobs)} commands came to their end."]  # fmt: skip
    if report["status"] != DONE:
        lines += [f"**{report['status'].capitalize()}**: what is here was measured; the rest is missing."]
    lines += ["", "## What was found equal", "", *found_equal(report), ""]
    lines += ["## What failed", "", *(broken or ["Nothing."]), ""]
    lines += ["## What this machine could not show", "", *not_shown(report, jobs), ""]
    for name in FIGURES:
        if (folder / f"{name}.png").exists():
            dark = f'<source media="(prefers-color-scheme: dark)" srcset="{name}-dark.png">'
            lines += [f'<picture>{dark}<img src="{name}.png" alt="{name}"></picture>', ""]
    for name, part in report["parts"].items():
        lines += [f"## {name.capitalize()}", ""]
        lines += [line for job in part["jobs"] if job["status"] != LEFT_OUT for line in printed(job, folder)]
    return "\n".join(lines)
