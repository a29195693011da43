"""What all figures share: one colour for one meaning, how a title is set, and bars of bytes. The rest of their look is
figures.mplstyle.

In grey the hatch or the tone tells two neighbours apart.
"""

import tomllib
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from zerolab.measure.tables import unit
from zerolab.run.engines import ENGINES

INK, PAPER, GRID, SHADE = "#24292f", "#ffffff", "#d8dee4", "#eef1f4"
SAID = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
COLOURS, HATCHES, MOVES = SAID["colours"], SAID["hatches"], SAID["moves"]
LANES, TIMES = SAID["lanes"], SAID["times"]
for _name, _bytes in MOVES.items():
    COLOURS[_name] = COLOURS[_bytes]
    HATCHES.setdefault(_name, HATCHES.get(_bytes, ""))

IN_FULL, OVER_LINES, BELOW = SAID["units"], SAID["over_lines"], SAID["below"]


def new(rows: int, columns: int = 1, height: float = 4.5, **options):
    """(figure, axes) of `rows` x `columns`, `height` in inches; `options` go to `plt.subplots`."""
    plt.style.use("zerolab.measure.figures")
    width = plt.rcParams["figure.figsize"][0]
    return plt.subplots(rows, columns, figsize=(width, height), **options)


def look(name: str) -> dict:
    """What matplotlib draws a patch of this part or activity with."""
    return {"facecolor": COLOURS[name], "hatch": HATCHES.get(name, "")}


def engine_look(name: str, **own) -> dict:
    """An engine is no part and no activity: it has a line of its own, a mark and a tone of grey, its name beside it."""
    engine = ENGINES.get(name)
    if engine is None:
        return {"marker": "o"} | own
    return {"color": engine.shade, "marker": engine.mark, "linestyle": engine.line} | own


def key(names, labels: dict[str, str] | None = None) -> list[Patch]:
    """The legend's entries for these parts or activities, by their names or by `labels`."""
    return [Patch(**look(name), label=(labels or {}).get(name, name)) for name in names]


def headline(figure, finding: str, shape: str) -> None:
    """The title: what the picture shows, and below what was measured."""
    figure.suptitle(f"{finding}\n{shape}")


def save(figure, path: str) -> None:
    figure.savefig(path)
    plt.close(figure)


def stacked(axes, place: float, parts: dict[str, float], height: float) -> float:
    """Draw a horizontal bar of these parts, one behind the other; returns where it ends."""
    end = 0.0
    for part, size in parts.items():
        axes.barh(place, size, height, left=end, **look(part))
        end += size
    return end


def bars(rows: dict[str, dict], title="", formula=None, means="formula", words=None, lines=()):
    """Horizontal bars, stacked by part: {label: {part: bytes}}. What is alike up to a comma stands close together.

    `formula` ({label: bytes}) is drawn as a tick across the bar, and `means` says in the legend what it is; `words`
    ({label: text}) stand behind the bar and its number; `lines` are bytes to mark, GPUs' sizes say.
    """
    formula, words = formula or {}, words or {}
    longest = max([*(sum(parts.values()) for parts in rows.values()), *formula.values()]) or 1e6
    name, size = unit(longest)
    figure, axes = new(1, height=0.36 * len(rows) + 1.7)
    groups = list(dict.fromkeys(label.partition(",")[0] for label in rows))
    places = []
    for index, (label, parts) in enumerate(rows.items()):
        place = 0.8 * index + 0.3 * groups.index(label.partition(",")[0])
        places.append(place)
        end = stacked(axes, place, {part: nbytes / size for part, nbytes in parts.items()}, 0.7)
        texts = [f"{end:.4g}"] if parts else []
        if label in formula:
            at = formula[label] / size
            for colour, width in ((PAPER, 4.5), (INK, 2)):
                axes.vlines(at, place - 0.42, place + 0.42, color=colour, linewidth=width)
            texts.append(f"formula {at:.4g}")
            end = max(end, at)
        if words.get(label):
            texts.append(words[label])
        behind = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(", ".join(texts), (end, place), bbox=OVER_LINES, **behind)
    for nbytes in lines:
        if nbytes <= 1.2 * longest:
            axes.axvline(nbytes / size, linewidth=0.8, linestyle=":")
            axes.text(nbytes / size, -0.62, f"{nbytes / size:g} {name}", ha="center", va="bottom", fontsize=8)
    axes.set_yticks(places, list(rows))
    axes.set(ylim=(places[-1] + 0.5, -0.6), xlim=(0, 1.3 * longest / size), xlabel=f"{IN_FULL[name]} on one rank")
    axes.set_title(title, pad=14 if lines else 6)
    drawn = {part for parts in rows.values() for part in parts if parts[part] > 1e-3 * longest}
    handles = key(part for part in COLOURS if part in drawn)
    if formula:
        handles.append(Line2D([], [], marker="|", markersize=10, markeredgewidth=2, linestyle="none", label=means))
    figure.legend(handles=handles, **BELOW)
    return figure
