"""The figures of README.md and docs/, drawn with matplotlib from the measurements in results/.

`./launch.sh docs` draws all of them into results/figures/. The notebooks draw some of them from their own measurements.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from zerolab.measure import tables
from zerolab.measure.gpus import GPUS
from zerolab.measure.ledger import HELD, PARTS, STATE
from zerolab.measure.memory import formula_name
from zerolab.run.engines import ENGINES, STAGES

RESULTS = Path(__file__).resolve().parents[2] / "results"

INK, PAPER, SHADE = "black", "white", "#ececec"
GATHERED, IN_FLIGHT, OPTIMIZER = "lightskyblue", "#ffbb78", "tab:green"
COLOURS = {  # one colour for one meaning, in all figures
    # what bytes are for
    "parameters": "tab:blue",
    "gradients": "tab:orange",
    "optimizer": OPTIMIZER,
    "gathered units": GATHERED,
    "gradients in flight": IN_FLIGHT,
    "activations": "tab:purple",
    "temporaries": "tab:olive",
    "batch and buffers": "tab:gray",
    # what a rank does. A collective has the colour of the bytes that it moves, an update the colour of the optimizer
    "forward": "lightseagreen",
    "backward": "teal",
    "update": OPTIMIZER,
    "gather": GATHERED,
    "reduce": IN_FLIGHT,
}
LANES = ("forward", "backward", "gather", "reduce", "update")
UNITS = {"GB": "GB (10⁹ bytes)", "MB": "MB (10⁶ bytes)"}
BOX = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.5}  # behind text that crosses lines


def new(rows: int, columns: int = 1, height: float = 4.5, **options):
    """(figure, axes) of `rows` x `columns` panels, `height` in inches. `options` go to `plt.subplots`."""
    return plt.subplots(rows, columns, figsize=(9, height), layout="constrained", **options)


def title(figure, finding: str, measured: str) -> None:
    """The title: what the figure shows, and in a second line what was measured."""
    figure.suptitle(f"{finding}\n{measured}", fontsize=11)


def legend(figure, names, labels: dict[str, str] | None = None, more=(), columns: int = 4) -> None:
    """A legend below the figure with the colours of `names`, which `labels` may replace, and the handles in `more`."""
    handles = [Patch(color=COLOURS[name], label=(labels or {}).get(name, name)) for name in names]
    figure.legend(handles=[*handles, *more], loc="outside lower center", ncols=columns, fontsize=9)


def light_grid(axes, axis: str = "both") -> None:
    axes.set_axisbelow(True)
    axes.grid(axis=axis, alpha=0.4)


def stacked(axes, place: float, parts: dict[str, float], height: float) -> float:
    """Draw a horizontal bar of these parts, end to end; returns where it ends."""
    end = 0.0
    for part, size in parts.items():
        axes.barh(place, size, height, left=end, color=COLOURS[part], edgecolor=PAPER, linewidth=0.5)
        end += size
    return end


def unit_of(results: dict) -> tuple[str, float]:
    """("GB" or "MB", its bytes): the same unit in all figures of a model."""
    return tables.unit(4 * results["parameters"])


def model_and_batch(results: dict) -> str:
    """The model and the batch of a dry run, in one line."""
    ranks = f"{results['ranks']} ranks, " if isinstance(results["ranks"], int) else ""
    return f"GPT {results['preset']}, {ranks}{results['dtype']}, {results['batch']} x {results['seq']} tokens per rank"


# Memory.


def stages(results: dict):
    """The bytes that each rank holds right before the update under DDP and the stages. Grey: another rank's."""
    shown = {name: results["engines"][name]["held_bytes"] for name in ("ddp", *STAGES)}
    figure, grid = new(1, len(shown), height=3.9, sharey=True)
    unit, size = unit_of(results)
    whole, ranks, parameters = shown["ddp"], results["ranks"], results["parameters"]
    for axes, (name, held) in zip(grid, shown.items()):
        for rank in range(ranks):
            bottom = 0.0
            for part in HELD:
                height, kept = whole[part] / parameters, held[part] / parameters
                start = bottom
                if kept < 0.99 * height:  # a shard is drawn at its place
                    start += rank * height / ranks
                axes.bar(rank, height, 0.72, bottom, color=SHADE)
                axes.bar(rank, kept, 0.72, start, color=COLOURS[part])
                bottom += height
        total = f"{sum(held.values()) / size:,.0f} {unit} on each rank"
        axes.set_title(f"{ENGINES[name].title}\n{total}", fontsize=11)
        axes.set(xlabel="rank", xticks=range(ranks))
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    grid[0].set(yticks=range(0, 17, 4), ylabel="bytes per parameter")
    not_kept = Patch(color=SHADE, label="not kept: another rank has it")
    legend(figure, HELD, {"optimizer": "optimizer state (AdamW)"}, more=[not_kept])
    times = sum(whole.values()) / sum(shown["zero3"].values())
    finding = f"Each stage shards one thing more, and ZeRO-3 keeps 1/{times:.3g} of DDP's bytes"
    title(figure, finding, f"Held by each of {ranks} ranks: {parameters / 1e6:,.0f} million parameters, float32")
    return figure


