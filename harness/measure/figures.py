"""The pictures, drawn from measured JSON: nothing here computes a number that a run has not written down.

Run it: ./launch.sh figures            all of them, from results/ to results/figures/
        ./launch.sh figures memory --json results/memory-7b-8ranks.json --out /tmp
"""

import json
import os

from harness.measure import pictures_of_plans
from harness.measure.pictures_of_memory import live, memory, scaling, stages
from harness.measure.pictures_of_steps import lanes, losses, sweeps
from harness.measure.style import TIME_STYLES, headline, key, look, new, ruled, save
from harness.run import journal
from harness.run.ending import Parser, one_line


def run(lines: list[dict], theme: dict):
    """The losses of a run that was restarted: where, on how many ranks it went on, and which steps it made again."""
    steps = [line for line in lines if "event" not in line]
    starts = [line for line in lines if line.get("event") == "start"]
    restarts = {line["step"]: line for line in lines if line.get("event") == "restart"}
    figure, axes = new(theme, 1, height=3.9)
    style = {"color": theme["ink"], "linewidth": 1.0, "alpha": 0.75}
    axes.plot([line["step"] for line in steps], [line["loss"] for line in steps], **style, label="loss of a batch")
    held_out = [line for line in steps if "held_out" in line]
    points = [line["step"] for line in held_out], [line["held_out"] for line in held_out]
    axes.plot(*points, "o", color=theme["ink"], markersize=6, label="loss on held-out text")
    top = max((line["loss"] for line in steps), default=0)
    for start in starts:
        text = f" {start['ranks']} rank{'s' * (start['ranks'] > 1)}"
        if start["step"] in restarts:
            back = restarts[start["step"]]
            text += f"\n back after {sum(back['seconds'].values()):.0f} s"
            axes.axvspan(start["step"], start["step"] + back["repeated"], color=theme["shade"], zorder=0)
        axes.axvline(start["step"], color=theme["ink"], linewidth=0.8, linestyle="--")
        axes.text(start["step"], top * 1.1, text, va="top", fontsize=8)
    words = "training step (shaded: made twice, before the restart and after it)"
    axes.set(ylim=(None, top * 1.12), xlabel=words, ylabel="loss, nats per token")
    axes.grid(axis="y", linewidth=0.5)
    ranks = ", then ".join(str(start["ranks"]) for start in starts)
    finding = f"Disturbed {len(starts) - 1} times, the run goes on: on {ranks} ranks"
    headline(figure, finding, f"{starts[0]['stage']}, GPT {starts[0]['preset']}")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def step_time(results: list[tuple[str, dict]], theme: dict):
    """A bar per engine and rank, a column per file: own work, exposed communication by kind, waiting. Linear."""
    runs = {name: run["step_time"]["ranks"] for name, run in results[0][1]["runs"].items() if name != "single"}
    rows = [(name, rank["rank"]) for name, ranks in runs.items() for rank in ranks]
    figure, grid = new(theme, 1, len(results), height=0.26 * len(rows) + 2.1, sharex=True, sharey=True, squeeze=False)
    seen = set()
    for axes, (title, report) in zip(grid[0], results):
        for position, (name, number) in enumerate(rows):
            rank = {rank["rank"]: rank for rank in report["runs"][name]["step_time"]["ranks"]}[number]
            parts = {part: rank[f"{part}_ms"] for part in ("compute", "host", "optimizer")}
            parts |= rank["exposed_ms"] | {"waiting": rank["waiting_ms"]}
            start = 0.0
            for part, style in TIME_STYLES.items():
                if parts.get(part):
                    axes.barh(position, parts[part], 0.82, left=start, **look(style, theme))
                    start += parts[part]
                    seen.add(part)
        axes.set(title=title, xlabel="ms of a step (mean)")
        ruled(axes, "x")
    grid[0][0].set_yticks(range(len(rows)), [f"{name} {rank}" for name, rank in rows])
    grid[0][0].set_ylabel("engine and rank")
    grid[0][0].invert_yaxis()
    labels = {part: f"{part}, exposed" if "-" in part or part == "broadcast" else part for part in TIME_STYLES}
    labels |= {"host": "host, between operations", "waiting": "waiting for the slowest rank"}
    shown = {labels[part]: style for part, style in TIME_STYLES.items() if part in seen}
    figure.legend(handles=key(shown, theme), loc="outside lower center", ncols=4)
    first = results[0][1]
    shape = f"GPT {first['preset']}, {first['world_size']} ranks over {first['backend']}"
    slow = any(report.get("slow_rank") for _, report in results)
    late = "One slow rank makes all steps longer: the others wait for it"
    headline(
        figure,
        late if slow else "Where the time of a step goes",
        f"{shape}, {first['batch']} x {first['seq']} tokens per rank",
    )
    return figure


