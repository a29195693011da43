"""The planner's figures. They show predictions, and their labels say so."""

from zerolab.measure.figures import COLOURS, INK, PAPER, SHADE, engine_look, new
from zerolab.run.names import engines_of

# Here an engine has a colour as well: no part and no activity is shown.
HUES = [COLOURS[part] for part in ("parameters", "gradients", "optimizer", "activations", "temporaries", "broadcast")]
HUES += [COLOURS["forward"], COLOURS["host"]]
COLOUR_OF = dict(zip(engines_of("plan"), HUES))


def _look(engine: str, **own) -> dict:
    """An engine's own mark and line, in its colour here."""
    return engine_look(engine, **{"color": COLOUR_OF[engine]} | own)


def sweep(results: dict):
    """Step time above, exposed share below, a line per engine along one option."""
    figure, (above, below) = new(2, height=5.6, sharex=True)
    for engine, rows in results["engines"].items():
        style = _look(engine)
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


def scale(results: dict):
    """A column per network: published models with measured dots above, and the exposed share of 7b and 70b below.

    Beyond the last published row the paper is shaded and the lines are dotted.
    """
    figure, grid = new(3, len(results["covered"]), height=8.4, sharex=True, sharey="row")
    ranks = sorted({point["ranks"] for point in results["points"]})
    for column, (network, covered) in zip(grid.T, results["covered"].items()):
        column[0].set_title({"infiniband": "InfiniBand", "efa": "EFA"}[network])
        curves = [curve for curve in results["curves"] if curve["network"] == network]
        for curve, colour, mark in zip(curves, HUES[1:], "os"):
            points = curve["points"]
            ours = {point["ranks"]: point["predicted"] for point in points}
            dots = {point["ranks"]: point["published"] for point in points if point["published"]}
            look = {"color": colour, "label": f"{curve['model']}, {curve['engine']}"}
            _known_and_not(column[0], ours, covered, **look)
            column[0].plot(list(dots), list(dots.values()), mark, color=colour, markersize=6)
        column[0].plot([], [], "o", color=INK, label="published")
        column[0].set_yscale("log")
        column[0].set_yticks([5e2, 2e3, 1e4, 5e4], ["500", "2,000", "10,000", "50,000"])
        column[0].legend(loc="lower left")
        for axes, preset in zip(column[1:], ("7b", "70b")):
            for engine in dict.fromkeys(point["engine"] for point in results["points"]):
                wanted = {"preset": preset, "engine": engine, "network": network}
                mine = [point for point in results["points"] if wanted.items() <= point.items()]
                colour, mark = _look(engine)["color"], _look(engine)["marker"]
                _known_and_not(axes, {point["ranks"]: point["exposed"] for point in mine}, covered, color=colour)
                axes.plot([], [], color=colour, marker=mark, label=engine)
                for point in mine:
                    face = colour if point["fits"] else PAPER
                    axes.plot(point["ranks"], point["exposed"], mark, color=colour, markerfacecolor=face)
            axes.set_ylim(0, 1)
        for axes in column:
            axes.axvspan(covered, 2 * ranks[-1], color=SHADE, zorder=0)
            axes.grid(linewidth=0.5)
        column[2].set_xscale("log", base=2)
        column[2].set_xlim(ranks[0] / 1.3, ranks[-1] * 1.3)
        column[2].set_xticks(ranks, [f"{tick:,}" if tick != ranks[-2] else "" for tick in ranks])  # the last two touch
        column[2].minorticks_off()
        column[2].set_xlabel("ranks, one on each GPU")
    for axes, label in zip(
        grid[:, 0], ("tokens/s per rank", "7b: exposed share of a step", "70b: exposed share of a step")
    ):
        axes.set_ylabel(label)
    how = f"{results['gpu']}, {results['precision']}; 7b and 70b: micro-batch {results['micro_batch']}, recomputed"
    figure.suptitle(f"Predicted (lines): {how}\nempty: does not fit; shaded: beyond any published row", fontsize=11)
    figure.legend(*grid[1][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _known_and_not(axes, points: dict, covered: int, label=None, **look) -> None:
    """A line through {ranks: value}, dotted beyond the largest measured number of ranks."""
    known = [rank for rank in points if rank <= covered]
    beyond = [rank for rank in points if rank >= known[-1]]
    axes.plot(known, [points[rank] for rank in known], label=label, **look)
    axes.plot(beyond, [points[rank] for rank in beyond], linestyle=":", **look)


def validation(results: dict):
    """Predicted against published throughput, and in the second axes memory. The shade marks errors up to 10%."""
    figure, (left, right) = new(1, 2, height=4.4)
    for axes, published, predicted, factor, title in (
        (left, "published_tokens_per_s", "predicted_tokens_per_s", 1, "tokens/s per rank"),
        (right, "published_peak_bytes", "predicted_peak_bytes", 1e-9, "peak memory, GB"),
    ):
        rows = [row for row in results["rows"] if row[published]]
        ends = [edge(row[key] for row in rows for key in (published, predicted)) * factor for edge in (min, max)]
        line = [ends[0] * 0.8, ends[1] * 1.2]
        axes.plot(line, line, color=INK, linewidth=0.8)
        axes.fill_between(line, [y * 0.9 for y in line], [y * 1.1 for y in line], color=SHADE, zorder=0)
        for row in rows:
            own = {"markerfacecolor": PAPER} if row["fitted"] and axes is left else {}
            style = _look(row["engine"], **own)
            axes.plot(row[published] * factor, row[predicted] * factor, markersize=6, **style)
        axes.set(xscale="log", yscale="log", xlabel=f"published {title}", ylabel=f"predicted {title}")
        ticks = [tick for tick in (1e3, 2e3, 5e3, 1e4, 2e4, 4e4) if line[0] < tick < line[1]]
        ticks = ticks if axes is left else [20, 30, 40, 50, 60, 80]
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.set_yticks(ticks, [f"{tick:,.0f}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(linewidth=0.5)
    for engine in dict.fromkeys(row["engine"] for row in results["rows"]):
        left.plot([], [], label=engine, **_look(engine, linestyle="none"))
    left.plot([], [], "o", color=INK, markerfacecolor=PAPER, label="used in a fit")
    figure.suptitle("Predicted against published; line: equal, shaded: within 10%", fontsize=11)
    figure.legend(loc="outside lower center", ncols=5)
    return figure