def bars(rows: dict[str, dict], heading="", formula=None, formula_label="formula", notes=None, gpus=()):
    """Horizontal bars, stacked by part: {label: {part: bytes}}. Labels that are equal up to a comma are one group.

    `formula` ({label: bytes}) is drawn as a tick across the bar, `notes` ({label: text}) follow the bar's number, and
    `gpus` (bytes) are dotted lines: what the memory of a GPU has room for.
    """
    formula, notes = formula or {}, notes or {}
    longest = max([*(sum(parts.values()) for parts in rows.values()), *formula.values()])
    unit, size = tables.unit(longest)
    figure, axes = new(1, height=0.36 * len(rows) + 1.7)
    groups = list(dict.fromkeys(label.partition(",")[0] for label in rows))
    places = []
    for index, (label, parts) in enumerate(rows.items()):
        place = 0.8 * index + 0.3 * groups.index(label.partition(",")[0])
        places.append(place)
        end = stacked(axes, place, {part: nbytes / size for part, nbytes in parts.items()}, 0.7)
        texts = [f"{end:.4g}"]
        if label in formula:
            at = formula[label] / size
            axes.vlines(at, place - 0.42, place + 0.42, color=INK, linewidth=2)
            texts.append(f"formula {at:.4g}")
            end = max(end, at)
        if notes.get(label):
            texts.append(notes[label])
        axes.annotate(
            ", ".join(texts), (end, place), (5, 0), textcoords="offset points", va="center", fontsize=9, bbox=BOX
        )
    for nbytes in gpus:
        if nbytes <= 1.2 * longest:
            axes.axvline(nbytes / size, color=INK, linewidth=0.8, linestyle=":", zorder=0)
            axes.text(nbytes / size, -0.62, f"{nbytes / size:g} {unit}", ha="center", va="bottom", fontsize=8)
    axes.set_yticks(places, list(rows))
    axes.set(ylim=(places[-1] + 0.5, -0.6), xlim=(0, 1.35 * longest / size), xlabel=f"{UNITS[unit]} on one rank")
    axes.set_title(heading, pad=14 if gpus else 6, fontsize=11)
    drawn = [part for part in PARTS if any(parts.get(part, 0) > 1e-3 * longest for parts in rows.values())]
    tick = Line2D([], [], color=INK, marker="|", markersize=10, markeredgewidth=2, linestyle="none")
    tick.set_label(formula_label)
    legend(figure, drawn, more=[tick] if formula else [])
    return figure


def why_no_gradients(row: dict) -> str:
    """Why a peak has no gradients although the rank holds some later, in a few words; "" if it has them."""
    if row["peak_parts"].get("gradients", 0) > 0.1 * row["held_bytes"]["gradients"]:
        return ""
    in_forward = row["peak_where"]["step"].startswith("1")
    return "late in forward, before any gradient" if in_forward else "early in backward, before most gradients"


def memory(results: dict):
    """Two bars per engine, stacked by part: held right before the update with the formula as a tick, and the peak."""
    rows, formula, notes = {}, {}, {}
    for name, row in results["engines"].items():
        label = f"{name} (stand-in)" if row.get("stand_in") else name
        held, peak = f"{label}, held", f"{label}, peak"
        rows[held], rows[peak] = row["held_bytes"], {part: row["peak_parts"].get(part, 0) for part in PARTS}
        formula[held], notes[peak] = row["formula_bytes"], why_no_gradients(row)
    gpus = [gigabytes * 1e9 for gigabytes in GPUS]
    figure = bars(rows, formula=formula, formula_label=formula_name(results), notes=notes, gpus=gpus)
    unit, size = unit_of(results)
    totals = {label: f"{sum(parts.values()) / size:.0f} {unit}" for label, parts in rows.items()}
    finding = (
        f"ZeRO-3 holds {totals['zero3, held']} instead of DDP's {totals['ddp (stand-in), held']}. "
        f"Its peak is {totals['zero3, peak']}: activations are not sharded"
    )
    title(figure, finding, model_and_batch(results))
    return figure