def _delay(report: dict) -> str:
    """What was done to a rank of the referee's run."""
    if report["slow_rank"] is None:
        return "no rank is delayed"
    rank, seconds = report["slow_rank"]
    return f"rank {rank} is delayed by {seconds * 1e3:g} ms in every step"


# figure: (function, the JSON files in results/ that it draws, the command that writes such a file)
REFEREE, MEMORY = "./launch.sh compare --json", "./launch.sh memory --json"
FIGURES = {
    "stages": (stages, ["memory-small-4ranks-64-tokens.json"], MEMORY),
    "memory": (memory, ["memory-7b-8ranks.json"], MEMORY),
    "live": (live, ["memory-small-4ranks-64-tokens.json"], MEMORY),
    "lanes": (lanes, ["trace-zero3-cpu-2ranks.json", "trace-zero3-no-prefetch-cpu-2ranks.json"],
              "./launch.sh zero3 2 --trace"),
    "losses": (losses, ["referee-cpu-2ranks-3.json"], REFEREE),
    "step-time": (step_time, ["step-time-cpu-2ranks.json", "step-time-slow-rank-cpu-2ranks.json"], REFEREE),
    "sweeps": (sweeps, ["sweeps-cpu-2ranks.json"], "./launch.sh sweeps --json"),
    "scaling": (scaling, ["memory-7b-1-to-1024-ranks.json"], "./launch.sh memory --up-to 8 --json"),
    "plan-scale": (pictures_of_plans.scale, ["plan-scale.json"], "./launch.sh plan --scale --json"),
    "plan-validation": (pictures_of_plans.validation, ["plan-validation.json"], "./launch.sh plan --validate --json"),
    "run": (run, ["train-zero2-cpu.jsonl"], "./launch.sh train zero2 2 --folder"),
}  # fmt: skip


def load(name: str, paths: list[str]):
    """What the figure `name` is drawn from. Raises ValueError for a file that is not there or of another kind."""
    loaded = []
    for path in paths:
        try:
            if name == "run":
                loaded.append(journal.read(path))
                continue
            with open(path) as file:
                loaded.append(json.load(file))
        except (OSError, ValueError) as error:  # not to be read, no text, or no JSON
            raise ValueError(f"figure {name!r} needs a measured JSON; {path}: {error}") from error
    if name == "lanes":
        return [(trace.get("otherData", {}).get("title", path), trace) for path, trace in zip(paths, loaded)]
    if name == "step-time":
        return [(_delay(report), report) for report in loaded]
    return loaded[0]


def draw(name: str, paths: list[str], out: str) -> list[str]:
    """Write the figure in both themes; returns the paths."""
    try:
        return save(FIGURES[name][0], load(name, paths), os.path.join(out, name))
    except (LookupError, TypeError, AttributeError, StopIteration) as error:
        words = f"{', '.join(paths)} is not what figure {name!r} is drawn from"
        raise ValueError(f"{words}: {FIGURES[name][2]} writes that") from error


@one_line(ValueError, OSError)
def main() -> None:
    parser = Parser(prog="figures", description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", help=f"any of {', '.join(FIGURES)} (default: all)")
    parser.add_argument("--json", nargs="+", help="draw one figure from this file (lanes, step-time: one or two)")
    parser.add_argument("--out", default="results/figures", help="folder to write to (default results/figures)")
    options = parser.parse_args()
    for name in options.figures:
        if name not in FIGURES:
            raise ValueError(f"no figure {name!r}; there are: {', '.join(FIGURES)}")
    if options.json and len(options.figures) != 1:
        raise ValueError(f"--json needs the name of one figure: {', '.join(FIGURES)}")
    os.makedirs(options.out, exist_ok=True)
    for name in options.figures or FIGURES:
        paths = options.json or [os.path.join("results", file) for file in FIGURES[name][1]]
        print("written: " + ", ".join(draw(name, paths, options.out)), flush=True)


if __name__ == "__main__":
    main()
