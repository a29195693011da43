"""Pictures of steps: when a rank computes and sends, how far the engines' losses lie apart, what the options cost."""

from harness.measure.style import LANE_STYLES, engine_look, headline, key, look, new, ruled


def lanes(results: list[tuple[str, dict]], theme: dict):
    """Per rank: what it computes, and which collectives are under way, from traces; below, the live memory."""
    heights = [2 * len(_ranks(trace)) + 0.6 for _, trace in results]
    ratios = [part for height in heights for part in (height, 2)]
    height = 0.62 * sum(heights) + 1.3 * len(results) + 1.3
    figure, grid = new(theme, 2 * len(results), height=height, gridspec_kw={"height_ratios": ratios})
    ahead = []
    for number, (title, trace) in enumerate(results):
        axes, strip, begins = grid[2 * number], grid[2 * number + 1], trace["otherData"]["step_begins_ms"]
        latest, labelled = _bars(axes, trace, theme)
        ahead += [_issued_ahead(trace)]
        axes.set_title(title + (f"\n{ahead[-1]}" if ahead[-1] else ""), loc="left", fontsize=10)
        for rank in _ranks(trace):
            counters = [e for e in trace["traceEvents"] if e["name"] == "live" and e["pid"] == rank]
            points = [(event["ts"] / 1e3 - begins, event["args"]["MB"]) for event in counters]
            style = {"linewidth": 1.0, "linestyle": ("-", ":", "--", "-.")[rank % 4]}
            strip.step(*zip(*points), where="post", color=theme["ink"], label=f"rank {rank}", **style)
        strip.grid(axis="y", linewidth=0.5)
        # Each trace on a scale of its own: one step says nothing about speed.
        axes.set(xlim=(0, 1.02 * latest), xticklabels=[])
        words = "ms since the step began" + ("; numbers: the unit or bucket" if labelled else "")
        strip.set(xlim=(0, 1.02 * latest), ylim=(0, None), xlabel=words, ylabel="live MB")
    grid[-1].legend(loc="lower right", ncols=4)
    finding = _beside(results[0][1])
    if len(results) > 1 and all(ahead):
        finding = "Prefetching changes the order: the next unit's gather is issued before this unit computes"
    shape = "compare the order, not the lengths; a gather or reduce lasts from its issue on, waiting included"
    headline(figure, finding, shape if len(results) > 1 else "one step, with instruments")
    figure.legend(handles=key(LANE_STYLES, theme), loc="outside lower center", ncols=5)
    return figure


def _ranks(trace: dict) -> list[int]:
    return sorted({event["pid"] for event in trace["traceEvents"]})


def _bars(axes, trace: dict, theme: dict) -> tuple[float, bool]:
    """Draw the lanes of one trace; returns (when the last bar ends, whether collectives have their unit's number)."""
    begins, latest = trace["otherData"]["step_begins_ms"], 0.0
    threads = {(event["pid"], event["tid"]): event["args"]["name"]
               for event in trace["traceEvents"] if event["ph"] == "M" and "tid" in event}  # fmt: skip
    rows = [(rank, lane) for rank in _ranks(trace) for lane in ("compute", "gather", "reduce")]
    units = units_of_collectives(trace)
    bars = []
    for event in step_of(trace):
        kind = _lane(event)
        if kind is None:
            continue
        row = rows.index((event["pid"], kind if kind in ("gather", "reduce") else "compute"))
        start, length = event["ts"] / 1e3 - begins, event["dur"] / 1e3
        # One that is under way beside another of its kind has a thread of its own, and half the height.
        half = threads[event["pid"], event["tid"]].endswith(" 2")
        bars.append((event, kind, row, start, length, half))
        latest = max(latest, start + length)
    free_from = dict.fromkeys(range(len(rows)), 0.0)  # where in each row the next number may begin
    for event, kind, row, start, length, half in sorted(bars, key=lambda bar: bar[3]):
        if kind in ("gather", "reduce"):  # lower, with room for the unit's number above
            place = (row + 0.12, 0.28) if half else (row - 0.16, 0.56)
        else:
            place = (row - 0.4, 0.8)
        axes.broken_barh([(start, length)], place, **look(LANE_STYLES[kind], theme))
        name = event["name"] if kind in ("forward", "backward") else units.get(id(event), "")
        name = name.rpartition(".")[2].rpartition(" ")[2]  # of "blocks.3" and of "bucket 3" the number
        if name and (name != "root" or kind in ("gather", "reduce")):
            text, wide = ("R" if name == "root" else name), length > 0.018 * latest
            if kind in ("forward", "backward") and wide:
                axes.text(start + length / 2, row, text, ha="center", va="center", fontsize=8, color="#ffffff",
                          fontweight="bold")  # fmt: skip
            elif kind in ("gather", "reduce"):  # beside the hatch, where it can be read
                middle = max(start + length / 2, free_from[row])
                axes.text(middle, row - 0.19, text, ha="center", va="bottom", fontsize=7)
                free_from[row] = middle + 0.011 * latest
    axes.set_yticks(range(len(rows)), [f"rank {rank} {lane}" for rank, lane in rows])
    axes.set_ylim(len(rows) - 0.4, -0.8)
    return latest, bool(units)


