"""What all pictures share: one colour for one meaning, the two papers, and how a title is set.

Every colour has a contrast of 3:1 or more on white and on the dark paper (WCAG 2.1, 1.4.11). In grey the hatch or the
tone tells two neighbours apart. tests/test_figures.py measures both.
"""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harness.measure.tables import unit
from harness.run.engines import ENGINES

# (colour, hatch) of what bytes are for. What is there for a moment only is hatched.
PART_STYLES = {
    "parameters": ("#1b60bb", ""),
    "gradients": ("#ec6e1a", ""),
    "optimizer": ("#37925d", ""),
    "gathered units": ("#4198e4", "////"),
    "gradients in flight": ("#c34b10", "\\\\\\\\"),
    "activations": ("#8e5cb1", ""),
    "temporaries": ("#93822b", "...."),
    "batch and buffers": ("#727272", "xxxx"),
}
PART_COLOURS = {part: colour for part, (colour, _) in PART_STYLES.items()}
# What a rank does: a collective has the colour of the bytes that it moves.
LANE_STYLES = {
    "forward": ("#37a1a5", ""),
    "backward": ("#226b77", ""),
    "gather": PART_STYLES["gathered units"],
    "reduce": PART_STYLES["gradients in flight"],
    "update": PART_STYLES["optimizer"],
}
LANE_COLOURS = {lane: colour for lane, (colour, _) in LANE_STYLES.items()}
# What a rank's step is spent on.
TIME_STYLES = {
    "compute": ("#2c7c84", ""),
    "host": ("#b28b70", ""),
    "optimizer": PART_STYLES["optimizer"],
    "all-reduce": (PART_COLOURS["gradients in flight"], "xxxx"),
    "reduce-scatter": PART_STYLES["gradients in flight"],
    "all-gather": PART_STYLES["gathered units"],
    "broadcast": ("#c5398b", "...."),
    "waiting": ("#d5586d", "----"),
}
ALARM = TIME_STYLES["waiting"][0]  # what goes wrong, or is lost

THEMES = {
    "": {"paper": "#ffffff", "ink": "#24292f", "grid": "#d8dee4", "shade": "#eef1f4"},
    "-dark": {"paper": "#0d1117", "ink": "#e6edf3", "grid": "#30363d", "shade": "#1b212a"},
}
IN_FULL = {"GB": "GB (10⁹ bytes)", "MB": "MB (10⁶ bytes)"}
WIDTH = 9.0  # inches at 110 dots: what a README shows without scaling


def new(theme: dict, rows: int, columns: int = 1, height: float = 4.5, **options):
    """(figure, axes) of `rows` x `columns` in a theme's colours, `height` in inches; `options` go to `plt.subplots`."""
    plt.rcParams.update({
        "font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False,
        "text.color": theme["ink"], "axes.labelcolor": theme["ink"], "axes.edgecolor": theme["ink"],
        "xtick.color": theme["ink"], "ytick.color": theme["ink"], "axes.facecolor": theme["paper"],
        "figure.facecolor": theme["paper"], "legend.frameon": False, "legend.fontsize": 9,
        "grid.color": theme["grid"], "hatch.color": theme["ink"], "hatch.linewidth": 0.7,
    })  # fmt: skip
    return plt.subplots(rows, columns, figsize=(WIDTH, height), layout="constrained", **options)


def ruled(axes, along: str = "y") -> None:
    """Thin lines behind what is drawn, where a number on this axis stands."""
    axes.grid(axis=along, linewidth=0.5)
    axes.set_axisbelow(True)


def look(style: tuple[str, str], theme: dict) -> dict:
    """What matplotlib draws a patch of this (colour, hatch) with: the hatch is cut out of it in the paper's colour."""
    return {"facecolor": style[0], "hatch": style[1], "edgecolor": theme["paper"], "linewidth": 0.5}


def engine_look(name: str, **own) -> dict:
    """An engine is no part and no activity: it has a line of its own, a mark and a tone of grey, its name beside it."""
    engine = ENGINES.get(name)
    if engine is None:
        return {"marker": "o"} | own
    return {"color": engine.shade, "marker": engine.mark, "linestyle": engine.line} | own


