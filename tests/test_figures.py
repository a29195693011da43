"""The figures: drawn from the committed measurements, with units on their axes, in the docs with their commands."""

import math
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgba

from harness.measure import figures, style
from harness.measure import pictures_of_steps as steps_pictures
from harness.measure.parts import HELD, PARTS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def drawn(name: str, theme: str = ""):
    paths = [str(RESULTS / file) for file in figures.FIGURES[name][1]]
    results = figures.load(name, paths)
    return results, figures.FIGURES[name][0](results, style.THEMES[theme])


@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_axis_has_its_unit_and_the_docs_the_picture_with_its_command(name):
    _, figure = drawn(name)
    labels = [label for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel()) if label]
    assert all(re.search(r"\b(MB|GB|bytes|ms|nats|ranks?|step|fraction)\b", label) for label in labels), labels
    # The axes that have none are categories (engines, lanes, options) or share another's.
    expected = {"stages": 5, "memory": 1, "live": 5, "lanes": 4, "losses": 3, "step-time": 3, "sweeps": 2}
    expected |= {"scaling": 2, "run": 2, "plan-scale": 5, "plan-validation": 4}
    assert len(labels) == expected[name]
    shown = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for suffix in style.THEMES:
        file = f"results/figures/{name}{suffix}.png"
        assert f'"../{file}"' in shown and (ROOT / file).exists()
    assert f"./launch.sh figures {name}\n" in shown


def test_the_stages_figure_draws_what_each_rank_keeps():
    """Every byte that a rank holds is filled, all ranks' shards together are one copy, and none lies over another."""
    results, figure = drawn("stages")
    part_of = {to_rgba(style.PART_COLOURS[part]): part for part in HELD}
    for axes, name in zip(figure.axes, ("ddp", "zero1", "zero2", "zero3"), strict=True):
        held = results["engines"][name]["held_bytes"]
        for part in HELD:
            filled = [patch for patch in axes.patches if part_of.get(patch.get_facecolor()) == part]
            assert len(filled) == results["ranks"]
            for patch in filled:
                assert patch.get_height() * results["parameters"] == pytest.approx(held[part])
            starts = sorted(patch.get_y() for patch in filled)
            if starts[0] == starts[-1]:  # whole on every rank
                assert held[part] == results["engines"]["ddp"]["held_bytes"][part]
            else:  # side by side
                height = filled[0].get_height()
                assert starts == pytest.approx([starts[0] + rank * height for rank in range(len(starts))], rel=1e-4)


def test_the_memory_figure_draws_what_was_measured():
    results, figure = drawn("memory")
    axes = figure.axes[0]
    place_of = {label.get_text(): place for place, label in zip(axes.get_yticks(), axes.get_yticklabels())}
    for name, row in results["engines"].items():
        title = name + " (stand-in)" * bool(row.get("stand_in"))
        for what, parts in (("held", row["held_bytes"]), ("peak", row["peak_parts"])):
            place = place_of[f"{title}, {what}"]
            bars = [bar for bar in axes.patches if bar.get_y() < place < bar.get_y() + bar.get_height()]
            widths = {bar.get_facecolor(): bar.get_width() for bar in bars if bar.get_width()}
            expected = {to_rgba(style.PART_COLOURS[part]): nbytes / 1e9 for part, nbytes in parts.items() if nbytes}
            assert widths == pytest.approx(expected)
            ticks = [segment[0][0] for lines in axes.collections for segment in lines.get_segments()
                     if segment[0][1] < place < segment[1][1]]  # fmt: skip
            formula = [row["formula_bytes"] / 1e9] * 2  # in ink, over the paper's edge
            assert ticks == pytest.approx(formula if what == "held" else [])
            (words,) = [text.get_text() for text in axes.texts if getattr(text, "xy", "  ")[1] == place]
            assert words.startswith(f"{sum(parts.values()) / 1e9:.4g}")
            assert words.endswith("before most gradients") or (name, what) != ("zero2", "peak")
    marked = [line.get_xdata()[0] for line in axes.lines]
    assert marked == [24, 40, 80, 141]  # GPUs


def test_the_live_figure_stacks_the_parts_of_every_engine():
    results, figure = drawn("live")
    for axes, row in zip(figure.axes, results["engines"].values(), strict=True):
        assert axes.get_yscale() == "linear" and axes.get_ylim()[0] == 0
        tops = [path.vertices[:, 1].max() for area in axes.collections for path in area.get_paths()]
        curve = row["curve"]
        highest = max(sum(curve[part][index] for part in PARTS) for index in range(len(curve["phase"])))
        assert max(tops) == pytest.approx(highest, rel=2e-3)  # parts too small to see are left out
        assert highest == pytest.approx(row["peak_bytes"] / 1e6, rel=0.02)


