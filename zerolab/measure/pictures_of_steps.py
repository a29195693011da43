"""Pictures of steps: when a rank computes and sends, how far the engines' losses lie apart, what the options cost."""

import re
from collections import defaultdict

from zerolab.measure.style import BELOW, INK, LANES, PAPER, SAID, engine_look, headline, key, look, new


def lanes(*traces: dict):
    """Per rank: what it computes, and which collectives are under way, from traces; below, the live memory."""
    read, heights = [*map(_read, traces)], []
    for _, live in read:
        heights += [2 * len(live) + 0.6, 2]
    height = 0.62 * sum(heights[::2]) + 1.3 * len(traces) + 1.3
    figure, grid = new(len(heights), height=height, gridspec_kw={"height_ratios": heights})
    for trace, (rows, live), axes, strip in zip(traces, read, grid[::2], grid[1::2]):
        # Each trace on a scale of its own: one step says nothing about speed.
        latest = max(start + length for _, start, length, *_ in sum(rows.values(), []))
        for place, row in enumerate(rows):
            _draw_row(axes, place, rows[row], latest)
        axes.set_yticks(range(len(rows)), [f"rank {rank} {what}" for rank, what in rows])
        axes.set_ylim(len(rows) - 0.4, -0.8)
        axes.set_title(trace["otherData"]["title"], loc="left", fontsize=10)
        axes.set(xlim=(0, 1.02 * latest), xticklabels=[])
        for rank, points in live.items():
            style = ("-", ":", "--", "-.")[rank % 4]
            strip.step(*zip(*points), where="post", linewidth=1.0, linestyle=style, label=f"rank {rank}")
        strip.grid(axis="y")
        words = "ms since the step began; numbers: the unit or bucket"
        strip.set(xlim=(0, 1.02 * latest), ylim=(0, None), xlabel=words, ylabel="live MB")
    grid[-1].legend(loc="lower right", ncols=4)
    shape = "a gather or reduce lasts from its issue on, waiting included"
    headline(figure, "Compare the order, not the lengths: one step, with instruments", shape)
    figure.legend(handles=key(LANES), **BELOW | {"ncols": 5})
    return figure


def _read(trace: dict) -> tuple[dict, dict]:
    """({(rank, "compute", "gather" or "reduce"): its bars in order}, {rank: [(ms, live MB)]}) since the step began.

    A bar is (which of LANES, start, ms, the unit's or bucket's number, whether another of its kind is under way).
    """
    rows, live, threads = defaultdict(list), defaultdict(list), {}
    for event in sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0)):  # names of threads come first
        rank, told = event["pid"], event["args"]
        start = event.get("ts", 0) / 1e3 - trace["otherData"]["step_begins_ms"]
        sends = event.get("cat") == "collectives"
        lane = SAID["lane_of"].get(event["name"] if sends else told.get("step", "")[:1])
        if event["name"] == "thread_name":
            threads[rank, event["tid"]] = told["name"]
        elif event["name"] == "live":
            live[rank].append((start, told["MB"]))
        elif lane and start >= 0:
            name = told.get("unit", "") if sends else event["name"]
            number = "R" if name == "root" else re.split("[. ]", name)[-1]  # of "blocks.3" and "bucket 3"
            # One that is under way beside another of its kind has a thread of its own.
            beside = threads[rank, event["tid"]].endswith(" 2")
            rows[rank, lane if sends else "compute"].append((lane, start, event["dur"] / 1e3, number, beside))
    return dict(sorted(rows.items())), live


def _draw_row(axes, row: int, bars: list[tuple], latest: float) -> None:
    """What a rank computes, or its gathers, or its reductions."""
    free_from = 0.0  # where the next number may begin
    for lane, start, length, number, beside in bars:
        middle = start + length / 2
        if lane in ("gather", "reduce"):  # lower, with room for the number above, where it can be read
            place = (row + 0.12, 0.28) if beside else (row - 0.16, 0.56)
            middle = max(middle, free_from)
            axes.text(middle, row - 0.19, number, ha="center", va="bottom", fontsize=7)
            free_from = middle + 0.011 * latest
        else:
            place = (row - 0.4, 0.8)
            if lane != "update" and number != "R" and length > 0.018 * latest:
                axes.text(middle, row, number, ha="center", va="center", fontsize=8, color=PAPER, fontweight="bold")
        axes.broken_barh([(start, length)], place, **look(lane))


def losses(results: dict):
    """Above the reference's losses, which the others cannot be told from; below how far each engine is from them."""
    runs = results["runs"]
    reference = "ddp" if "ddp" in runs else next(iter(runs))
    expected = runs[reference]["losses"]
    others = [name for name in runs if name != reference]
    ratios = [3, 1 + 0.45 * len(others)]
    figure, (above, below) = new(2, height=3.6 + 0.27 * len(others), gridspec_kw={"height_ratios": ratios})
    above.plot(range(1, len(expected) + 1), expected, linewidth=1.6)
    above.set(ylabel="loss, nats per token", xlabel=f"training step of {reference}")
    tolerance = max(run.get("tolerance", 0) for run in runs.values())
    floor, said = 1e-9, []
    for place, name in enumerate(others):
        off = [abs(a - b) for a, b in zip(runs[name]["losses"], expected)]
        # A line above the next: how often that difference came is the darkness of the mark.
        marks = engine_look(name, color=INK, linestyle="none")
        below.plot([max(value, floor) for value in off], [place] * len(off), **marks, alpha=0.35, ms=7, clip_on=False)
        said.append(f"{off.count(0)} of {len(off)} equal, {max(off):.0e}" if any(off) else "all equal")
    below.secondary_yaxis("right").set_yticks(range(len(others)), said, fontsize=8)
    if tolerance:
        below.axvline(tolerance, linewidth=0.8, linestyle="--")
        below.text(tolerance, -0.75, "allowed ", ha="right", va="center", fontsize=8)
    words = f"difference from {reference} in each step, nats (0: equal to the bit)"
    below.set(xscale="log", xlim=(floor / 2, max(tolerance, 1e-5) * 12), xlabel=words)
    below.set_xticks([floor, 1e-8, 1e-6, 1e-4, 1e-2], ["0", "10⁻⁸", "10⁻⁶", "10⁻⁴", "10⁻²"])
    below.minorticks_off()
    below.set_yticks(range(len(others)), others)
    below.set_ylim(len(others) - 0.4, -1.1)
    above.grid()
    below.grid(axis="x")
    shape = f"GPT {results['preset']}, {results['world_size']} ranks, {results['dtype']}"
    equal = f"{said.count('all equal')} of {len(others)} engines"
    finding = f"{equal} have {reference}'s losses to the bit in all {len(expected)} steps"
    headline(figure, finding, shape)
    return figure


def sweeps(results: dict):
    """Step time above (median as a dot, lowest to highest as a line), peak below, a column per sweep."""
    figure, grid = new(2, len(results["sweeps"]), height=5.6, sharey="row", squeeze=False)
    for (above, below), (name, rows) in zip(grid.T, results["sweeps"].items()):
        xs = range(len(rows))
        values = {key: [row[key] for row in rows.values()] for key in next(iter(rows.values()))}
        above.vlines(xs, values["step_ms_lowest"], values["step_ms_highest"], linewidth=1.2, alpha=0.6)
        above.plot(xs, values["step_ms"], "o", markersize=7)
        below.plot(xs, [nbytes / 1e6 for nbytes in values["peak_bytes"]], "o", markersize=7, clip_on=False)
        short = [nbytes / 1e6 for nbytes in values["short_peak_bytes"]]
        below.plot(xs, short, "o", markersize=7, markerfacecolor=PAPER)
        above.set_title(name.replace(", ", ",\n") if "," in name else f"{name},\nzero3")
        above.set_xticks(xs, [""] * len(xs))
        # Where there is room, how many collectives a step takes stands in the row's name.
        labels = [f"{label} ({row['collectives']})" for label, row in rows.items()]
        below.set_xticks(xs, labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
        for axes in (above, below):
            axes.grid(axis="y")
            axes.set_xlim(-0.6, len(xs) - 0.4)
    grid[0][0].set(ylabel="step time, ms\n(median, and all rounds)", ylim=(0, None))
    grid[1][0].set(ylabel="peak, MB (10⁶ bytes)\n(empty: on 8 tokens)", ylim=(0, None))
    figure.supxlabel("in brackets: collectives per step", fontsize=9)
    tokens = f"{results['batch']} x {results['seq']} tokens per rank"
    shape = f"GPT {results['preset']}, {results['ranks']} ranks over {results['backend']}, {tokens}"
    headline(figure, "What each choice costs in time, and at the peak", shape)
    return figure
