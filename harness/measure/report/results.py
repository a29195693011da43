"""What is kept of a job's output: everything that the page shows, and little enough to send."""

import gzip
import json
import re
import shutil
import xml.etree.ElementTree as xml
from collections import Counter
from pathlib import Path

from harness.measure.report.jobs import scrub

REASONS = 12  # lines of failing and skipped tests that are kept


def read(kind: str, file: Path, keep_as: Path | None = None) -> dict | None:
    """The results in `file`, None where the job did not come to write it. Traces are kept besides, as `keep_as`.

    The command in it is one to repeat: without the file that this machine wrote, which is gone by then.
    """
    if not file.exists() or not file.stat().st_size:
        return None
    if kind == "tests":
        return tests(file)
    try:
        found = json.loads(re.sub(rf" --\w+ {re.escape(str(file))}(?= |\")", "", file.read_text()))
    except ValueError:
        return None  # the process was ended while it wrote
    if kind == "memory":
        for row in found["engines"].values():
            row.pop("curve", None)
    if kind == "timeline":
        if keep_as is not None:
            with open(file, "rb") as plain, gzip.open(keep_as, "wb") as packed:
                shutil.copyfileobj(plain, packed)
        return scrub({**overlap(found), **found.get("otherData", {})})
    if kind == "host":
        found["ms"] = {name: [round(value, 3) for value in values] for name, values in found["ms"].items()}
    return scrub(found)


def tests(file: Path) -> dict:
    """{test function: [passed, failed, skipped]} of a JUnit file, and in words what failed or was skipped."""
    counts, said, reasons = {}, [], Counter()
    for case in xml.parse(file).getroot().iter("testcase"):
        name = case.get("name", "?")
        row = counts.setdefault(name.partition("[")[0], [0, 0, 0])
        wrong = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        row[0 if wrong is None else 2 if wrong.tag == "skipped" else 1] += 1
        if wrong is not None:
            message = (wrong.get("message") or wrong.text or "").strip()
            last = ([line.strip() for line in message.splitlines() if line.strip()] or [""])[-1][:300]
            if wrong.tag == "skipped":
                reasons[last] += 1
            else:
                said.append(f"FAILED {name}: {last}")
    said += [f"{number} skipped: {reason}" for reason, number in reasons.items()]
    return scrub({"tests": counts, "said": said[:REASONS], "more": max(0, len(said) - REASONS)})


def overlap(trace: dict) -> dict:
    """Of rank 0's step in a trace, in ms: its length, when it computed, when collectives were under way, and both."""
    begins = trace["otherData"]["step_begins_ms"] * 1e3
    mine = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 0 and e["ts"] >= begins]
    compute = _union([(e["ts"], e["ts"] + e["dur"]) for e in mine if e["cat"] == "compute"])
    sending = _union([(e["ts"], e["ts"] + e["dur"]) for e in mine if e["cat"] == "collectives"])
    both = _length(compute) + _length(sending) - _length(_union(compute + sending))
    end = max((e["ts"] + e["dur"] for e in mine), default=begins)
    return {
        "step_ms": round((end - begins) / 1e3, 3),
        "compute_ms": round(_length(compute) / 1e3, 3),
        "collectives_ms": round(_length(sending) / 1e3, 3),
        "both_ms": round(both / 1e3, 3),
        "collectives": sum(e["cat"] == "collectives" for e in mine),
    }


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[list[float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [tuple(span) for span in merged]


def _length(spans) -> float:
    return sum(end - start for start, end in spans)
