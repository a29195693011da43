"""The report's pictures, as `./launch.sh figures` draws them, small; a job of its own, as matplotlib may be missing.

Run it: python -m harness.measure.report.figures FOLDER
"""

import gzip
import json
import sys
from pathlib import Path

from harness.measure import figures

DOTS = 75  # per inch


def of_kind(folder: Path, part: str) -> list[dict]:
    """The jobs of a part that have results."""
    file = folder / f"{part}.json"
    jobs = json.loads(file.read_text())["jobs"] if file.exists() else []
    return [job for job in jobs if job.get("results")]


def losses(folder: Path):
    return next((job["results"] for job in of_kind(folder, "referee")), None)


def memory(folder: Path):
    """The rows of all jobs with the preset of the first, in one; without those that ran out of memory."""
    jobs = of_kind(folder, "memory")
    if not jobs:
        return None
    first = jobs[0]["results"]
    rows = {name: row for job in jobs if job["results"]["preset"] == first["preset"]
            for name, row in job["results"]["engines"].items() if "out_of_memory" not in row}  # fmt: skip
    return {**first, "engines": rows} if rows else None


def sweeps(folder: Path):
    jobs = of_kind(folder, "sweeps")
    merged = {name: rows for job in jobs for name, rows in job["results"]["sweeps"].items()}
    return {**jobs[0]["results"], "sweeps": merged} if jobs else None


def lanes(folder: Path):
    """ZeRO-3's step with prefetching and without, of two ranks at most."""
    found = []
    for file in sorted(folder.glob("trace-zero3*.json.gz")):
        with gzip.open(file) as packed:
            trace = json.load(packed)
        trace["traceEvents"] = [event for event in trace["traceEvents"] if event["pid"] < 2]
        found.append((trace["otherData"]["title"], trace))
    return found[:2] or None


def main(folder: Path) -> int:
    """Draw what there are results for; returns how many figures failed, each with a line that says why."""
    failed = 0
    for read in (losses, memory, sweeps, lanes):
        name = read.__name__
        try:
            found = read(folder)
            if found is not None:
                drawn = figures.FIGURES[name][0](found, figures.THEMES[""])
                drawn.savefig(folder / f"{name}.png", dpi=DOTS)
                figures.plt.close(drawn)
                print(f"written: {name}.png")
        except Exception as error:  # one figure must not cost the others
            failed += 1
            print(f"figure {name}: {type(error).__name__}: {error}")
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
