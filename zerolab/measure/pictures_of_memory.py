"""Pictures of bytes: what each rank keeps, what is alive at the peak and through a step, and on more ranks."""

from matplotlib.patches import Patch

from zerolab.measure import tables
from zerolab.measure.gpus import GPUS
from zerolab.measure.memory_parts import HELD, PARTS, STATE
from zerolab.measure.memory_tables import formula_name
from zerolab.measure.style import (
    BELOW,
    COLOURS,
    GRID,
    IN_FULL,
    INK,
    OVER_LINES,
    SHADE,
    bars,
    engine_look,
    headline,
    key,
    look,
    new,
)  # fmt: skip
from zerolab.run.engines import ENGINES, STAGES


def _unit(results: dict) -> tuple[str, float]:
    """One unit for all pictures of a model: that of its weights."""
    return tables.unit(4 * results["parameters"])


def _shape(results: dict) -> str:
    """What was measured, in one line."""
    ranks = f"{results['ranks']} ranks, " if isinstance(results["ranks"], int) else ""
    recomputed = ", activations recomputed" if results["checkpoint_activations"] else ""
    tokens = f"{results['batch']} x {results['seq']} tokens per rank"
    return f"GPT {results['preset']}, {ranks}{results['dtype']}, {tokens}{recomputed}"


def _short(number: float) -> str:
    """Two digits at least: 1,419 and 0.49."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def stages(results: dict):
    """What each rank keeps between steps under DDP and the stages: filled what it keeps, empty what the others keep."""
    shown = {name: results["engines"][name]["held_bytes"] for name in ("ddp", *STAGES)}
    figure, grid = new(1, len(shown), height=3.9, sharey=True)
    unit, size = _unit(results)
    whole, ranks, each = shown["ddp"], results["ranks"], results["parameters"]
    for axes, (name, held) in zip(grid, shown.items()):
        for rank in range(ranks):
            bottom = 0.0
            for part in HELD:
                height, kept = whole[part] / each, held[part] / each
                start = bottom
                if kept < 0.99 * height:  # a shard lies at its place
                    start += rank * height / ranks
                axes.bar(rank, height, 0.72, bottom, facecolor=SHADE, edgecolor=GRID)
                axes.bar(rank, kept, 0.72, start, facecolor=COLOURS[part])
                bottom += height
        total = f"{sum(held.values()) / size:,.0f} {unit} on each rank"
        axes.set(title=f"{ENGINES[name].title}\n{total}", xlabel="rank", xticks=range(ranks))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    grid[0].set(yticks=range(0, 17, 4), ylabel="bytes per parameter")
    handles = key(HELD, {"optimizer": "optimizer state (AdamW)"})
    handles.append(Patch(facecolor=SHADE, edgecolor=GRID, label="not kept: another rank has it"))
    figure.legend(handles=handles, **BELOW)
    precision = {"fp32": "float32", "bf16": "bfloat16 over float32"}[results["dtype"]]
    times = sum(whole.values()) / sum(shown["zero3"].values())
    finding = f"Each stage stops keeping {ranks} copies of one thing more; ZeRO-3 keeps 1/{times:.3g} of DDP's bytes"
    headline(figure, finding, f"What each of {ranks} ranks keeps: {each / 1e6:,.0f} million parameters, {precision}")
    return figure


def no_gradients(row: dict) -> str:
    """Why a peak has no gradients although the rank holds some later, in a few words; "" where it has them."""
    if row["peak_parts"].get("gradients", 0) > 0.1 * row["held_bytes"]["gradients"]:
        return ""
    begun = row["peak_where"]["step"].startswith("1")
    return "late in forward, before any gradient" if begun else "early in backward, before most gradients"


def memory(results: dict):
    """Two bars per engine, stacked by part: held between steps with the formula as a tick, and the peak."""
    rows, formula, words = {}, {}, {}
    for name, row in results["engines"].items():
        title = f"{name} (stand-in)" if row.get("stand_in") else name
        if "out_of_memory" in row:
            rows[title], words[title] = {}, "out of memory"
            continue
        held, peak = f"{title}, held", f"{title}, peak"
        rows[held], rows[peak] = row["held_bytes"], {part: row["peak_parts"].get(part, 0) for part in PARTS}
        formula[held], words[peak] = row["formula_bytes"], no_gradients(row)
    gpus = tuple(gigabytes * 1e9 for gigabytes in GPUS)
    figure = bars(rows, formula=formula, means=formula_name(results), words=words, lines=gpus)
    finding = "What a rank holds between steps, and the most that is alive at once"
    totals = {label: sum(parts.values()) / _unit(results)[1] for label, parts in rows.items()}
    if "ddp (stand-in), held" in rows and "zero3, peak" in rows:
        finding = f"ZeRO-3 holds {totals['zero3, held']:.0f} where DDP holds {totals['ddp (stand-in), held']:.0f}, "
        finding += f"but needs {totals['zero3, peak']:.0f} {_unit(results)[0]}: activations stay whole"
    headline(figure, finding, _shape(results))
    return figure


def live(results: dict, parts=PARTS, levels: dict[str, float] | None = None):
    """Live bytes along one step, stacked by part, a panel per engine; phases of equal width. Linear.

    With fewer `parts` only these are drawn: those that change, say. `levels` are lines across, {label: bytes}.
    """
    rows = {name: row for name, row in results["engines"].items() if "curve" in row}
    columns = min(3, len(rows))
    lines = -(-len(rows) // columns)
    unit, size = _unit(results)
    figure, grid = new(lines, columns, height=2.5 * lines + 1.6, sharex=True, sharey=True, squeeze=False)
    seen = set()
    for axes, (name, row) in zip(grid.flat, rows.items()):
        seen |= _stack(axes, row["curve"], parts, size / 1e6)
        for text, nbytes in (levels or {}).items():
            axes.axhline(nbytes / size, linewidth=0.8, linestyle="--")
            text = f"{text}, {_short(nbytes / size)} {unit}"
            axes.annotate(text, (3, nbytes / size), (-3, 2), textcoords="offset points", ha="right", fontsize=8)
        stand_in = " (stand-in)" if row.get("stand_in") else ""
        axes.set_title(f"{ENGINES[name].title}{stand_in}\npeak {_short(row['peak_bytes'] / size)} {unit}", loc="left")
    for axes in grid.flat[len(rows) :]:
        axes.set_visible(False)
    grid[0][0].set(xlim=(0, 3), ylim=(0, None))
    for axes in grid[-1]:
        axes.set_xticks([0.5, 1.5, 2.5], ["forward", "backward", "update"])
        axes.set_xlabel("fraction of each phase's events", fontsize=8)
        axes.tick_params(axis="x", length=0)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"live {IN_FULL[unit]}")
    finding = "Live bytes through one step"
    if "zero2" in rows and "zero3" in rows:
        finding += ": ZeRO-2 climbs in stairs, ZeRO-3 goes up and down like a saw"
    absent = [part for part in HELD if part not in parts]
    headline(figure, finding, _shape(results) + (f"; not drawn: {', '.join(absent)}" if absent else ""))
    figure.legend(handles=key(part for part in PARTS if part in seen), **BELOW)
    return figure


def _stack(axes, curve: dict, parts, megabytes: float) -> set[str]:
    """Draw `parts` over each other in a unit of so many `megabytes`; returns those that can be seen.

    Forward lies from 0 to 1, backward to 2, what follows to 3.
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
            axes.fill_between(xs, bottom, top, step="post", linewidth=0, **look(part))  # an edge would hide the teeth
            seen.add(part)
        bottom = top
    for phase in (1, 2):
        axes.axvline(phase, linewidth=0.8, linestyle=":")
    axes.grid(axis="y")
    return seen


