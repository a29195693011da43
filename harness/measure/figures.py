"""The pictures, drawn from measured JSON: nothing here computes a number that a run has not written down.

Run it: ./launch.sh figures            all of them, from results/ to results/figures/
        ./launch.sh figures memory --json results/memory-7b-8ranks.json --out /tmp
"""

import argparse
import json
import os
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

from harness.measure.dry_run import formula_name
from harness.measure.parts import HELD, PARTS, STATE
from harness.run import journal

# One colour means one thing in all figures. What bytes are for, and what a rank does with them at the time:
PART_COLOURS = {
    "parameters": "#3b7dd8",
    "gradients": "#e8853a",
    "optimizer": "#3fa66b",
    "gathered units": "#8fbcf0",
    "gradients in flight": "#f6c08f",
    "activations": "#9b8fb8",
    "temporaries": "#c9b458",
    "batch and buffers": "#888888",
}
LANE_COLOURS = {
    "forward": "#6f9a9a",
    "backward": "#a86f8c",
    "gather": PART_COLOURS["gathered units"],
    "reduce": PART_COLOURS["gradients in flight"],
    "update": PART_COLOURS["optimizer"],
}
ENGINE_COLOURS = {
    "single": "#999999",
    "ddp": "#d1495b",
    "zero1": "#edae49",
    "zero1_2psi": "#c77d1e",
    "zero_redundancy_optimizer": "#b98b2d",
    "zero2": "#30a5a0",
    "fsdp2_no_reshard": "#1f6f78",
    "zero3": "#5b6ee1",
    "fsdp2": "#b04fc9",
}
# What a rank's step is spent on: (colour, hatch). All colours can be told from white and from the dark paper, and in
# grey the hatch tells them apart.
TIME_STYLES = {
    "compute": ("#2d6a8f", ""),
    "host": ("#7f7a72", ""),
    "optimizer": ("#4f9e57", ""),
    "all-reduce": ("#c0504d", "xxxx"),
    "reduce-scatter": ("#b8732a", "\\\\\\\\"),
    "all-gather": ("#7a68c9", "////"),
    "broadcast": ("#b84f96", "...."),
    "waiting": ("#a38a1f", "----"),
}
TIME_LABELS = {"host": "host, between operations", "waiting": "waiting for the slowest rank"}
ENGINE_LINES = {"zero_redundancy_optimizer": "--", "fsdp2_no_reshard": "--", "fsdp2": "--", "single": ":"}

THEMES = {
    "": {"paper": "#ffffff", "ink": "#24292f", "grid": "#d8dee4", "shade": "#eef1f4"},
    "-dark": {"paper": "#0d1117", "ink": "#e6edf3", "grid": "#30363d", "shade": "#1b212a"},
}
WIDTH = 9.0  # inches at 110 dots: what a README shows without scaling


def new(theme: dict, rows: int, columns: int = 1, height: float = 4.5, **options):
    """(figure, axes) of `rows` x `columns` in a theme's colours, `height` in inches; `options` go to `plt.subplots`."""
    plt.rcParams.update({
        "font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False,
        "text.color": theme["ink"], "axes.labelcolor": theme["ink"], "axes.edgecolor": theme["ink"],
        "xtick.color": theme["ink"], "ytick.color": theme["ink"], "axes.facecolor": theme["paper"],
        "figure.facecolor": theme["paper"], "legend.frameon": False, "legend.fontsize": 9,
        "grid.color": theme["grid"], "hatch.color": theme["ink"], "hatch.linewidth": 0.6,
    })  # fmt: skip
    return plt.subplots(rows, columns, figsize=(WIDTH, height), layout="constrained", **options)