def live(results: dict, parts=PARTS, levels: dict[str, float] | None = None):
    """Live bytes during one step, stacked by part, a panel per engine; the phases have equal widths.

    Only `parts` are drawn: those that change, for example. `levels` ({label: bytes}) are lines across.
    """
    rows = {name: row for name, row in results["engines"].items() if "curve" in row}
    columns = min(3, len(rows))
    lines = -(-len(rows) // columns)
    unit, size = unit_of(results)
    figure, grid = new(lines, columns, height=2.5 * lines + 1.6, sharex=True, sharey=True, squeeze=False)
    seen = set()
    for axes, (name, row) in zip(grid.flat, rows.items()):
        seen |= _stack_curve(axes, row["curve"], parts, size / 1e6)
        for text, nbytes in (levels or {}).items():
            axes.axhline(nbytes / size, color=INK, linewidth=0.8, linestyle="--")
            text = f"{text}, {_two_digits(nbytes / size)} {unit}"
            axes.annotate(text, (3, nbytes / size), (-3, 2), textcoords="offset points", ha="right", fontsize=8)
        stand_in = " (stand-in)" if row.get("stand_in") else ""
        heading = f"{ENGINES[name].title}{stand_in}\npeak {_two_digits(row['peak_bytes'] / size)} {unit}"
        axes.set_title(heading, loc="left", fontsize=10)
    for axes in grid.flat[len(rows) :]:
        axes.set_visible(False)
    grid[0][0].set(xlim=(0, 3), ylim=(0, None))
    for axes in grid[-1]:
        axes.set_xticks([0.5, 1.5, 2.5], ["forward", "backward", "update"])
        axes.set_xlabel("fraction of each phase's events", fontsize=8)
        axes.tick_params(axis="x", length=0)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"live {UNITS[unit]}")
    finding = "Live bytes during one step"
    if "zero2" in rows and "zero3" in rows:
        finding += ": ZeRO-2 adds shards of gradients, ZeRO-3 gathers and frees units"
    absent = [part for part in HELD if part not in parts]
    title(figure, finding, model_and_batch(results) + (f"; not drawn: {', '.join(absent)}" if absent else ""))
    legend(figure, [part for part in PARTS if part in seen])
    return figure


def _two_digits(number: float) -> str:
    """At least two digits: 1,419 and 0.49."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _stack_curve(axes, curve: dict, parts, megabytes: float) -> set[str]:
    """Draw `parts` on top of each other, in units of `megabytes` MB. Returns the parts that are visible.

    Forward is drawn from 0 to 1, backward to 2, the rest of the step to 3.
    """
    phases = {"1 forward": 0, "2 backward": 1}
    last = [phase for phase in dict.fromkeys(curve["phase"]) if phase not in phases]
    xs = []
    for phase, progress in zip(curve["phase"], curve["progress"]):
        xs.append(phases[phase] + progress if phase in phases else 2 + (last.index(phase) + progress) / len(last))
    xs.append(3)
    bottom, seen = [0.0] * len(xs), set()
    for part in parts:
        sizes = [*curve[part], curve[part][-1]]
        top = [low + more / megabytes for low, more in zip(bottom, sizes)]
        if max(sizes) > 1e-3 * megabytes * max(top):
            axes.fill_between(xs, bottom, top, step="post", linewidth=0, color=COLOURS[part])
            seen.add(part)
        bottom = top
    for phase in (1, 2):
        axes.axvline(phase, color=INK, linewidth=0.8, linestyle=":")
    light_grid(axes, "y")
    return seen


def scaling(results: dict):
    """Peak of one rank against the number of ranks, from two on, and what ZeRO-3's peak is for."""
    unit, size = unit_of(results)
    figure, axes = new(1, height=5.6)
    shown = [index for index, number in enumerate(results["ranks"]) if number >= 2]
    ranks = [results["ranks"][index] for index in shown]
    bottom, seen = [0.0] * len(ranks), []
    # At the bottom is what sharding does not divide.
    order = [part for part in PARTS if part not in STATE] + ["gathered units", "gradients in flight", *HELD]
    for part in order:
        sizes = [results["engines"]["zero3"][index]["peak_parts"].get(part, 0) / size for index in shown]
        top = [low + more for low, more in zip(bottom, sizes)]
        if max(sizes) > 1e-3 * max(top):
            axes.fill_between(ranks, bottom, top, color=COLOURS[part], linewidth=0)
            seen.append(part)
        bottom = top
    for (name, rows), marker in zip(results["engines"].items(), "os^D"):
        peaks = [rows[index]["peak_bytes"] / size for index in shown]
        axes.plot(ranks, peaks, markersize=4, linewidth=1.6, color=INK, marker=marker)
        text = f"{ENGINES[name].title}, {peaks[-1]:.0f} {unit}"
        axes.annotate(
            text, (ranks[-1], peaks[-1]), (8, 0), textcoords="offset points", va="center", annotation_clip=False
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, ranks)
    axes.set(xlim=(ranks[0], ranks[-1]), ylim=(0, None), xlabel="ranks N")
    axes.set_ylabel(f"peak of one rank, {UNITS[unit]}")
    axes.minorticks_off()
    light_grid(axes, "y")
    title(
        figure,
        "More ranks divide parameters, gradients and optimizer state, and nothing else",
        model_and_batch(results),
    )
    legend(figure, seen, {part: f"ZeRO-3: {part}" for part in seen}, columns=3)
    return figure