def scaling(results: dict):
    """Peak of one rank against the number of ranks, from two on, and what ZeRO-3's is for."""
    unit, size = _unit(results)
    figure, axes = new(1, height=5.6)
    shown = [index for index, number in enumerate(results["ranks"]) if number >= 2] or range(len(results["ranks"]))
    ranks = [results["ranks"][index] for index in shown]
    bottom, seen = [0.0] * len(ranks), []
    # What sharding divides last: so what no number of ranks makes smaller lies at the bottom.
    order = [part for part in PARTS if part not in STATE] + ["gathered units", "gradients in flight", *HELD]
    for part in order if "zero3" in results["engines"] else ():
        sizes = [results["engines"]["zero3"][index]["peak_parts"].get(part, 0) / size for index in shown]
        top = [low + more for low, more in zip(bottom, sizes)]
        if max(sizes) > 1e-3:
            axes.fill_between(ranks, bottom, top, **look(part))
            seen.append(part)
        bottom = top
    for name, rows in results["engines"].items():
        peaks = [rows[index]["peak_bytes"] / size for index in shown]
        axes.plot(ranks, peaks, markersize=4, linewidth=1.6, **engine_look(name, color=INK))
        text = f"{ENGINES[name].title}, {peaks[-1]:.0f} {unit}"
        axes.annotate(text, (ranks[-1], peaks[-1]), (8, 0), textcoords="offset points", va="center", bbox=OVER_LINES,
                      annotation_clip=False)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, ranks)
    axes.set(xlim=(ranks[0], ranks[-1]), ylim=(0, None), xlabel="ranks N")
    axes.set_ylabel(f"{IN_FULL[unit]} on one rank at the peak")
    axes.minorticks_off()
    axes.grid(axis="y")
    headline(figure, "More ranks divide the state, and nothing else", _shape(results))
    figure.legend(handles=key(seen, {part: f"ZeRO-3: {part}" for part in seen}), **BELOW | {"ncols": 3})
    return figure