def test_gathers_and_reductions_are_named_by_their_unit():
    """Gathered before most of it computes and reduced after it, in both traces, on both ranks."""
    results, figure = drawn("lanes")
    for _, trace in results:
        units = steps_pictures.units_of_collectives(trace)
        for rank in (0, 1):
            mine = [event for event in steps_pictures.step_of(trace) if event["pid"] == rank]
            works = {}  # unit -> its longest computation in forward and in backward
            for event in mine:
                if event["cat"] == "compute" and event["name"] != "root" and event["args"].get("step", "")[:1] in "12":
                    key = event["args"]["step"][:1], event["name"]
                    works[key] = max(works.get(key, event), event, key=lambda one: one["dur"])
            named = [(event, units[id(event)]) for event in mine if id(event) in units and units[id(event)] != "root"]
            gathers = [pair for pair in named if pair[0]["name"] == "all-gather"]
            reductions = [pair for pair in named if pair[0]["name"] == "reduce-scatter"]
            assert len(gathers) == len(works) == 12 and len(reductions) == 6
            for (event, unit), step in zip(gathers, "1" * 6 + "2" * 6):
                assert event["ts"] + event["dur"] < works[step, unit]["ts"] + works[step, unit]["dur"]
                assert event["ts"] < works[step, unit]["ts"]
            for event, unit in reductions:
                assert works["2", unit]["ts"] < event["ts"]


def test_the_losses_figure_draws_every_difference():
    results, figure = drawn("losses")
    runs, below = results["runs"], figure.axes[1]
    for line, name in zip(below.lines, (name for name in runs if name != "ddp")):
        off = [abs(a - b) for a, b in zip(runs[name]["losses"], runs["ddp"]["losses"])]
        assert list(line.get_xdata()) == [max(value, 1e-9) for value in off]


def test_the_step_time_figure_draws_the_whole_step():
    """Each bar is as long as its rank's step, and what it waited for another one has the colour of waiting."""
    results, figure = drawn("step-time")
    waiting = to_rgba(style.TIME_STYLES["waiting"][0])
    for axes, (_, report) in zip(figure.axes, results, strict=True):
        runs = [run for name, run in report["runs"].items() if name != "single"]  # one process waits for nobody
        ranks = [rank for run in runs for rank in run["step_time"]["ranks"]]
        for position, rank in enumerate(ranks):
            bars = [patch for patch in axes.patches if round(patch.get_y() + patch.get_height() / 2) == position]
            assert sum(bar.get_width() for bar in bars) == pytest.approx(rank["step_ms"], rel=1e-3)
            waited = [bar.get_width() for bar in bars if bar.get_facecolor() == waiting]
            assert sum(waited) == pytest.approx(rank["waiting_ms"])
    plain, slow = (report for _, report in results)
    assert plain["slow_rank"] is None and slow["slow_rank"][0] == 1
    assert {run["step_time"]["slowest_rank"] for name, run in slow["runs"].items() if name != "single"} == {1}


def linear(colour: str) -> list[float]:
    """Red, green and blue, in proportion to the light."""
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgba(colour)[:3]]


def luminance(colour: str) -> float:
    """Relative luminance, 0 to 1 (WCAG 2.1)."""
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(colour)))


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def lab(colour: str) -> tuple[float, float, float]:
    """CIE L*a*b* (D65)."""
    red, green, blue = linear(colour)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = luminance(colour)
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


GROUPS = {"parts": style.PART_STYLES, "lanes": style.LANE_STYLES, "time": style.TIME_STYLES}


@pytest.mark.parametrize("group", GROUPS)
def test_colours_are_told_from_both_papers_and_from_each_other_in_grey(group):
    styles = list(GROUPS[group].values())
    for colour, _ in styles:
        assert all(contrast(colour, theme["paper"]) >= 3 for theme in style.THEMES.values()), colour
    for index, (colour, hatch) in enumerate(styles):
        assert all(hatch != other or contrast(colour, tone) > 1.25 for tone, other in styles[:index]), colour


def test_engines_are_told_apart_without_colour():
    drawn_with = [(engine.mark, engine.line) for engine in style.ENGINES.values()]
    assert len(set(drawn_with)) == len(drawn_with)
    for engine in style.ENGINES.values():
        assert all(contrast(engine.shade, theme["paper"]) >= 3 for theme in style.THEMES.values())


def test_a_colour_means_one_thing():
    """The same colour only for what is the same thing, or what moves it; all others are far apart (CIE76)."""
    meanings = {
        **{part: {part} for part in PARTS},
        "gathered units": {"gathered units", "gather", "all-gather"},
        "gradients in flight": {"gradients in flight", "reduce", "all-reduce", "reduce-scatter"},
        "optimizer": {"optimizer", "update"},
        "computation": {"forward", "backward", "compute"},
    }
    meaning_of = {name: meaning for meaning, names in meanings.items() for name in names}
    assert set(style.PART_STYLES) == set(PARTS)
    every = [(name, colour) for group in GROUPS.values() for name, (colour, _) in group.items()]
    for index, (name, colour) in enumerate(every):
        for other, tone in every[:index]:
            one, two = meaning_of.get(name, name), meaning_of.get(other, other)
            distance = math.dist(lab(colour), lab(tone))
            if one != two:
                assert distance > 16, (name, other)
            elif one != "computation":
                assert distance == 0, (name, other)
    for engine in style.ENGINES.values():  # greys
        assert math.dist(lab(engine.shade)[1:], (0, 0)) < 8, engine.name


def test_the_command(tmp_path, monkeypatch):
    source = RESULTS / figures.FIGURES["losses"][1][0]
    monkeypatch.setattr("sys.argv", ["figures", "losses", "--json", str(source), "--out", str(tmp_path)])
    figures.main()
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["losses-dark.png", "losses.png"]
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in tmp_path.iterdir())
