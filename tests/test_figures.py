"""The figures: drawn from the committed measurements, with units on their axes, in the docs with their commands."""

import math
import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgba

from harness.measure import figures, style
from harness.measure.memory_parts import PARTS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def drawn(name: str):
    draw, files, _ = figures.FIGURES[name]
    results = figures.load(name, [str(RESULTS / file) for file in files])
    return results, draw(results, style.THEMES[""])


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


@pytest.mark.skipif(
    f"matplotlib=={matplotlib.__version__}\n" not in (ROOT / "requirements.txt").read_text(),
    reason="another matplotlib than the pinned one draws other pixels",
)
@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_committed_pictures_are_what_is_drawn_today(name, tmp_path, monkeypatch):
    """After a change on purpose: ./launch.sh figures, and look at what is new."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["figures", name, "--out", str(tmp_path)])
    figures.main()
    for suffix in style.THEMES:
        new, old = (plt.imread(folder / f"{name}{suffix}.png") for folder in (tmp_path, RESULTS / "figures"))
        assert new.shape == old.shape
        other = (abs(new - old).max(axis=2) > 0.05).mean()  # the share of dots: a processor's rounding is no change
        assert other < 5e-5, f"{name}{suffix}.png: {other:.2%} of its dots are not those of results/figures"


def test_the_step_time_figure_draws_the_whole_step():
    """The bars of a column are as long as its ranks' steps: no part is left out."""
    results, figure = drawn("step-time")
    for axes, (_, report) in zip(figure.axes, results, strict=True):
        runs = [run for name, run in report["runs"].items() if name != "single"]  # one process waits for nobody
        expected = sum(rank["step_ms"] for run in runs for rank in run["step_time"]["ranks"])
        assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(expected, rel=1e-3)


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