def stages(results: dict, theme: dict):
    """What each rank keeps between steps under DDP and the stages: filled what it keeps, empty what the others keep."""
    shown = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
    figure, grid = new(theme, 1, len(shown), height=3.7, sharey=True)
    unit, size = ("GB", 1e9) if results["parameters"] > 2.5e8 else ("MB", 1e6)
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
        axes.set_title(f"{title}\n{sum(held.values()) / size:,.0f} {unit} on each rank")
        axes.set_xticks(range(ranks), range(ranks))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("rank")
    grid[0].set_yticks(range(0, 17, 4))
    grid[0].set_ylabel("bytes per parameter")
    handles = [Patch(color=PART_COLOURS[part], label=part) for part in HELD]
    handles[-1].set_label("optimizer state (AdamW)")
    handles.append(Patch(facecolor=theme["shade"], edgecolor=theme["grid"], label="not kept: another rank has it"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    precision = {"fp32": "float32", "bf16": "bfloat16 over float32"}[results["precision"]]
    figure.suptitle(f"What each of {ranks} ranks keeps: {each / 1e6:,.0f} million parameters, {precision}", fontsize=11)
    return figure


def memory(results: dict, theme: dict):
    """Bars per engine, stacked by part: held between steps, under the formula (hatched), and the peak."""
    unit, size = ("GB (10⁹ bytes)", 1e9) if results["parameters"] > 2.5e8 else ("MB (10⁶ bytes)", 1e6)
    figure, axes = new(theme, 1, height=0.62 * len(results["engines"]) + 1.9)
    names = []
    for position, (name, row) in enumerate(results["engines"].items()):
        if "out_of_memory" in row:
            axes.text(0, position, "  out of memory", va="center")
        else:
            start = 0
            for part in PARTS:
                nbytes = row["peak_parts"].get(part, 0) / size
                axes.barh(position + 0.19, nbytes, 0.36, left=start, color=PART_COLOURS[part])
                start += nbytes
            axes.text(start, position + 0.19, f" {start:.2f} at the peak", va="center")
            held = 0
            for part, nbytes in row["held_bytes"].items():
                axes.barh(position - 0.19, nbytes / size, 0.36, left=held, color=PART_COLOURS[part])
                held += nbytes / size
            formula = row["formula_bytes"] / size
            axes.barh(position - 0.19, formula, 0.36, color="none", edgecolor=theme["ink"], hatch="///", linewidth=0.8)
            axes.text(max(held, formula), position - 0.19, f" {held:.2f} held, formula {formula:.2f}", va="center")
        names.append(name + (" (stand-in)" if row.get("stand_in") else ""))
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} on one rank")
    axes.margins(x=0.17)
    recomputed = ", activations recomputed" if results["checkpoint_activations"] else ""
    shape = f"GPT {results['preset']}, {results['ranks']} ranks, {results['precision']}"
    axes.set_title(f"Memory of one rank: {shape}, {results['batch']} x {results['seq']} tokens per rank{recomputed}")
    handles = [Patch(color=PART_COLOURS[part], label=part) for part in PARTS[:-1]]
    handles.append(Patch(facecolor="none", edgecolor=theme["ink"], hatch="///", label=formula_name(results)))
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def live(results: dict, theme: dict):
    """Live bytes along one step, one line per engine; phases of equal width. Logarithmic."""
    unit, megabytes = ("GB (10⁹ bytes)", 1e3) if results["parameters"] > 2.5e8 else ("MB (10⁶ bytes)", 1)
    figure, axes = new(theme, 1, height=5.2)
    phases = ("1 forward", "2 backward", "update")
    for number, phase in enumerate(phases):
        if number % 2 == 0:
            axes.axvspan(number, number + 1, color=theme["shade"], zorder=0)
        label = {"update": "3 to 5: reduce what is left,\nupdate the shard, gather"}.get(phase, f"step {phase}")
        axes.text(number + 0.5, 0.985, label, transform=axes.get_xaxis_transform(), ha="center", va="top")
    for name, row in results["engines"].items():
        if name == "fsdp2_no_reshard" or "curve" not in row:
            continue
        curve = row["curve"]
        last = [phase for phase in dict.fromkeys(curve["phase"]) if phase not in phases]
        xs, ys = [], []
        for index, (phase, progress) in enumerate(zip(curve["phase"], curve["progress"])):
            if phase in phases:
                xs.append(phases.index(phase) + progress)
            else:
                xs.append(2 + (last.index(phase) + progress) / max(1, len(last)))
            ys.append(sum(curve[part][index] for part in PARTS) / megabytes)
        style = {"linestyle": ENGINE_LINES.get(name, "-"), "linewidth": 1.3, "color": ENGINE_COLOURS[name]}
        axes.plot([*xs, 3], [*ys, ys[-1]], label=name + (" (stand-in)" if row.get("stand_in") else ""), **style)
    axes.set_yscale("log")
    lowest, highest = axes.get_ylim()
    axes.set_ylim(lowest, highest * (highest / lowest) ** 0.1)  # room for the phases' names
    round_numbers = (*range(10, 100, 10), *range(100, 1000, 100), *range(1000, 5000, 500))
    ticks = [number for number in round_numbers if lowest < number < highest]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", linewidth=0.5)
    axes.set_xlim(0, 3)
    axes.set_xticks([0, 0.5, 1, 1.5, 2, 2.5, 3], ["0", "½", "1 | 0", "½", "1 | 0", "½", "1"])
    axes.set_xlabel("progress within the phase (fraction of its allocations and frees)")
    axes.set_ylabel(f"live {unit} on one rank, log scale")
    shape = f"GPT {results['preset']}, {results['ranks']} ranks, {results['precision']}"
    batch = f"{results['batch']} x {results['seq']} tokens per rank"
    batch += ", recomputed" if results["checkpoint_activations"] else ""
    axes.set_title(f"Live memory through one step: {shape}, {batch}", pad=12)
    figure.legend(loc="outside lower center", ncols=5)
    return figure


def lanes(results: list[tuple[str, dict]], theme: dict):
    """Per rank: what it computes, and which collectives are under way, from traces; below, the live memory."""
    figure, grid = new(theme, 2 * len(results), height=3.5 * len(results) + 0.7, sharex=True,
                        gridspec_kw={"height_ratios": [2, 1] * len(results)})  # fmt: skip
    latest = 0
    for number, (title, trace) in enumerate(results):
        axes, strip, begins = grid[2 * number], grid[2 * number + 1], trace["otherData"]["step_begins_ms"]
        ranks = sorted({event["pid"] for event in trace["traceEvents"]})
        threads = {(event["pid"], event["tid"]): event["args"]["name"]
                   for event in trace["traceEvents"] if event["ph"] == "M" and "tid" in event}  # fmt: skip
        rows = [(rank, lane) for rank in ranks for lane in ("compute", "gather", "reduce")]
        for event in trace["traceEvents"]:
            if event["ph"] != "X" or event["ts"] / 1e3 < begins or event["cat"] == "steps":
                continue
            kind = _lane(event)
            if kind is None:
                continue
            row = rows.index((event["pid"], kind if kind in ("gather", "reduce") else "compute"))
            start, length = event["ts"] / 1e3 - begins, event["dur"] / 1e3
            latest = max(latest, start + length)
            # One that is under way beside another of its kind has a thread of its own, and half the height.
            place = (row, 0.4) if threads[event["pid"], event["tid"]].endswith(" 2") else (row - 0.4, 0.8)
            style = {"facecolor": LANE_COLOURS[kind], "edgecolor": theme["paper"], "linewidth": 0.6}
            axes.broken_barh([(start, length)], place, **style)
            if kind in ("forward", "backward") and length > 4 and event["name"] != "root":
                name = event["name"].rpartition(".")[2]
                axes.text(start + length / 2, row, name, ha="center", va="center", fontsize=7, color="#ffffff")
        axes.set_yticks(range(len(rows)), [f"rank {rank} {lane}" for rank, lane in rows])
        axes.invert_yaxis()
        axes.set_title(title, loc="left")
        for rank in ranks:
            counters = [e for e in trace["traceEvents"] if e["name"] == "live" and e["pid"] == rank]
            points = [(event["ts"] / 1e3 - begins, event["args"]["MB"]) for event in counters]
            style = {"linewidth": 1.0, "linestyle": ("-", ":", "--", "-.")[rank % 4]}
            strip.step(*zip(*points), where="post", color=theme["ink"], label=f"rank {rank}", **style)
        strip.set_ylabel("live MB")
        strip.set_ylim(bottom=0)
        strip.grid(axis="y", linewidth=0.5)
    grid[-1].legend(loc="lower right", ncols=4)
    grid[-1].set_xlabel("ms since the step began (numbers: the unit at work)")
    grid[-1].set_xlim(0, latest)
    handles = [Patch(color=colour, label=label) for label, colour in LANE_COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure


def _lane(event: dict) -> str | None:
    """Which of the lanes' colours an event of a trace has."""
    if event["cat"] == "collectives":
        return {"all-gather": "gather", "reduce-scatter": "reduce", "all-reduce": "reduce"}.get(event["name"])
    step = event["args"].get("step", "")
    if step.startswith("1"):
        return "forward"
    if step.startswith("2"):
        return "backward"
    return "update" if step.startswith("4") else None


def losses(results: dict, theme: dict):
    """Every engine's losses on one axis, and below how far each is from the reference, on a log axis with a zero."""
    figure, (above, below) = new(theme, 2, height=5.6, sharex=True, gridspec_kw={"height_ratios": [3, 2]})
    reference = "ddp" if "ddp" in results["runs"] else next(iter(results["runs"]))
    for number, (name, run) in enumerate(results["runs"].items()):
        steps = range(1, len(run["losses"]) + 1)
        style = {"color": ENGINE_COLOURS.get(name, "#777777"), "linestyle": ENGINE_LINES.get(name, "-")}
        above.plot(steps, run["losses"], label=name, linewidth=5 - 0.55 * number, alpha=0.85, **style)
        if name != reference:
            off = [abs(a - b) for a, b in zip(run["losses"], results["runs"][reference]["losses"])]
            below.plot(steps, off, marker="o", markersize=6 - 0.6 * number, linewidth=1.2, **style)
    tolerance = max(run.get("tolerance", 0) for run in results["runs"].values())
    if tolerance:
        below.axhline(tolerance, color=theme["ink"], linewidth=0.8, linestyle="--")
        below.text(1, tolerance, " allowed where sums have another order", va="bottom", fontsize=8)
    below.set_yscale("symlog", linthresh=1e-8)
    below.set_ylim(-3e-9, max(tolerance, 1e-5) * 12)
    below.set_yticks([0, 1e-8, 1e-6, 1e-4, 1e-2], ["0, to the bit", "10⁻⁸", "10⁻⁶", "10⁻⁴", "10⁻²"])
    below.minorticks_off()
    above.set_ylabel("loss, nats per token")
    below.set_ylabel(f"difference from {reference}, nats")
    below.set_xlabel("training step")
    for axes in (above, below):
        axes.grid(linewidth=0.5)
    shape = f"GPT {results['preset']}, {results['world_size']} ranks, {results['dtype']}"
    above.set_title(f"Losses of all engines: {shape}")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def run(lines: list[dict], theme: dict):
    """The losses of a run that was restarted: where, on how many ranks it went on, and which steps it made again."""
    steps = [line for line in lines if "event" not in line]
    starts = [line for line in lines if line.get("event") == "start"]
    restarts = {line["step"]: line for line in lines if line.get("event") == "restart"}
    figure, axes = new(theme, 1, height=3.9)
    colour = ENGINE_COLOURS[starts[0]["stage"]]
    axes.plot([line["step"] for line in steps], [line["loss"] for line in steps], color=colour, label="loss of a batch")
    held_out = [line for line in steps if "held_out" in line]
    points = [line["step"] for line in held_out], [line["held_out"] for line in held_out]
    axes.plot(*points, "o", color=theme["ink"], markersize=5, label="loss on held-out text")
    top = max(line["loss"] for line in steps)
    for start in starts:
        text = f" {start['ranks']} rank{'s' * (start['ranks'] > 1)}"
        if start["step"] in restarts:
            back = restarts[start["step"]]
            text += f"\n back after {sum(back['seconds'].values()):.0f} s"
            axes.axvspan(start["step"], start["step"] + back["repeated"], color=theme["shade"], zorder=0)
        axes.axvline(start["step"], color=theme["ink"], linewidth=0.8, linestyle="--")
        axes.text(start["step"], top * 1.1, text, va="top", fontsize=8)
    axes.set_ylim(None, top * 1.12)
    axes.set_xlabel("training step (shaded: made twice, before the restart and after it)")
    axes.set_ylabel("loss, nats per token")
    axes.grid(axis="y", linewidth=0.5)
    axes.set_title(f"A run that was disturbed: {starts[0]['stage']}, GPT {starts[0]['preset']}")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def sweeps(results: dict, theme: dict):
    """Step time above (median, lowest and highest), peak below, a column per sweep."""
    names = list(results["sweeps"])
    figure, grid = new(theme, 2, len(names), height=5.4, sharey="row", squeeze=False)
    for column, name in enumerate(names):
        rows = results["sweeps"][name]
        labels, xs = list(rows), range(len(rows))
        stage = "zero1" if "zero1" in name else "zero2" if "zero2" in name else "zero3"
        colour = ENGINE_COLOURS[stage]
        median = [row["step_ms"] for row in rows.values()]
        low = [row["step_ms"] - row["step_ms_lowest"] for row in rows.values()]
        high = [row["step_ms_highest"] - row["step_ms"] for row in rows.values()]
        above, below = grid[0][column], grid[1][column]
        above.errorbar(xs, median, yerr=[low, high], marker="o", color=colour, capsize=3, linewidth=1.4)
        for x, row in zip(xs, rows.values()):
            above.annotate(f"{row['collectives']}", (x, row["step_ms"]), (5, 5), textcoords="offset points", fontsize=8)
        for key, line in (("peak_bytes", "-"), ("short_peak_bytes", "--")):
            peaks = [row[key] / 1e6 for row in rows.values()]
            below.plot(xs, peaks, line, marker="o", color=colour, linewidth=1.4)
        above.set_title(name.replace(", ", ",\n") if "," in name else f"{name},\n{stage}")
        above.set_xticks(xs, [""] * len(labels))
        below.set_xticks(xs, labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
        for axes in (above, below):
            axes.grid(axis="y", linewidth=0.5)
            axes.margins(x=0.15)
    grid[0][0].set_ylabel("step time, ms\n(number: collectives per step)")
    grid[0][0].set_ylim(bottom=0)
    grid[1][0].set_ylabel("peak, MB (10⁶ bytes)\n(dashed: on 8 tokens)")
    grid[1][0].set_ylim(bottom=0, top=grid[1][0].get_ylim()[1] * 1.04)
    figure.suptitle(
        f"What the options cost: GPT {results['preset']}, {results['ranks']} ranks over {results['backend']}, "
        f"{results['batch']} x {results['seq']} tokens per rank", fontsize=11)  # fmt: skip
    return figure


def scaling(results: dict, theme: dict):
    """Peak of one rank against the number of ranks, and below ZeRO-3's what it is for."""
    unit, size = ("GB", 1e9) if results["parameters"] > 2.5e8 else ("MB", 1e6)
    figure, axes = new(theme, 1, height=5.4)
    ranks = results["ranks"]
    bottom = [0.0] * len(ranks)
    if "zero3" in results["engines"]:
        # What sharding divides last, so that the floor lies at the bottom.
        order = [part for part in PARTS if part not in STATE] + ["gathered units", "gradients in flight"]
        order += [part for part in STATE if part not in order]
        for part in order:
            sizes = [row["peak_parts"].get(part, 0) / size for row in results["engines"]["zero3"]]
            if max(sizes) < 1e-3:
                continue
            top = [low + size for low, size in zip(bottom, sizes)]
            label = f"zero3: {part}"
            axes.fill_between(ranks, bottom, top, color=PART_COLOURS[part], alpha=0.75, linewidth=0, label=label)
            bottom = top
            if part == "gradients in flight":
                text = (
                    f"the floor, {top[-1]:.1f} {unit}: activations, temporaries,\nroot, units at work, their gradients"
                )
                arrow = {"arrowstyle": "->", "color": theme["ink"]}
                place = (ranks[-1], top[-1] * 1.55)
                axes.annotate(text, (ranks[-1], top[-1]), place, ha="right", fontsize=9, arrowprops=arrow)
    for name, rows in results["engines"].items():
        peaks = [row["peak_bytes"] / size for row in rows]
        style = {"color": ENGINE_COLOURS[name], "linestyle": ENGINE_LINES.get(name, "-")}
        axes.plot(ranks, peaks, marker="o", markersize=4, linewidth=1.8, label=f"{name}, peak", **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(number) for number in ranks])
    axes.set_xlim(ranks[0], ranks[-1])
    axes.set_ylim(0, None)
    axes.minorticks_off()
    axes.grid(linewidth=0.5)
    axes.set_xlabel("ranks N")
    axes.set_ylabel(f"{unit} of 10{'⁹' if unit == 'GB' else '⁶'} bytes on one rank at the peak")
    shape = f"GPT {results['preset']}, {results['precision']}, {results['batch']} x {results['seq']} tokens per rank"
    axes.set_title(f"Peak of one rank against the number of ranks: {shape}")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def _of_a_plan(name: str):
    """A figure of the planner's, which has a file of its own."""

    def draw(results: dict, theme: dict):
        from harness.measure.planner import pictures  # it draws with what stands above

        return getattr(pictures, name)(results, theme)

    return draw


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
            for part, (colour, hatch) in TIME_STYLES.items():
                if parts.get(part):
                    style = {"color": colour, "hatch": hatch, "edgecolor": theme["paper"], "linewidth": 0.5}
                    axes.barh(position, parts[part], 0.82, left=start, **style)
                    start += parts[part]
                    seen.add(part)
        axes.set_title(title)
        axes.set_xlabel("ms of a step (mean)")
        axes.grid(axis="x", linewidth=0.5)
        axes.set_axisbelow(True)
    grid[0][0].set_yticks(range(len(rows)), [f"{name} {rank}" for name, rank in rows])
    grid[0][0].set_ylabel("engine and rank")
    grid[0][0].invert_yaxis()
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=theme["paper"],
              label=TIME_LABELS.get(part, f"{part}, exposed" if "-" in part or part == "broadcast" else part))
        for part, (colour, hatch) in TIME_STYLES.items() if part in seen
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    first = results[0][1]
    shape = f"GPT {first['preset']}, {first['world_size']} ranks over {first['backend']}"
    figure.suptitle(
        f"Where the time of a step goes: {shape}, {first['batch']} x {first['seq']} tokens per rank", fontsize=11
    )
    return figure


def _delay(report: dict) -> str:
    """What was done to a rank of the referee's run."""
    if report["slow_rank"] is None:
        return "no rank is delayed"
    rank, seconds = report["slow_rank"]
    return f"rank {rank} is delayed by {seconds * 1e3:g} ms in every step"


# figure: (function, the JSON files in results/ that it draws; several with the title that each gets)
FIGURES = {
    "stages": (stages, ["memory-small-4ranks-64-tokens.json"]),
    "memory": (memory, ["memory-7b-8ranks.json"]),
    "live": (live, ["memory-small-4ranks-64-tokens.json"]),
    "lanes": (lanes, ["trace-zero3-cpu-2ranks.json", "trace-zero3-no-prefetch-cpu-2ranks.json"]),
    "losses": (losses, ["referee-cpu-2ranks-3.json"]),
    "step-time": (step_time, ["step-time-cpu-2ranks.json", "step-time-slow-rank-cpu-2ranks.json"]),
    "sweeps": (sweeps, ["sweeps-cpu-2ranks.json"]),
    "scaling": (scaling, ["memory-7b-1-to-1024-ranks.json"]),
    "plan-scale": (_of_a_plan("scale"), ["plan-scale.json"]),
    "plan-validation": (_of_a_plan("validation"), ["plan-validation.json"]),
    "run": (run, ["train-zero2-cpu.jsonl"]),
}


SOURCES = {
    "stages": "./launch.sh memory --json",
    "memory": "./launch.sh memory --json",
    "live": "./launch.sh memory --json",
    "lanes": "./launch.sh zero3 2 --trace",
    "losses": "./launch.sh compare --json",
    "step-time": "./launch.sh compare --json",
    "sweeps": "./launch.sh sweeps --json",
    "scaling": "./launch.sh memory --up-to 8 --json",
    "plan-scale": "./launch.sh plan --scale --json",
    "plan-validation": "./launch.sh plan --validate --json",
    "run": "./launch.sh train zero2 2 --folder",
}


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
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"figure {name!r} needs a measured JSON; {path}: {error}") from error
    if name == "lanes":
        return [(trace.get("otherData", {}).get("title", path), trace) for path, trace in zip(paths, loaded)]
    if name == "step-time":
        return [(_delay(report), report) for report in loaded]
    return loaded[0]


