"""The planner's figures. What they show is predicted, and they say so."""

from harness.measure.style import engine_look, new


def sweep(results: dict, theme: dict):
    """Step time above, exposed share below, a line per engine along one option."""
    figure, (above, below) = new(theme, 2, height=5.6, sharex=True)
    for engine, rows in results["engines"].items():
        style = engine_look(engine)
        xs = [row["at"] for row in rows]
        above.plot(xs, [row["step_s"] * 1e3 for row in rows], markersize=4, label=engine, **style)
        below.plot(xs, [row["exposed"] for row in rows], markersize=4, **style)
    if results["sweep"] != "prefetch":
        above.set_xscale("log", base=2)
        ticks = sorted({row["at"] for rows in results["engines"].values() for row in rows})
        below.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        below.minorticks_off()
    units = {"bandwidth": "GB/s", "bucket": "MiB", "micro-batch": "sequences", "prefetch": "units ahead"}
    above.set(title=f"Predicted: {results['title']}", ylabel="step, ms (predicted)", ylim=(0, None))
    below.set(ylabel="exposed, fraction of the step", ylim=(0, None))
    below.set_xlabel(f"{results['sweep']} {units.get(results['sweep'], '')}".strip())
    for axes in (above, below):
        axes.grid(linewidth=0.5)
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def scale(results: dict, theme: dict):
    """Step time, exposed share and live memory against the number of GPUs, a column per model."""
    presets = list(dict.fromkeys(point["preset"] for point in results["points"]))
    figure, grid = new(theme, 3, len(presets), height=7.2, sharex=True, squeeze=False)
    shown = (("step_s", 1), ("exposed", 1), ("peak_bytes", 1e-9))
    ticks = sorted({point["ranks"] for point in results["points"]})
    for axes, label in zip(grid[:, 0], ("step, s", "exposed, fraction of the step", "live at the peak, GB")):
        axes.set_ylabel(label)
    for column, preset in enumerate(presets):
        for engine in dict.fromkeys(point["engine"] for point in results["points"]):
            mine = [point for point in results["points"] if (point["preset"], point["engine"]) == (preset, engine)]
            style = engine_look(engine)
            for axes, (key, factor) in zip(grid[:, column], shown):
                axes.plot([point["ranks"] for point in mine], [point[key] * factor for point in mine], **style, ms=0)
                for point in mine:
                    face = style["color"] if point["fits"] else theme["paper"]
                    axes.plot(point["ranks"], point[key] * factor, markersize=5, markerfacecolor=face, **style)
            grid[0][0].plot([], [], label=None if column else engine, **style)
        for axes in grid[:, column]:
            axes.grid(linewidth=0.5)
        above, middle, below = grid[:, column]
        above.set(title=preset, ylim=(0, None))
        middle.set_ylim(0, None)
        below.axhline(results["memory_gb"], color=theme["ink"], linewidth=0.8, linestyle="--")
        below.set_xscale("log", base=2)
        below.set_xticks(ticks, ticks)
        below.set(xlabel="ranks, one on each GPU", yscale="log")
        low, high = below.get_ylim()
        marks = [mark for mark in (5, 10, 20, 50, 100, 200, 500, 1000) if low < mark < high]
        below.set_yticks(marks, marks)
        below.minorticks_off()
    how = f"{results['gpu']}, {results['precision']}, micro-batch {results['micro_batch']}, blocks recomputed"
    figure.suptitle(f"Predicted, not measured: {how} (empty: does not fit)", fontsize=11)
    figure.legend(loc="outside lower center", ncols=4)
    return figure


def validation(results: dict, theme: dict):
    """Predicted against published, throughput on the left and memory on the right; the shade is 10% off."""
    figure, (left, right) = new(theme, 1, 2, height=4.4)
    for axes, published, predicted, factor, title in (
        (left, "published_tokens_per_s", "predicted_tokens_per_s", 1, "tokens/s per rank"),
        (right, "published_peak_bytes", "predicted_peak_bytes", 1e-9, "peak memory, GB"),
    ):
        rows = [row for row in results["rows"] if row[published]]
        ends = [edge(row[key] for row in rows for key in (published, predicted)) * factor for edge in (min, max)]
        line = [ends[0] * 0.8, ends[1] * 1.2]
        axes.plot(line, line, color=theme["ink"], linewidth=0.8)
        axes.fill_between(line, [y * 0.9 for y in line], [y * 1.1 for y in line], color=theme["shade"], zorder=0)
        for row in rows:
            own = {"markerfacecolor": theme["paper"]} if row["fitted"] and axes is left else {}
            style = engine_look(row["engine"], **own)
            axes.plot(row[published] * factor, row[predicted] * factor, markersize=6, **style)
        axes.set(xscale="log", yscale="log", xlabel=f"published {title}", ylabel=f"predicted {title}")
        ticks = [tick for tick in (1e3, 2e3, 5e3, 1e4, 2e4, 4e4) if line[0] < tick < line[1]]
        ticks = ticks if axes is left else [20, 30, 40, 50, 60, 80]
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.set_yticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(linewidth=0.5)
    for engine in dict.fromkeys(row["engine"] for row in results["rows"]):
        left.plot([], [], label=engine, **engine_look(engine, linestyle="none"))
    left.plot([], [], "o", color=theme["ink"], markerfacecolor=theme["paper"], label="used in the fit")
    figure.legend(loc="outside lower center", ncols=5)
    return figure