def step_of(trace: dict) -> list[dict]:
    """The computations and collectives of the step that the trace is about, in order of their start."""
    begins = trace["otherData"]["step_begins_ms"] * 1e3
    found = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["ts"] >= begins and e["cat"] != "steps"]
    return sorted(found, key=lambda event: event["ts"])


def units_of_collectives(trace: dict) -> dict[int, str]:
    """{id(event): its unit or bucket} of the step's collectives, as the trace says it."""
    return {id(event): event["args"]["unit"] for event in step_of(trace) if event["args"].get("unit")}


def _issued_ahead(trace: dict) -> str:
    """How many of rank 0's gathers were issued before a computation that does not need them, in words, or ""."""
    units, mine = units_of_collectives(trace), [event for event in step_of(trace) if event["pid"] == _ranks(trace)[0]]
    computing_units = {event["name"] for event in mine if event["cat"] == "compute"} - {"root"}  # no buckets
    ahead = gathers = 0
    for number, event in enumerate(mine):
        unit = units.get(id(event))
        if event["name"] != "all-gather" or unit not in computing_units:
            continue
        gathers += 1
        computing = [one["name"] for one in mine[number:] if one["cat"] == "compute" and one["name"] != "root"]
        ahead += bool(computing) and computing[0] != unit
    others = f"; {gathers - ahead} more hide behind the root" if 0 < ahead < gathers else ""
    words = f"{ahead} of {gathers} gathers of blocks were issued before another block computes{others}"
    return words if gathers else ""


def _beside(trace: dict) -> str:
    """How many of rank 0's collectives are under way while it computes, in words."""
    mine = [event for event in step_of(trace) if event["pid"] == _ranks(trace)[0]]
    works = [(e["ts"], e["ts"] + e["dur"]) for e in mine if e["cat"] == "compute"]
    # What a rank tells the others beside the step is a few bytes.
    sent = [e for e in mine if e["cat"] == "collectives" and e["args"].get("bytes", 0) > 1024]
    beside = sum(any(start < e["ts"] + e["dur"] and e["ts"] < end for start, end in works) for e in sent)
    return f"{beside} of {len(sent)} collectives are under way while the rank computes"


def _lane(event: dict) -> str | None:
    """Which of the lanes' styles an event of a trace has."""
    if event["cat"] == "collectives":
        return {"all-gather": "gather", "reduce-scatter": "reduce", "all-reduce": "reduce"}.get(event["name"])
    step = event["args"].get("step", "")
    if step.startswith("1"):
        return "forward"
    if step.startswith("2"):
        return "backward"
    return "update" if step.startswith("4") else None


def losses(results: dict, theme: dict):
    """Above the reference's losses, which the others cannot be told from; below how far each engine is from them."""
    runs = results["runs"]
    reference = "ddp" if "ddp" in runs else next(iter(runs))
    others = [name for name in runs if name != reference]
    figure, (above, below) = new(theme, 2, height=3.6 + 0.27 * len(others),
                                 gridspec_kw={"height_ratios": [3, 1 + 0.45 * len(others)]})  # fmt: skip
    steps = range(1, len(runs[reference]["losses"]) + 1)
    above.plot(steps, runs[reference]["losses"], color=theme["ink"], linewidth=1.6)
    above.set(ylabel="loss, nats per token", xlabel=f"training step of {reference}")
    tolerance = max(run.get("tolerance", 0) for run in runs.values())
    equal, farthest, floor = 0, 0.0, 1e-9
    for place, name in enumerate(others):
        off = [abs(a - b) for a, b in zip(runs[name]["losses"], runs[reference]["losses"])]
        # A line above the next: how often that difference came is the darkness of the mark.
        marks = engine_look(name, color=theme["ink"], linestyle="none")
        below.plot([max(value, floor) for value in off], [place] * len(off), **marks, alpha=0.35, ms=7, clip_on=False)
        exact = sum(value == 0 for value in off)
        equal += exact == len(off)
        farthest = max(farthest, *off)
        if exact == len(off):
            text, place_of_text = f"all {exact} steps equal", {"xytext": (9, 0), "va": "center"}
        else:  # above its marks, clear of the line of what is allowed
            text, place_of_text = f"{exact} of {len(off)} equal, {max(off):.0e}", {"xytext": (8, 7), "ha": "right"}
        below.annotate(text, (max(*off, floor), place), textcoords="offset points", fontsize=8, **place_of_text,
                       bbox={"facecolor": theme["paper"], "edgecolor": "none", "pad": 0.5})  # fmt: skip
    if tolerance:
        below.axvline(tolerance, color=theme["ink"], linewidth=0.8, linestyle="--")
        below.text(tolerance, -0.75, "allowed ", ha="right", va="center", fontsize=8)
    words = f"difference from {reference} in each step, nats (0: equal to the bit)"
    below.set(xscale="log", xlim=(floor / 2, max(tolerance, 1e-5) * 12), xlabel=words)
    below.set_xticks([floor, 1e-8, 1e-6, 1e-4, 1e-2], ["0", "10⁻⁸", "10⁻⁶", "10⁻⁴", "10⁻²"])
    below.minorticks_off()
    below.set_yticks(range(len(others)), others)
    below.set_ylim(len(others) - 0.4, -1.1)
    for axes, side in ((above, "both"), (below, "x")):
        ruled(axes, side)
    shape = f"GPT {results['preset']}, {results['world_size']} ranks, {results['dtype']}"
    finding = f"{equal} of {len(others)} engines have {reference}'s losses to the bit in all {len(steps)} steps"
    headline(figure, finding, shape)
    return figure


def sweeps(results: dict, theme: dict):
    """Step time above (median as a dot, lowest to highest as a line), peak below, a column per sweep."""
    names = list(results["sweeps"])
    figure, grid = new(theme, 2, len(names), height=5.6, sharey="row", squeeze=False)
    for column, name in enumerate(names):
        rows = results["sweeps"][name]
        xs = range(len(rows))
        # Where there is room, how many collectives a step takes stands in the row's name.
        labels = [f"{label} ({row['collectives']})" for label, row in rows.items()]
        above, below = grid[0][column], grid[1][column]
        lows, highs = ([row[f"step_ms_{end}"] for row in rows.values()] for end in ("lowest", "highest"))
        above.vlines(xs, lows, highs, color=theme["ink"], linewidth=1.2, alpha=0.6)
        above.plot(xs, [row["step_ms"] for row in rows.values()], "o", color=theme["ink"], markersize=7)
        for key_, style in (("peak_bytes", {}), ("short_peak_bytes", {"markerfacecolor": theme["paper"]})):
            below.plot(xs, [row[key_] / 1e6 for row in rows.values()], "o", color=theme["ink"], markersize=7, **style)
        above.set_title(name.replace(", ", ",\n") if "," in name else f"{name},\nzero3")
        above.set_xticks(xs, [""] * len(labels))
        below.set_xticks(xs, labels, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
        for axes in (above, below):
            ruled(axes)
            axes.set_xlim(-0.6, len(rows) - 0.4)
    grid[0][0].set(ylabel="step time, ms\n(median, and all rounds)", ylim=(0, None))
    most = grid[1][0].get_ylim()[1]
    grid[1][0].set(ylabel="peak, MB (10⁶ bytes)\n(empty: on 8 tokens)", ylim=(0, most * 1.04))
    figure.supxlabel("in brackets: collectives per step", fontsize=9)
    tokens = f"{results['batch']} x {results['seq']} tokens per rank"
    shape = f"GPT {results['preset']}, {results['ranks']} ranks over {results['backend']}, {tokens}"
    headline(figure, _dearest(results["sweeps"]), shape)
    return figure


def _dearest(sweeps: dict) -> str:
    """The choices of the sweeps that differ most in time, whose ranges may overlap all the same, and in peak."""
    times, peaks = {}, {}
    for name, rows in sweeps.items():
        for kept, of in ((times, "step_ms"), (peaks, "peak_bytes")):
            values = [row[of] for row in rows.values()]
            kept[name] = max(values) / min(values)
    slow, large = max(times, key=times.get), max(peaks, key=peaks.get)
    return f"Largest effect on time: {slow} (x {times[slow]:.2f}); on the peak: {large} (x {peaks[large]:.2f})"
