"""Ratios of step times over several launches of the referee, for `./launch.sh bench --ratios FILE...`."""

import json
import statistics

from zerolab.run.engines import PAIRS


def ratios(reports: list[dict]) -> dict[str, list[float]]:
    """{"zero1 / ddp": [one value per report], ...}, from `step_ms` of engines that took turns in the same run."""
    found: dict[str, list[float]] = {}
    for report in reports:
        times = {name: run["step_ms"] for name, run in report["runs"].items() if run["step_ms"]}
        for name, base in [*PAIRS, *((name, "ddp") for name in times if name not in ("ddp", "single"))]:
            if name in times and base in times:
                found.setdefault(f"{name} / {base}", []).append(times[name] / times[base])
    return found


def lines_of_ratios(files: list[str]) -> list[str]:
    """What is printed of the ratios in these files. Raises ValueError for a file that has none."""
    reports = []
    for file in files:
        try:
            with open(file) as opened:
                reports.append(json.load(opened))
            if not ratios(reports[-1:]):
                raise ValueError("no two engines have been timed")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is no report of ./launch.sh compare --json FILE: {error}") from error
    lines = [f"{'step time':<38}median   lowest  highest  of {len(files)} launches"]
    for name, values in ratios(reports).items():
        lines.append(f"{name:<38}{statistics.median(values):>6.2f} {min(values):>8.2f} {max(values):>8.2f}")
    return lines
