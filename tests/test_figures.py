"""The figures: drawn from the committed measurements, with units on their axes, in the docs with their commands."""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgba

from harness.measure import figures
from harness.measure.parts import HELD, PARTS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


def drawn(name: str, theme: str = ""):
    paths = [str(RESULTS / file) for file in figures.FIGURES[name][1]]
    results = figures.load(name, paths)
    return results, figures.FIGURES[name][0](results, figures.THEMES[theme])


@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_axis_has_its_unit_and_the_docs_the_picture_with_its_command(name):
    _, figure = drawn(name)
    labels = [label for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel()) if label]
    assert all(re.search(r"\b(MB|GB|bytes|ms|nats|ranks?|step|fraction)\b", label) for label in labels), labels
    # The axes that have none are categories (engines, lanes, options) or share another's.
    expected = {"stages": 5, "memory": 1, "live": 2, "lanes": 3, "losses": 3, "step-time": 3, "sweeps": 2}
    expected |= {"scaling": 2, "run": 2, "plan-scale": 5, "plan-validation": 4}
    assert len(labels) == expected[name]
    plt.close(figure)
    shown = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for suffix in figures.THEMES:
        file = f"results/figures/{name}{suffix}.png"
        assert f'"../{file}"' in shown and (ROOT / file).exists()
    assert f"./launch.sh figures {name}\n" in shown


def test_the_stages_figure_draws_what_each_rank_keeps():
    """Every byte that a rank holds is filled, all ranks' shards together are one copy, and none lies over another."""
    results, figure = drawn("stages")
    part_of = {to_rgba(figures.PART_COLOURS[part]): part for part in HELD}
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
    plt.close(figure)


def test_the_memory_figure_draws_what_was_measured():
    results, figure = drawn("memory")
    axes = figure.axes[0]
    at = {}
    for patch in axes.patches:
        if patch.get_width():
            at.setdefault(round(patch.get_y() + patch.get_height() / 2, 2), []).append(patch)
    for position, row in enumerate(results["engines"].values()):
        peak = sum(patch.get_width() for patch in at[round(position + 0.19, 2)])
        assert peak == pytest.approx(row["peak_bytes"] / 1e9)
        *held, formula = (patch.get_width() for patch in at[round(position - 0.19, 2)])
        assert sum(held) == pytest.approx(sum(row["held_bytes"].values()) / 1e9)
        assert formula == pytest.approx(row["formula_bytes"] / 1e9)
    plt.close(figure)


def test_the_step_time_figure_draws_the_whole_step():
    """Each bar is as long as its rank's step, and what it waited for another one has the colour of waiting."""
    results, figure = drawn("step-time")
    waiting = to_rgba(figures.TIME_STYLES["waiting"][0])
    for axes, (_, report) in zip(figure.axes, results, strict=True):
        runs = [run for name, run in report["runs"].items() if name != "single"]  # one process waits for nobody
        ranks = [rank for run in runs for rank in run["step_time"]["ranks"]]
        for position, rank in enumerate(ranks):
            bars = [patch for patch in axes.patches if round(patch.get_y() + patch.get_height() / 2) == position]
            assert sum(bar.get_width() for bar in bars) == pytest.approx(rank["step_ms"], rel=1e-3)
            waited = [bar.get_width() for bar in bars if bar.get_facecolor() == waiting]
            assert sum(waited) == pytest.approx(rank["waiting_ms"])
    plt.close(figure)
    plain, slow = (report for _, report in results)
    assert plain["slow_rank"] is None and slow["slow_rank"][0] == 1
    assert {run["step_time"]["slowest_rank"] for name, run in slow["runs"].items() if name != "single"} == {1}


def luminance(colour: str) -> float:
    """Relative luminance, 0 to 1 (WCAG 2.1)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgba(colour)[:3]]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_the_parts_of_a_step_are_told_apart_on_both_papers_and_in_grey():
    styles = list(figures.TIME_STYLES.values())
    for colour, _ in styles:
        assert all(contrast(colour, theme["paper"]) >= 3 for theme in figures.THEMES.values()), colour
    for index, (colour, hatch) in enumerate(styles):
        assert all(hatch != other or contrast(colour, tone) > 1.25 for tone, other in styles[:index]), colour


def test_a_colour_means_one_thing():
    colours = [*figures.PART_COLOURS.values(), *figures.ENGINE_COLOURS.values()]
    colours += [figures.LANE_COLOURS[step] for step in ("forward", "backward")]
    colours += [colour for colour, _ in figures.TIME_STYLES.values()]
    assert len(set(colours)) == len(colours)
    assert set(figures.PART_COLOURS) == set(PARTS)
    assert figures.LANE_COLOURS["gather"] == figures.PART_COLOURS["gathered units"]


def test_the_command(tmp_path, monkeypatch, capsys):
    source = RESULTS / figures.FIGURES["losses"][1][0]
    monkeypatch.setattr("sys.argv", ["figures", "losses", "--json", str(source), "--out", str(tmp_path)])
    figures.main()
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["losses-dark.png", "losses.png"]
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in tmp_path.iterdir())

    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"something": "else"}))
    for argv, said in (
        (["pie"], "no figure 'pie'; there are: stages, memory"),
        (["--json", str(source)], "--json needs the name of one figure: stages, memory"),
        (["losses", "--json", "/nowhere.json"], "/nowhere.json"),
        (["losses", "--json", str(wrong)], "is not what figure 'losses' is drawn from"),
    ):
        monkeypatch.setattr("sys.argv", ["figures", *argv, "--out", str(tmp_path)])
        with pytest.raises(SystemExit) as stopped:
            figures.main()
        assert stopped.value.code == 2 and said in capsys.readouterr().err