def key(styles: dict[str, tuple[str, str]], theme: dict) -> list[Patch]:
    """The legend's entries: {label: (colour, hatch)}."""
    return [Patch(**look(style, theme), label=label) for label, style in styles.items()]


def headline(figure, finding: str, shape: str) -> None:
    """The title: what the picture shows, and below what was measured."""
    figure.suptitle(f"{finding}\n{shape}", fontsize=11, linespacing=1.35)


def save(draw, results, path: str) -> list[str]:
    """Write what `draw(results, theme)` draws in every theme: PATH.png and PATH-dark.png. Returns the paths."""
    written = []
    for suffix, theme in THEMES.items():
        figure = draw(results, theme)
        written.append(f"{path}{suffix}.png")
        figure.savefig(written[-1], dpi=110)
        plt.close(figure)
    return written


def tick(axes, theme: dict, at: float, position: float, height: float) -> None:
    """A mark across a horizontal bar, `height` above and below its middle: what a formula says."""
    for colour, width in ((theme["paper"], 4.5), (theme["ink"], 2)):
        axes.vlines(at, position - height, position + height, color=colour, linewidth=width)


def beside(axes, theme: dict, text: str, at: float, position: float) -> None:
    """Words behind the end of a horizontal bar, over any lines."""
    paper = {"facecolor": theme["paper"], "edgecolor": "none", "pad": 0.5}
    axes.annotate(text, (at, position), (5, 0), textcoords="offset points", va="center", bbox=paper)


def bars(theme: dict, rows: dict[str, dict], title="", formula=None, means="formula", words=None, lines=()):
    """Horizontal bars, stacked by part: {label: {part: bytes}}. What is alike up to a comma stands close together.

    `formula` ({label: bytes}) is drawn as a tick across the bar, and `means` says in the legend what it is; `words`
    ({label: text}) stand behind the bar and its number; `lines` are bytes to mark, GPUs' sizes say.
    """
    formula, words = formula or {}, words or {}
    totals = {label: sum(parts.values()) for label, parts in rows.items()}
    longest = max([*totals.values(), *formula.values()]) or 1e6
    name, size = unit(longest)
    figure, axes = new(theme, 1, height=0.36 * len(rows) + 1.7)
    places, place = {}, 0.0
    for before, label in zip([None, *rows], rows):
        close = before is not None and before.partition(",")[0] == label.partition(",")[0]
        places[label] = place = place + (0.8 if close else 1.1) * (before is not None)
    for label, parts in rows.items():
        start = 0.0
        for kind, nbytes in parts.items():
            axes.barh(places[label], nbytes / size, 0.7, left=start, **look(PART_STYLES[kind], theme))
            start += nbytes / size
        at, texts = formula.get(label, 0) / size, [f"{start:.4g}"] if parts else []
        if label in formula:
            tick(axes, theme, at, places[label], 0.42)
            texts.append(f"formula {at:.4g}")
        texts += [words[label]] if words.get(label) else []
        beside(axes, theme, ", ".join(texts), max(start, at), places[label])
    for nbytes in lines:
        if nbytes <= 1.2 * longest:
            axes.axvline(nbytes / size, color=theme["ink"], linewidth=0.8, linestyle=":")
            axes.text(nbytes / size, -0.62, f"{nbytes / size:g} {name}", ha="center", va="bottom", fontsize=8)
    axes.set_yticks(list(places.values()), list(rows))
    axes.set(ylim=(place + 0.5, -0.6), xlim=(0, 1.3 * longest / size), xlabel=f"{IN_FULL[name]} on one rank")
    axes.set_title(title, pad=14 if lines else 6)
    drawn = {kind for parts in rows.values() for kind in parts if parts[kind] > 1e-3 * longest}
    handles = key({kind: style for kind, style in PART_STYLES.items() if kind in drawn}, theme)
    if formula:
        mark = {"marker": "|", "markersize": 10, "markeredgewidth": 2, "linestyle": "none", "color": theme["ink"]}
        handles.append(Line2D([], [], **mark, label=means))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure
