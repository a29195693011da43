"""The figures: drawn from the committed measurements, with units on their axes, and shown in the docs."""

import re
from collections import Counter

import matplotlib
import matplotlib.pyplot as plt
import pytest

from zerolab.measure import figures, style
from zerolab.measure.memory_parts import PARTS
from zerolab.run.ranks import ROOT

# How many axes of each figure have a label. The others show categories (engines, lanes, options) or share a label.
NAMED_AXES = {
    "stages": 5,
    "memory": 1,
    "live": 5,
    "lanes": 4,
    "losses": 3,
    "step-time": 3,
    "sweeps": 2,
    "scaling": 2,
}


@pytest.fixture(autouse=True)
def closed(monkeypatch):
    monkeypatch.chdir(ROOT)
    yield
    plt.close("all")


def drawn(name: str):
    files = [f"results/{file}" for file in figures.FIGURES[name]["files"]]
    return figures.load(name, files), figures.picture(name, files)


@pytest.mark.parametrize("name", figures.FIGURES)
def test_every_axis_has_its_unit_and_the_docs_the_picture(name):
    _, figure = drawn(name)
    labels = [label for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel()) if label]
    assert all(re.search(r"\b(MB|GB|bytes|ms|nats|ranks?|step|fraction)\b", label) for label in labels), labels
    assert len(labels) == NAMED_AXES[name]
    shown = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    assert f"(../results/figures/{name}.png)" in shown


@pytest.mark.skipif(
    f"matplotlib=={matplotlib.__version__}\n" not in (ROOT / "requirements.txt").read_text(),
    reason="another matplotlib than the pinned one draws other pixels",
)
@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_committed_pictures_are_what_is_drawn_today(name, tmp_path):
    """After a change on purpose: ./launch.sh docs, and look at what is new."""
    new, old = plt.imread(figures.draw(name, tmp_path)), plt.imread(f"results/figures/{name}.png")
    assert new.shape == old.shape
    other = (abs(new - old).max(axis=2) > 0.05).mean()  # the share of dots: a processor's rounding is no change
    assert other < 5e-5, f"{name}.png: {other:.2%} of its dots are not those of results/figures"


def test_the_step_time_figure_draws_the_whole_step():
    """The bars of a column are as long as its ranks' steps: no part is left out."""
    results, figure = drawn("step-time")
    for axes, report in zip(figure.axes, results, strict=True):
        runs = [run for name, run in report["runs"].items() if name != "single"]  # one process waits for nobody
        expected = sum(rank["step_ms"] for run in runs for rank in run["step_time"]["ranks"])
        assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(expected, rel=1e-3)


def test_a_colour_means_one_thing_and_engines_are_told_apart_without_colour():
    """The same colour and hatch only for what is the same thing, or what moves it."""
    assert {*PARTS, *style.LANES, *style.TIMES} <= {*style.COLOURS}
    own = [name for name in style.COLOURS if name not in style.MOVES]
    looks = Counter(tuple(style.look(name).values()) for name in own)
    assert max(looks.values()) == 1
    lines = Counter((engine.mark, engine.line) for engine in style.ENGINES.values())
    assert max(lines.values()) == 1


def test_a_picture_is_a_light_card_on_any_page():
    """Nothing of it is transparent, and its corners are paper: ink is read on a dark page, too."""
    for file in (ROOT / "results" / "figures").iterdir():
        dots = plt.imread(file)
        assert dots.shape[2] == 3 or dots[..., 3].min() == 1, file.name
        assert (dots[[0, 0, -1, -1], [0, -1, 0, -1], :3] == 1).all(), file.name
    assert {file.stem for file in (ROOT / "results" / "figures").iterdir()} >= {*figures.FIGURES}
