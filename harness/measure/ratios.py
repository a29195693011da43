"""Step-time ratios over several launches of the referee: ./launch.sh ratios results/referee-cpu-2ranks-*.json"""

import json
import statistics

from harness.run.ending import Parser, one_line
from harness.run.engines import PAIRS


def ratios(reports: list[dict]) -> dict[str, list[float]]:
    """{"zero1 / ddp": [one value per report], ...}, from `step_ms` of engines that took turns in the same run."""
    found: dict[str, list[float]] = {}
    for report in reports:
        times = {name: run["step_ms"] for name, run in report["runs"].items() if run["step_ms"]}
        for name, base in [*PAIRS, *((name, "ddp") for name in times if name not in ("ddp", "single"))]:
            if name in times and base in times:
                found.setdefault(f"{name} / {base}", []).append(times[name] / times[base])
    return found


@one_line(ValueError)
def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="ratios", description="Step-time ratios over launches of the referee.")
    parser.add_argument("files", nargs="+", help="reports, as ./launch.sh compare --json FILE writes them")
    files = parser.parse_args(argv).files
    reports = []
    for file in files:
        try:
            with open(file) as opened:
                reports.append(json.load(opened))
            if not ratios(reports[-1:]):
                raise ValueError("no two engines have been timed")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is no report of ./launch.sh compare --json FILE: {error}") from error
    print(f"{'step time':<38}median   lowest  highest  of {len(files)} launches")
    for name, values in ratios(reports).items():
        print(f"{name:<38}{statistics.median(values):>6.2f} {min(values):>8.2f} {max(values):>8.2f}")


if __name__ == "__main__":
    main()
