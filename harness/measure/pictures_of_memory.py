"""Pictures of bytes: what each rank keeps, what is alive at the peak and through a step, and on more ranks."""

from matplotlib.patches import Patch

from harness.measure import tables
from harness.measure.memory import GPUS, formula_name
from harness.measure.memory_parts import HELD, PARTS, STATE
from harness.measure.style import IN_FULL, PART_COLOURS, PART_STYLES, bars, engine_look, headline, key, look, new, ruled
from harness.run.engines import ENGINES, STAGES


def _unit(results: dict) -> tuple[str, float]:
    """One unit for all pictures of a model: that of its weights."""
    return tables.unit(4 * results["parameters"])


def _shape(results: dict) -> str:
    """What was measured, in one line."""
    ranks = f"{results['ranks']} ranks, " if isinstance(results["ranks"], int) else ""
    recomputed = ", activations recomputed" if results["checkpoint_activations"] else ""
    tokens = f"{results['batch']} x {results['seq']} tokens per rank"
    return f"GPT {results['preset']}, {ranks}{results['precision']}, {tokens}{recomputed}"


def _short(number: float) -> str:
    """Two digits at least: 1,419 and 0.49."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def stages(results: dict, theme: dict):
    """What each rank keeps between steps under DDP and the stages: filled what it keeps, empty what the others keep."""
    shown = {name: ENGINES[name].title for name in ("ddp", *STAGES)}
    figure, grid = new(theme, 1, len(shown), height=3.9, sharey=True)
    unit, size = _unit(results)
    whole, ranks, each = results["engines"]["ddp"]["held_bytes"], results["ranks"], results["parameters"]
    for axes, (name, title) in zip(grid, shown.items()):
        held = results["engines"][name]["held_bytes"]
        for rank in range(ranks):
            bottom = 0.0
            for part in HELD:
                height, kept = whole[part] / each, held[part] / each
                start = bottom + (rank * height / ranks if kept < 0.99 * height else 0)  # a shard lies at its place
                axes.bar(rank, height, 0.72, bottom, color=theme["shade"])
                axes.bar(rank, kept, 0.72, start, color=PART_COLOURS[part])
                axes.bar(rank, height, 0.72, bottom, color="none", edgecolor=theme["grid"], linewidth=0.8)
                bottom += height
        axes.set(title=f"{title}\n{sum(held.values()) / size:,.0f} {unit} on each rank", xlabel="rank")
        axes.set_xticks(range(ranks), range(ranks))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    grid[0].set(yticks=range(0, 17, 4), ylabel="bytes per parameter")
    handles = [Patch(color=PART_COLOURS[part], label=part) for part in HELD]
    handles[-1].set_label("optimizer state (AdamW)")
    handles.append(Patch(facecolor=theme["shade"], edgecolor=theme["grid"], label="not kept: another rank has it"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    precision = {"fp32": "float32", "bf16": "bfloat16 over float32"}[results["precision"]]
    times = sum(whole.values()) / sum(results["engines"]["zero3"]["held_bytes"].values())
    finding = f"Each stage stops keeping {ranks} copies of one thing more; ZeRO-3 keeps 1/{times:.3g} of DDP's bytes"
    headline(figure, finding, f"What each of {ranks} ranks keeps: {each / 1e6:,.0f} million parameters, {precision}")
    return figure


def no_gradients(row: dict) -> str:
    """Why a peak has no gradients although the rank holds some later, in a few words; "" where it has them."""
    if row["peak_parts"].get("gradients", 0) > 0.1 * row["held_bytes"]["gradients"]:
        return ""
    begun = row["peak_where"]["step"].startswith("1")
    return "late in forward, before any gradient" if begun else "early in backward, before most gradients"


def memory(results: dict, theme: dict):
    """Two bars per engine, stacked by part: held between steps with the formula as a tick, and the peak."""
    ran = {name: row for name, row in results["engines"].items() if "out_of_memory" not in row}
    rows, formula, words = {}, {}, {}
    for name, row in results["engines"].items():
        title = name + " (stand-in)" * bool(row.get("stand_in"))
        if name not in ran:
            rows[title], words[title] = {}, "out of memory"
            continue
        held, peak = f"{title}, held", f"{title}, peak"
        rows[held], rows[peak] = row["held_bytes"], {part: row["peak_parts"].get(part, 0) for part in PARTS}
        formula[held], words[peak] = row["formula_bytes"], no_gradients(row)
    gpus = tuple(gigabytes * 1e9 for gigabytes in GPUS)
    figure = bars(theme, rows, formula=formula, means=formula_name(results), words=words, lines=gpus)
    finding = "What a rank holds between steps, and the most that is alive at once"
    if {"ddp", "zero3"} <= {*ran}:
        unit, size = tables.unit(max(row["peak_bytes"] for row in ran.values()))
        ours, theirs = (sum(ran[name]["held_bytes"].values()) / size for name in ("zero3", "ddp"))
        finding = f"ZeRO-3 holds {ours:.0f} {unit} where DDP holds {theirs:.0f}, but needs "
        finding += f"{ran['zero3']['peak_bytes'] / size:.0f}: activations stay whole"
    headline(figure, finding, _shape(results))
    return figure


def live(results: dict, theme: dict, parts=PARTS, levels: dict[str, float] | None = None):
    """Live bytes along one step, stacked by part, a panel per engine; phases of equal width. Linear.

    With fewer `parts` only these are drawn: those that change, say. `levels` are lines across, {label: bytes}.
    """
    rows = {name: row for name, row in results["engines"].items() if "curve" in row}
    columns = min(3, len(rows))
    lines = -(-len(rows) // columns)
    unit, size = _unit(results)
    figure, grid = new(theme, lines, columns, height=2.5 * lines + 1.6, sharex=True, sharey=True, squeeze=False)
    seen = dict.fromkeys(PARTS, False)
    for axes, (name, row) in zip(grid.flat, rows.items()):
        xs, stacks = _along(row["curve"])
        bottom = [0.0] * len(xs)
        for part in parts:
            top = [low + nbytes * 1e6 / size for low, nbytes in zip(bottom, stacks[part])]
            if max(stacks[part]) > 1e-3 * max(top):
                style = look(PART_STYLES[part], theme) | {"linewidth": 0}  # an edge would hide the teeth
                axes.fill_between(xs, bottom, top, step="post", **style)
                seen[part] = True
            bottom = top
        for phase in (1, 2):
            axes.axvline(phase, color=theme["ink"], linewidth=0.8, linestyle=":")
        for text, nbytes in (levels or {}).items():
            axes.axhline(nbytes / size, color=theme["ink"], linewidth=0.8, linestyle="--")
            text = f"{text}, {_short(nbytes / size)} {unit}"
            axes.annotate(text, (3, nbytes / size), (-3, 2), textcoords="offset points", ha="right", fontsize=8)
        stand_in = " (stand-in)" if row.get("stand_in") else ""
        if len(rows) > 1:
            peak = f"peak {_short(row['peak_bytes'] / size)} {unit}"
            axes.set_title(f"{ENGINES[name].title}{stand_in}\n{peak}", loc="left")
        ruled(axes)
    for axes in list(grid.flat)[len(rows) :]:
        axes.set_visible(False)
    grid[0][0].set(xlim=(0, 3), ylim=(0, None))
    for axes in grid[-1]:
        axes.set_xticks([0.5, 1.5, 2.5], ["forward", "backward", "update"])
        axes.set_xlabel("fraction of each phase's events", fontsize=8)
        axes.tick_params(axis="x", length=0)
    for axes in grid[:, 0]:
        axes.set_ylabel(f"live {IN_FULL[unit]}")
    peaks = {name: row["peak_bytes"] / size for name, row in rows.items()}
    most, least = max(peaks, key=peaks.get), min(peaks, key=peaks.get)
    finding = f"{ENGINES[least].title} peaks at {_short(peaks[least])} {unit}"
    if len(rows) > 1:
        finding += f", {ENGINES[most].title} at {_short(peaks[most])}"
    if "zero2" in rows and "zero3" in rows:
        finding += ": ZeRO-2 climbs in stairs, ZeRO-3 goes up and down like a saw"
    absent = [part for part in HELD if part not in parts]
    if absent and len(rows) == 1:
        left_out = sum(rows[least]["peak_parts"].get(part, 0) for part in absent) / size
        finding += f", of which {_short(left_out)} are not drawn"
    headline(figure, finding, _shape(results) + (f"; not drawn: {', '.join(absent)}" if absent else ""))
    figure.legend(handles=key({part: PART_STYLES[part] for part in PARTS if seen[part]}, theme),
                  loc="outside lower center", ncols=4)  # fmt: skip
    return figure


def _along(curve: dict) -> tuple[list[float], dict[str, list[float]]]:
    """(x of every moment, {part: MB}): forward lies from 0 to 1, backward to 2, what follows to 3."""
    phases = ("1 forward", "2 backward")
    last = [phase for phase in dict.fromkeys(curve["phase"]) if phase not in phases]
    xs = []
    for phase, progress in zip(curve["phase"], curve["progress"]):
        first = phases.index(phase) if phase in phases else 2
        xs.append(first + (progress if phase in phases else (last.index(phase) + progress) / max(1, len(last))))
    return [*xs, 3], {part: [*curve[part], curve[part][-1]] for part in PARTS}


def scaling(results: dict, theme: dict):
    """Peak of one rank against the number of ranks, from two on, and what ZeRO-3's is for."""
    unit, size = _unit(results)
    figure, axes = new(theme, 1, height=5.6)
    shown = [index for index, number in enumerate(results["ranks"]) if number >= 2] or range(len(results["ranks"]))
    ranks = [results["ranks"][index] for index in shown]
    bottom, floor, seen = [0.0] * len(ranks), None, []
    if "zero3" in results["engines"]:
        # What sharding divides last, so that the floor lies at the bottom.
        order = [part for part in PARTS if part not in STATE] + ["gathered units", "gradients in flight"]
        order += [part for part in STATE if part not in order]
        for part in order:
            sizes = [results["engines"]["zero3"][index]["peak_parts"].get(part, 0) / size for index in shown]
            top = [low + size for low, size in zip(bottom, sizes)]
            if max(sizes) > 1e-3:
                axes.fill_between(ranks, bottom, top, **look(PART_STYLES[part], theme))
                seen.append(part)
            bottom = top
            if part == "gradients in flight":
                floor = top[-1]
    paper = {"facecolor": theme["paper"], "edgecolor": "none", "pad": 0.8}
    for name, rows in results["engines"].items():
        peaks = [rows[index]["peak_bytes"] / size for index in shown]
        axes.plot(ranks, peaks, markersize=4, linewidth=1.6, **engine_look(name, color=theme["ink"]))
        text = f"{ENGINES[name].title}, {peaks[-1]:.0f} {unit}"
        axes.annotate(text, (ranks[-1], peaks[-1]), (8, 0), textcoords="offset points", va="center", bbox=paper,
                      annotation_clip=False)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(number) for number in ranks])
    axes.set(xlim=(ranks[0], ranks[-1]), ylim=(0, None), xlabel="ranks N")
    axes.set_ylabel(f"{IN_FULL[unit]} on one rank at the peak")
    axes.minorticks_off()
    ruled(axes)
    finding = "More ranks divide the state, and nothing else"
    if floor is not None:
        finding += f": of ZeRO-3's peak {floor:.0f} {unit} stay on any number of ranks"
    headline(figure, finding, _shape(results))
    handles = key({f"ZeRO-3: {part}": PART_STYLES[part] for part in seen}, theme)
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure
