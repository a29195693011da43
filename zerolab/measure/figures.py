"""The figures, drawn from measured JSON: nothing here computes a number that a run has not written down.

`./launch.sh docs` draws all of them, from results/ to results/figures/. One of them from another file:

    ./launch.sh docs --figure memory --from results/memory-7b-8ranks.json --out /tmp
"""

import json
import tomllib
from pathlib import Path

from zerolab.measure.pictures_of_memory import live, memory, scaling, stages
from zerolab.measure.pictures_of_steps import lanes, losses, sweeps
from zerolab.measure.style import BELOW, SAID, TIMES, headline, key, new, save, stacked


def step_time(*results: dict):
    """A bar per engine and rank, a column per file: own work, exposed communication by kind, waiting. Linear."""
    first, rows = results[0], []
    for name, made in first["runs"].items():
        if name != "single":
            rows += [(name, place) for place in range(len(made["step_time"]["ranks"]))]
    figure, grid = new(1, len(results), height=0.26 * len(rows) + 2.1, sharex=True, sharey=True, squeeze=False)
    seen = set()
    for axes, report in zip(grid[0], results):
        for position, (name, place) in enumerate(rows):
            rank = report["runs"][name]["step_time"]["ranks"][place]
            parts = {part: rank[f"{part}_ms"] for part in ("compute", "host", "optimizer", "waiting")}
            parts |= rank["exposed_ms"]
            shown = {part: parts[part] for part in TIMES if parts.get(part)}
            stacked(axes, position, shown, 0.82)
            seen |= {*shown}
        axes.set(title=_delay(report), xlabel="ms of a step (mean)")
        axes.grid(axis="x")
    grid[0][0].set_yticks(range(len(rows)), [f"{name} {rank}" for name, rank in rows])
    grid[0][0].set_ylabel("engine and rank")
    grid[0][0].invert_yaxis()
    figure.legend(handles=key([part for part in TIMES if part in seen], SAID["in_full"]), **BELOW)
    finding = "Where the time of a step goes"
    if any(report["slow_rank"] for report in results):
        finding = "One slow rank makes all steps longer: the others wait for it"
    shape = f"GPT {first['preset']}, {first['world_size']} ranks over {first['backend']}"
    headline(figure, finding, f"{shape}, {first['batch']} x {first['seq']} tokens per rank")
    return figure


def _delay(report: dict) -> str:
    """What was done to a rank of the referee's run."""
    if report["slow_rank"] is None:
        return "no rank is delayed"
    rank, seconds = report["slow_rank"]
    return f"rank {rank} is delayed by {seconds * 1e3:g} ms in every step"


RESULTS = Path(__file__).resolve().parents[2] / "results"
FIGURES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def load(name: str, paths: list[str]) -> list[dict]:
    """What the figure `name` is drawn from. Raises ValueError for a file that is not there or of another kind."""
    loaded = []
    for path in paths:
        try:
            loaded.append(json.loads(Path(path).read_text()))
        except (OSError, ValueError) as error:  # not to be read, no text, or no JSON
            raise ValueError(f"figure {name!r} needs a measured JSON; {path}: {error}") from error
    return loaded


DRAWN_BY = {
    "lanes": lanes,
    "live": live,
    "losses": losses,
    "memory": memory,
    "scaling": scaling,
    "stages": stages,
    "step_time": step_time,
    "sweeps": sweeps,
}


def picture(name: str, paths: list[str]):
    """The figure `name` of the results in these files."""
    return DRAWN_BY[FIGURES[name]["draw"]](*load(name, paths))


def draw(name: str, folder: str | Path = RESULTS / "figures", paths: list[str] | None = None) -> str:
    """Write the figure to `folder`, from its files in results/ or from `paths`; returns where it is."""
    if name not in FIGURES:
        raise ValueError(f"no figure {name!r}; there are: {', '.join(FIGURES)}")
    paths = paths or [str(RESULTS / file) for file in FIGURES[name]["files"]]
    try:
        figure = picture(name, paths)
    except (LookupError, TypeError, AttributeError, StopIteration) as error:
        words = f"{', '.join(paths)} is not what figure {name!r} is drawn from"
        raise ValueError(f"{words}: {FIGURES[name]['command']} writes that") from error
    path = Path(folder, f"{name}.png").resolve()
    save(figure, path)
    return str(path)