def draw(name: str, paths: list[str], out: str) -> list[str]:
    """Write the figure in both themes; returns the paths."""
    written, results = [], load(name, paths)
    for suffix, theme in THEMES.items():
        try:
            figure = FIGURES[name][0](results, theme)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{', '.join(paths)} is not what figure {name!r} is drawn from: {SOURCES[name]} writes that"
            ) from error
        written.append(os.path.join(out, f"{name}{suffix}.png"))
        figure.savefig(written[-1], dpi=110)
        plt.close(figure)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(prog="figures", description=__doc__.splitlines()[0])
    parser.add_argument("figures", nargs="*", help=f"any of {', '.join(FIGURES)} (default: all)")
    parser.add_argument("--json", nargs="+", help="draw one figure from this file (lanes, step-time: one or two)")
    parser.add_argument("--out", default="results/figures", help="folder to write to (default results/figures)")
    options = parser.parse_args()
    try:
        for name in options.figures:
            if name not in FIGURES:
                raise ValueError(f"no figure {name!r}; there are: {', '.join(FIGURES)}")
        if options.json and len(options.figures) != 1:
            raise ValueError(f"--json needs the name of one figure: {', '.join(FIGURES)}")
        os.makedirs(options.out, exist_ok=True)
        for name in options.figures or FIGURES:
            paths = options.json or [os.path.join("results", file) for file in FIGURES[name][1]]
            print("written: " + ", ".join(draw(name, paths, options.out)), flush=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