# A training run.


def curves(results: dict):
    """Losses of training runs, and how far each is from the first one, which is DDP's, in every step."""
    figure, (above, below) = new(2, height=6.4, sharex=True, height_ratios=(3, 2))
    first, *others = results["runs"]
    looks = {first: {"color": "#c8c8c8", "linewidth": 5}}
    looks |= {name: {"linewidth": 1.2, "linestyle": line} for name, line in zip(others, ("-", "--", "-.", ":"))}
    reference = results["runs"][first]["losses"]
    for name, run in results["runs"].items():
        steps = range(1, len(run["losses"]) + 1)
        above.plot(steps, run["losses"], label=name, **looks[name])
        apart = [abs(loss - other) for loss, other in zip(run["losses"], reference)]
        if name != first:
            below.plot(steps, [max(each, 1e-8) for each in apart], label=name, **looks[name])
    above.set(ylabel="training loss, nats per byte", xlim=(0, results["steps"]))
    below.set(yscale="log", ylabel=f"difference from {first}", xlabel="step")
    above.legend(fontsize=9)
    for axes in (above, below):
        light_grid(axes)
    title(
        figure,
        "The stages train as DDP does, also across a crash and a change of stage",
        f"GPT {results['preset']}, {results['ranks']} ranks, clipped gradients; differences below 1e-8 are drawn there",
    )
    return figure


# Time.


def lanes(*traces: dict):
    """For each rank of each trace: what it computes and which collectives are in flight; below, the live memory."""
    read, heights = [*map(_read, traces)], []
    for _, memory in read:
        heights += [2 * len(memory) + 0.6, 2]
    height = 0.62 * sum(heights[::2]) + 1.3 * len(traces) + 1.3
    figure, grid = new(len(heights), height=height, gridspec_kw={"height_ratios": heights})
    for trace, (rows, memory), axes, below in zip(traces, read, grid[::2], grid[1::2]):
        # Each trace has its own scale: one step says nothing about speed.
        latest = max(bar.start + bar.length for bars in rows.values() for bar in bars)
        for place, row in enumerate(rows):
            _draw_row(axes, place, rows[row], latest)
        axes.set_yticks(range(len(rows)), [f"rank {rank} {what}" for rank, what in rows])
        axes.set_ylim(len(rows) - 0.4, -0.8)
        axes.set_title(trace["otherData"]["title"], loc="left", fontsize=10)
        axes.set(xlim=(0, 1.02 * latest), xticklabels=[])
        for rank, points in memory.items():
            style = ("-", ":", "--", "-.")[rank % 4]
            below.step(*zip(*points), where="post", color=INK, linewidth=1, linestyle=style, label=f"rank {rank}")
        light_grid(below, "y")
        xlabel = "ms since the step began; the numbers are units or buckets"
        below.set(xlim=(0, 1.02 * latest), ylim=(0, None), xlabel=xlabel, ylabel="live MB")
    grid[-1].legend(loc="lower right", ncols=4, fontsize=9)
    measured = "A gather or reduce begins when it is issued, and includes waiting"
    title(figure, "One step, watched by the instruments: compare the order, not the lengths", measured)
    legend(figure, LANES, columns=5)
    return figure


@dataclass
class Bar:
    """Computation of a rank, or a collective, in milliseconds since the step began.

    `number` is the unit's or bucket's, `second` whether another collective of its kind was already in flight.
    """

    what: str  # one of LANES
    start: float
    length: float
    number: str
    second: bool


DOES = {"1": "forward", "2": "backward", "4": "update"}  # the number of a step, and what a rank does in it
MOVES = {"all-gather": "gather", "reduce-scatter": "reduce", "all-reduce": "reduce"}


def _read(trace: dict) -> tuple[dict[tuple, list[Bar]], dict]:
    """({(rank, "compute", "gather" or "reduce"): its bars in order}, {rank: [(ms, live MB)]}) of a trace's step."""
    rows, memory, threads = defaultdict(list), defaultdict(list), {}
    begins = trace["otherData"].get("step_begins_ms", 0)  # older traces have the stage's construction before it
    for event in sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0)):  # names of threads come first
        rank, about = event["pid"], event["args"]
        start = event.get("ts", 0) / 1e3 - begins
        if event["name"] == "thread_name":
            threads[rank, event["tid"]] = about["name"]
        elif event["name"] == "live":
            memory[rank].append((start, about["MB"]))
        elif event.get("cat") == "collectives" and event["name"] in MOVES and start >= 0:
            second = threads[rank, event["tid"]].endswith(" 2")  # it has its own thread
            what = MOVES[event["name"]]
            rows[rank, what].append(Bar(what, start, event["dur"] / 1e3, _number(about.get("unit", "")), second))
        elif event.get("cat") == "compute" and about.get("step", "")[:1] in DOES and start >= 0:
            what = DOES[about["step"][0]]
            rows[rank, "compute"].append(Bar(what, start, event["dur"] / 1e3, _number(event["name"]), False))
    return dict(sorted(rows.items())), memory


def _number(name: str) -> str:
    """ "3" of "blocks.3" and of "bucket 3", "R" of the root."""
    return "R" if name == "root" else re.split("[. ]", name)[-1]


def _draw_row(axes, row: int, bars: list[Bar], latest: float) -> None:
    """One row of a rank: its computation, its gathers or its reductions."""
    free_from = 0.0  # where the next number may begin
    for bar in bars:
        middle = bar.start + bar.length / 2
        if bar.what in ("gather", "reduce"):  # lower, so that there is room for the number above
            bottom, height = (row + 0.12, 0.28) if bar.second else (row - 0.16, 0.56)
            middle = max(middle, free_from)
            axes.text(middle, row - 0.19, bar.number, ha="center", va="bottom", fontsize=7)
            free_from = middle + 0.011 * latest
        else:
            bottom, height = row - 0.4, 0.8
            if bar.what != "update" and bar.number != "R" and bar.length > 0.018 * latest:
                axes.text(middle, row, bar.number, ha="center", va="center", fontsize=8, color=PAPER)
        colours = {"facecolor": COLOURS[bar.what], "edgecolor": PAPER, "linewidth": 0.5}
        axes.broken_barh([(bar.start, bar.length)], (bottom, height), **colours)


# All of them.


# {name: (the function that draws the figure, its files in results/)}
FIGURES: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "stages": (stages, ("memory-small-4ranks-64-tokens.json",)),
    "memory": (memory, ("memory-7b-8ranks.json",)),
    "live": (live, ("memory-small-4ranks-64-tokens.json",)),
    "lanes": (lanes, ("trace-zero3-cpu-2ranks.json", "trace-zero3-no-prefetch-cpu-2ranks.json")),
    "curves": (curves, ("curves-cpu-2ranks.json",)),
    "scaling": (scaling, ("memory-7b-1-to-1024-ranks.json",)),
}


def draw(name: str, folder: Path = RESULTS / "figures") -> Path:
    """Write the figure to `folder`, from its files in results/; returns its path."""
    function, files = FIGURES[name]
    figure = function(*(json.loads((RESULTS / file).read_text()) for file in files))
    path = folder / f"{name}.png"
    save(figure, path)
    return path


def save(figure, path: str | Path) -> None:
    """Write the figure, 990 pixels wide, and close it."""
    figure.savefig(path, dpi=110)
    plt.close(figure)
